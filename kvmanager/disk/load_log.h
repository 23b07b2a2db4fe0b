// The log's lines on what a disk had at its start: how many blocks, how long it took, and what was wrong.
//
// On the loop's thread.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "kvmanager/base/clock.h"

namespace kvmanager {

class LoadLog {
 public:
  /// Begins now. path: the disk's folder. clock: outlives it.
  LoadLog(std::string path, const Clock* clock) : path_(std::move(path)), clock_(*clock), begun_ns_(clock->NowNs()) {}

  /// Records that the index has, and that are not as it says.
  void NoteDropped(uint64_t records) { dropped_ += records; }
  /// All is known.
  void Loaded(uint64_t blocks, uint64_t used_bytes, uint64_t capacity_bytes) const;
  /// The index was made anew of what was found, durably, or status says why not.
  void MadeAnew(const absl::Status& status, uint64_t blocks, int bad_reads) const;

 private:
  int64_t ms() const { return (clock_.NowNs() - begun_ns_) / 1000000; }

  const std::string path_;
  const Clock& clock_;
  const int64_t begun_ns_;
  uint64_t dropped_ = 0;
};

}  // namespace kvmanager
