#include "kvmanager/daemon/plugin_events.h"

#include <spdlog/spdlog.h>

#include <string>

namespace kvmanager {
namespace {

const char* Consequence(CodecEvents::Entry entry) {
  switch (entry) {
    case CodecEvents::Entry::kEncode:
      return "its pages stay raw";
    case CodecEvents::Entry::kDecode:
      return "what is read from the page is NaN";
    case CodecEvents::Entry::kAttend:
      return "attention is done on the decoded page, or gives NaN";
  }
  return "";
}

}  // namespace

PluginEvents::PluginEvents(Metrics* metrics)
    : decoded_pages_(metrics->Counter("attend_decoded_pages_total",
                                      "pages decoded for attention, their codec having none, once per head and call")) {
  for (int entry = 0; entry < kEntries; ++entry) {
    errors_[entry] = &metrics->Counter("codec_plugin_errors_total", "errors that codec plug-ins returned",
                                       {{"entry", EntryName(static_cast<Entry>(entry))}});
  }
}

void PluginEvents::OnDecodedPages(size_t pages) { decoded_pages_.Increment(static_cast<double>(pages)); }

void PluginEvents::OnError(Entry entry, const absl::Status& error, bool first) {
  errors_[static_cast<int>(entry)]->Increment();
  if (!first) return;
  spdlog::error("{}; {}. Further such errors of this codec are only counted", std::string(error.message()),
                Consequence(entry));
}

}  // namespace kvmanager
