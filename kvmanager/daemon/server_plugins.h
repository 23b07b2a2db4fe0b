// The codec plug-ins of one daemon: loaded into it, or each in a process of its own. Owned by the Server; its thread.
#pragma once

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "codecs/abi/plugin_process.h"
#include "codecs/registry.h"
#include "codecs/waiting_codec.h"
#include "kvmanager/daemon/options.h"
#include "kvmanager/daemon/plugin_events.h"
#include "monitoring/metrics.h"

namespace kvmanager {

class ServerPlugins {
 public:
  /// Both outlive what is loaded. It outlives the registry's codecs.
  ServerPlugins(CodecRegistry* registry, Metrics* metrics) : registry_(registry), events_(metrics) {}

  /// Loads what `options` name. Errors: of plug-ins that cannot be used.
  absl::Status Load(const Options& options);
  /// Where the codecs of plug-ins with a process are made.
  const CodecWorkers& workers() const { return workers_; }
  /// Ends the processes; calls fail from here on. Before the daemon's workers end, which may wait for them.
  void Stop();

 private:
  CodecRegistry* const registry_;
  PluginEvents events_;
  CodecWorkers workers_;
  std::vector<std::shared_ptr<PluginProcess>> processes_;  // shared with the registry and the codecs
};

}  // namespace kvmanager
