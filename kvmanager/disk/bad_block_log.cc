#include "kvmanager/disk/bad_block_log.h"

#include <spdlog/spdlog.h>

#include <string>

#include "absl/strings/str_format.h"
#include "kvmanager/disk/disk_state.h"

namespace kvmanager {
namespace {

constexpr size_t kKeyBytes = 8;  // of a block's key, in the log

}  // namespace

std::string BadBlockLog::Describe(const DiskBadPage& page) {
  if (page.checksum == page.expected) {
    return absl::StrFormat(
        "the page of layer %u has values that no page may have, and the checksum of its header, %016x", page.layer,
        page.checksum);
  }
  return absl::StrFormat("the page of layer %u has checksum %016x, its header says %016x", page.layer, page.checksum,
                         page.expected);
}

void BadBlockLog::Note(const BlockKey& key, const SegmentPlace& place, absl::string_view what, bool goes) {
  const int64_t now_ns = clock_->NowNs();
  NoteLeftOut();
  if (!limit_.Take(now_ns)) return;
  spdlog::warn("block {} of the disk {}: {}; its record is at byte {} of {}. {}", key.ToHex(kKeyBytes),
               goes ? "is bad" : "cannot be read", std::string(what), place.offset, files_->PathOf(place.segment),
               goes ? std::string("It is erased, and a miss")
                    : absl::StrFormat("It is a miss for %d s", FailedReads::kNs / 1000000000));
}

void BadBlockLog::NoteLeftOut() {
  const uint64_t left_out = limit_.TakeLeftOut(clock_->NowNs());
  if (left_out == 0) return;
  spdlog::warn(
      "{} more blocks of the disk were bad, or could not be read: kvmanager_disk_errors_total counts them by \"loss\" "
      "and "
      "\"read\"",
      left_out);
}

}  // namespace kvmanager
