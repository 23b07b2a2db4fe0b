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
    : metrics_(metrics),
      decoded_pages_(metrics->Counter("attend_decoded_pages_total",
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

void PluginEvents::OnProcess(absl::string_view codec) {
  const MetricLabels labels = {{"codec", std::string(codec)}};
  OfProcess made{
      metrics_->Counter("codec_plugin_unanswered_total", "calls that a plug-in's process did not answer", labels),
      metrics_->Counter("codec_plugin_restarts_total", "ends of a plug-in's process", labels)};
  MutexLock lock(mutex_);
  processes_.emplace(codec, made);
}

PluginEvents::OfProcess* PluginEvents::Of(absl::string_view codec) {
  MutexLock lock(mutex_);
  const auto found = processes_.find(codec);
  return found == processes_.end() ? nullptr : &found->second;
}

void PluginEvents::OnUnanswered(absl::string_view codec) {
  if (OfProcess* const of = Of(codec)) of->unanswered.Increment();
}

void PluginEvents::OnProcessEnded(absl::string_view codec, const absl::Status& why, int64_t restart_ms) {
  if (OfProcess* const of = Of(codec)) of->restarts.Increment();
  spdlog::error(
      "{}; it is started again in {} ms. Until then its pages stay raw, and calls that read encoded ones are "
      "UNAVAILABLE. If this repeats, try the object with codec_conformance, or start the daemon without it",
      std::string(why.message()), restart_ms);
}

}  // namespace kvmanager
