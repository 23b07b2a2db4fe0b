// What plug-ins' codecs report, as metrics and as log lines: counted every time, logged the first time of each cache.
#pragma once

#include <array>
#include <map>
#include <string>

#include "absl/strings/string_view.h"
#include "codecs/abi/codec_events.h"
#include "kvmanager/base/mutex.h"
#include "monitoring/metrics.h"

namespace kvmanager {

/// Owned by the Server; outlives the codecs. Any thread.
class PluginEvents final : public CodecEvents {
 public:
  explicit PluginEvents(Metrics* metrics);
  void OnDecodedPages(size_t pages) override;
  void OnError(Entry entry, const absl::Status& error, bool first) override;
  void OnProcess(absl::string_view codec) override;
  void OnUnanswered(absl::string_view codec) override;
  void OnProcessEnded(absl::string_view codec, const absl::Status& why, int64_t restart_ms) override;

 private:
  struct OfProcess {
    prometheus::Counter& unanswered;
    prometheus::Counter& restarts;
  };
  OfProcess* Of(absl::string_view codec);  // nullptr: none was told

  Metrics* const metrics_;
  prometheus::Counter& decoded_pages_;
  std::array<prometheus::Counter*, kEntries> errors_;  // by Entry
  Mutex mutex_;
  std::map<std::string, OfProcess, std::less<>> processes_ ABSL_GUARDED_BY(mutex_);  // by codec; none is taken out
};

}  // namespace kvmanager
