#include "kvmanager/disk/record_walk.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

static_assert(RecordWalk::kAheadBytes >= kRecordHeaderBytesMax + kRecordAlign);

// Where the file has bytes, at `at` or behind it; UINT64_MAX: nowhere.
uint64_t NextData(int fd, uint64_t at) {
  const off_t data = lseek(fd, static_cast<off_t>(at), SEEK_DATA);
  if (data < 0) return errno == ENXIO ? std::numeric_limits<uint64_t>::max() : at;
  return static_cast<uint64_t>(data) / kRecordAlign * kRecordAlign;
}

}  // namespace

void RecordWalk::Free::operator()(uint8_t* bytes) const { std::free(bytes); }

RecordWalk::RecordWalk(SegmentFiles* files, const RecordMarks* marks)
    : files_(files), marks_(marks), buffer_(static_cast<uint8_t*>(std::aligned_alloc(kRecordAlign, kSearchBytes))) {
  KV_CHECK(buffer_ != nullptr);
}

int RecordWalk::Read(int fd, uint64_t at, uint64_t bytes) {
  begin_ = end_ = at;
  while (end_ < at + bytes) {
    ssize_t got = -EIO;
    if (!Fails(Failpoint::kDiskRead)) {
      got = pread(fd, buffer_.get() + (end_ - at), at + bytes - end_, static_cast<off_t>(end_));
      if (got < 0) got = -errno;
    }
    if (got == -EINTR) continue;
    if (got < 0) return static_cast<int>(got);
    end_ += static_cast<uint64_t>(got);
    if (got == 0 || got % kRecordAlign != 0) break;  // the file's end
  }
  return 0;
}

int RecordWalk::Fill(int fd, uint64_t at, bool search) {
  int error = Read(fd, at, search ? kSearchBytes : kAheadBytes);
  if (error == -EIO) error = Read(fd, at, kRecordAlign);
  if (error != 0) end_ = begin_;
  return error;
}

absl::Status RecordWalk::Walk(const SegmentFiles::Found& file, absl::FunctionRef<bool(IndexRecord)> fn) {
  int error = 0;
  const SegmentFiles::Shared opened = files_->Open(file.segment, /*create=*/false, &error);
  if (opened == nullptr) return FileError(files_->PathOf(file.segment), error);
  const int fd = opened->fd();
  begin_ = end_ = 0;
  bool search = false;
  for (uint64_t at = 0; at < file.bytes;) {
    // A header may reach to the end of what is in memory: then it is read again, from its own beginning.
    const bool is_whole = at >= begin_ && at < end_ && (end_ - at >= kRecordHeaderBytesMax || end_ >= file.bytes);
    if (!is_whole) {
      at = NextData(fd, at);
      if (at >= file.bytes) break;
      error = Fill(fd, at, search);
      if (error != 0) {
        if (error != -EIO || ++bad_reads_ > kBadReadsMax) {
          return FileError(absl::StrCat("reading ", files_->PathOf(file.segment)), error);
        }
        at += kRecordAlign;
        continue;
      }
      if (begin_ == end_) break;  // it was cut since
    }
    const absl::Span<const uint8_t> bytes(buffer_.get() + (at - begin_), end_ - at);
    const absl::StatusOr<DiskRecord> record = ParseRecordHeader(bytes);
    search = true;
    if (record.ok()) {
      const absl::Span<const uint8_t> header = bytes.first(RecordHeaderBytes(record->pages.size()));
      std::vector<uint32_t> page_bytes;
      for (const DiskPage& page : record->pages) page_bytes.push_back(page.bytes);
      const SegmentPlace place{file.segment, at, RecordLayout::Of(page_bytes).bytes};
      if (marks_->seal().IsSigned({place.segment, at}, header) && place.bytes <= file.bytes - at) {
        at += place.bytes;
        search = false;
        if (marks_->MayBePurged(record->cache, {place.segment, place.offset})) continue;
        if (!fn(IndexRecordOf(*record, place, RecordHeaderChecksum(header), kPayerUnknown))) break;
        continue;
      }
    }
    at += kRecordAlign;
  }
  return absl::OkStatus();
}

}  // namespace kvmanager
