// The bytes of a disk: which segment has how many, and where the next record goes. A value of the loop's thread.
//
// Invariants: 1. used() is the sum of the records that are there or on their way, and of bytes that the file system
// cannot give back yet. 2. The number of a segment is never used again.
#pragma once

#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "kvmanager/disk/record_marks.h"
#include "kvmanager/disk/segment_files.h"

namespace kvmanager {

class SegmentSpace {
 public:
  static constexpr uint64_t kSegmentBytesMax = uint64_t{1} << 30;

  /// capacity: bytes of records.
  explicit SegmentSpace(uint64_t capacity);

  uint64_t capacity() const { return capacity_; }
  uint64_t used() const { return used_; }
  /// Given up, and not given back to the file system yet.
  uint64_t leaving() const { return leaving_; }

  /// A record that is there from before.
  void Note(const SegmentPlace& place);
  /// The segments with numbers up to this one are none of ours to write.
  void BeginAbove(uint32_t segment) { next_ = std::max(next_, segment + 1); }

  /// No record begins here or behind it, and those that come do.
  RecordPlace end() const { return current_ != kNone ? RecordPlace{current_, end_} : RecordPlace{next_, 0}; }

  /// Room for a record, at the end of the segment that is written. is_first: the segment is to be made. emptied: the
  /// segment that was written until now has nothing in it: it is to be removed; UINT32_MAX: none.
  SegmentPlace Take(uint64_t bytes, bool* is_first, uint32_t* emptied);
  /// The next record goes to a new segment: something is wrong with this one. Returns whether it is to be removed.
  bool LeaveSegment(uint32_t* emptied);
  /// A record's bytes are given up. True: its segment has none any more, and is to be removed.
  bool Give(const SegmentPlace& place);
  /// What was given up has gone, or cannot go before its segment does.
  void Gone(uint64_t bytes) { leaving_ -= bytes; }
  void Stays(const SegmentPlace& place);
  bool punches() const { return punches_; }

  /// Aborts if used() is not `records` bytes and what stays.
  void Check(uint64_t records) const;

 private:
  struct Segment {
    uint64_t records = 0;     // there, or on their way
    uint64_t dead_bytes = 0;  // which stay
  };
  void Close(uint32_t* emptied);

  const uint64_t capacity_, segment_bytes_;
  uint64_t used_ = 0, leaving_ = 0, dead_ = 0;
  absl::flat_hash_map<uint32_t, Segment> segments_;
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t current_ = kNone, next_ = 1;
  uint64_t end_ = 0;  // of the current segment
  bool punches_ = true;
};

}  // namespace kvmanager
