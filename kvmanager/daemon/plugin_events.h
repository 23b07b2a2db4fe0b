// What plug-ins' codecs report, as metrics and as log lines: counted every time, logged the first time of each cache.
#pragma once

#include <array>

#include "codecs/abi/plugin_codec.h"
#include "monitoring/metrics.h"

namespace kvmanager {

/// Owned by the Server; outlives the codecs. Any thread.
class PluginEvents final : public CodecEvents {
 public:
  explicit PluginEvents(Metrics* metrics);
  void OnDecodedPages(size_t pages) override;
  void OnError(Entry entry, const absl::Status& error, bool first) override;

 private:
  prometheus::Counter& decoded_pages_;
  std::array<prometheus::Counter*, kEntries> errors_;  // by Entry
};

}  // namespace kvmanager
