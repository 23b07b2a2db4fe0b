#include "kvmanager/daemon/server_plugins.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <string>
#include <utility>

#include "codecs/abi/plugin_codec.h"
#include "codecs/abi/plugin_host.h"
#include "codecs/abi/process_entries.h"
#include "kvmanager/base/status.h"
#include "kvmanager/daemon/host_facts.h"

namespace kvmanager {

absl::Status ServerPlugins::Load(const Options& options) {
  if (!options.codec_plugin_process) return LoadCodecPlugins(options.codec_plugins, *registry_, &events_);
  const int threads = options.threads > 0 ? static_cast<int>(options.threads) : UsableCpus();
  for (const std::string& path : options.codec_plugins) {
    PluginProcess::Options process;
    process.program = {"/proc/self/exe", kPluginHostFlag};
    process.path = path;
    process.lanes = std::min(threads, PluginProcess::kLanesMax);
    process.events = &events_;
    KV_ASSIGN_OR_RETURN(std::shared_ptr<PluginProcess> started, PluginProcess::Start(std::move(process)));
    KV_RETURN_IF_ERROR(RegisterPlugin(MakeProcessSource(started), *registry_, &events_));
    spdlog::info("codec {} ({}) runs in process {}", started->name(), path, started->pid());
    workers_.Add(started->name(), started->workers());
    processes_.push_back(std::move(started));
  }
  return absl::OkStatus();
}

void ServerPlugins::Stop() {
  for (const auto& process : processes_) process->Stop();
}

}  // namespace kvmanager
