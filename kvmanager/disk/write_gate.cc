#include "kvmanager/disk/write_gate.h"

#include <spdlog/spdlog.h>

#include <string>

#include "absl/strings/str_cat.h"

namespace kvmanager {

const char* WriteGate::state() const {
  if (shut_ != nullptr) return shut_;
  return OpensWithin(0) ? "ready" : "nothing is written for a while, after an error";
}

void WriteGate::NoteError(const char* op, const absl::Status& status) {
  metrics_.errors(op).Increment();
  const int64_t seconds = back_off_.Begin(clock_.NowNs());
  if (seconds == 0) return;
  spdlog::warn("the disk failed ({}): nothing is written to it for {} s", std::string(status.message()), seconds);
}

void WriteGate::NoteIndexError(const absl::Status& status, uint64_t blocks_read) {
  metrics_.errors("index").Increment();
  const std::string why(status.message());
  if (!absl::IsDataLoss(status)) {
    shut_ = "its index could not be read: nothing is written until the next start";
    spdlog::error(
        "the disk's index in {} could not be read ({}): {} blocks of it are found, and nothing is written to the disk "
        "until the next start, which reads it again. Look for errors of the device (dmesg, smartctl), and restart.",
        folder_.path(), why, blocks_read);
    return;
  }
  shut_ = "its index is damaged: nothing is written until the next start";
  const absl::Status marked = folder_.MarkDamaged(why);
  spdlog::error(
      "the disk's index in {} is damaged ({}): {} blocks were read of it and are found, and nothing is written to the "
      "disk until the next start, which makes it anew from the records{}. Look for errors of the device (dmesg, "
      "smartctl), and restart.",
      folder_.path(), why, blocks_read, marked.ok() ? "" : absl::StrCat(" (", marked.message(), ")"));
}

void WriteGate::NoteFolderGone(const absl::Status& why) {
  metrics_.errors("write").Increment();
  shut_ = "its folder was removed or replaced: nothing is written until the next start";
  spdlog::error(
      "the disk's folder {} was removed or replaced by somebody else ({}): nothing is written to the disk until the "
      "next start, which finds what is there then. The space of what was removed is free once this daemon has ended. "
      "Put the folder back if you have it, and restart.",
      folder_.path(), std::string(why.message()));
}

}  // namespace kvmanager
