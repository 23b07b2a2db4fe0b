// The log's lines on blocks of a disk that are not as they were written, or cannot be read: one for each, LogLimit's in
// a minute. A line names the block, its segment file, where its record begins there, and what is wrong.
//
// On the loop's thread.
#pragma once

#include "absl/strings/string_view.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/log_limit.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/disk/segment_files.h"

namespace kvmanager {

class BadBlockLog {
 public:
  /// Everything outlives it.
  BadBlockLog(const SegmentFiles* files, const Clock* clock) : files_(files), clock_(clock) {}

  /// goes: the block is erased; else it is found again after a while.
  void Note(const BlockKey& key, const SegmentPlace& place, absl::string_view what, bool goes);
  /// How many lines were left out, once their minute has ended.
  void NoteLeftOut();

  /// What is wrong, of a page.
  static std::string Describe(const DiskBadPage& page);

 private:
  const SegmentFiles* const files_;
  const Clock* const clock_;
  LogLimit limit_;
};

}  // namespace kvmanager
