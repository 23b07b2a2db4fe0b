// Finds the records of segment files without an index, by their headers: for an index that is made anew.
//
// A record is found where its header has its checksum and this disk's tag of that place. From one record the walk goes
// on behind it; where there is no header, at each multiple of kRecordAlign, so that a header that was changed loses its
// record alone. Holes are passed over. Pages are not read: whoever reads a record compares them.
//
// A value of one thread. It reads about 32 KiB a record.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kvmanager/disk/index_record.h"
#include "kvmanager/disk/record_marks.h"
#include "kvmanager/disk/segment_files.h"

namespace kvmanager {

/// Who pays for records whose index was lost, which alone knew it: no tenant has this name.
constexpr char kPayerUnknown[] = "(unknown)";

class RecordWalk {
 public:
  static constexpr uint64_t kAheadBytes = uint64_t{32} << 10;  // read for a header
  static constexpr uint64_t kSearchBytes = uint64_t{1} << 20;  // read where there is none
  static constexpr int kBadReadsMax = 256;                     // of bytes that the device cannot read

  /// They outlive it.
  RecordWalk(SegmentFiles* files, const RecordMarks* marks);

  /// fn: called for each record of the file that no purge covers, in the order in which they were written; false: ends.
  /// Errors: UNAVAILABLE (the file cannot be opened, or too much of it not be read).
  absl::Status Walk(const SegmentFiles::Found& file, absl::FunctionRef<bool(IndexRecord)> fn);
  /// Pieces that the device could not read: what was in them is lost.
  int bad_reads() const { return bad_reads_; }

 private:
  struct Free {
    void operator()(uint8_t* bytes) const;
  };
  // Results: 0 or -errno. -EIO: not even kRecordAlign of them.
  int Fill(int fd, uint64_t at, bool search);
  int Read(int fd, uint64_t at, uint64_t bytes);

  SegmentFiles* const files_;
  const RecordMarks* const marks_;
  const std::unique_ptr<uint8_t[], Free> buffer_;  // [kSearchBytes], aligned
  uint64_t begin_ = 0, end_ = 0;                   // of the file, that are in buffer_
  int bad_reads_ = 0;
};

}  // namespace kvmanager
