// A plug-in in a process of its own, exported as a plug-in: what conformance demands of codecs holds behind the
// process. KVMANAGER_PLUGIN_HOST and KVMANAGER_PLUGIN_RUN name the process's program and the object that it loads.
#include <cstdlib>
#include <memory>
#include <utility>

#include "codecs/abi/export_codec.h"
#include "codecs/abi/plugin_codec.h"
#include "codecs/abi/plugin_process.h"
#include "codecs/abi/process_entries.h"
#include "kvmanager/base/status.h"

namespace {

void RegisterThroughProcess(kvmanager::CodecRegistry& registry) {
  // One for the life of this process: the table makes a registry for each codec.
  static const std::shared_ptr<kvmanager::PluginProcess> process = [] {
    kvmanager::PluginProcess::Options options;
    options.program = {std::getenv("KVMANAGER_PLUGIN_HOST")};
    options.path = std::getenv("KVMANAGER_PLUGIN_RUN");
    options.lanes = 2;
    auto started = kvmanager::PluginProcess::Start(std::move(options));
    KV_CHECK(started.ok());
    return *std::move(started);
  }();
  KV_CHECK(kvmanager::RegisterPlugin(kvmanager::MakeProcessSource(process), registry, nullptr).ok());
}

}  // namespace

KVMANAGER_EXPORT_CODEC("hack", RegisterThroughProcess)
