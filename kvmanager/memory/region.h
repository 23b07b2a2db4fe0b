// One memory allocation that other processes can map: a memfd, filled at creation and sealed.
//
// Owns the mapping and the descriptor, if kept; both go with the object. Immutable after creation, so any thread may
// read its accessors; who may touch the bytes is its user's business. A region never changes size: a descriptor that
// could be truncated would let a client kill the daemon by SIGBUS, so every region is sealed before its descriptor can
// leave the process, and its memory is allocated at creation, so that the first touch cannot fail later.
#pragma once

#include <cstddef>
#include <cstdint>
#include <istream>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace kvmanager {

class Region {
 public:
  /// What a process that receives the descriptor may do.
  enum class Sharing : uint8_t {
    kWritable,  // arenas: F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL
    kReadOnly,  // pages: also F_SEAL_FUTURE_WRITE; only this object's own mapping writes
    kKept,      // pages that outlive this process: fd() reads, keeper_fd() is for a process that takes them over
  };
  enum class HugePages : uint8_t { kNone, kTransparent, kHugetlb };

  static constexpr size_t kHugePageBytes = 2 << 20;
  static constexpr size_t kBytesMax = size_t{1} << 42;

  struct Options {
    std::string name = "kvmanager";  // shown in /proc/PID/maps
    size_t bytes = 0;                // 1..kBytesMax; rounded up to whole (huge) pages
    bool huge_pages = false;         // hugetlb memfd if it can be had, else madvise(MADV_HUGEPAGE), else small pages
    Sharing sharing = Sharing::kWritable;
    bool keep_descriptor = true;  // false: closed once the region is mapped and sealed, since no one is to receive it
  };

  /// Zeroed memory. Errors: INVALID_ARGUMENT; RESOURCE_EXHAUSTED when the host has not that much memory; UNAVAILABLE
  /// when the kernel refuses a call.
  static absl::StatusOr<std::unique_ptr<Region>> Create(const Options& options);

  /// Takes over a kKept region of a process that has ended: `fd` is its keeper_fd(), and is taken. Errors: as Map's;
  /// FAILED_PRECONDITION too if it has not exactly `bytes`.
  static absl::StatusOr<std::unique_ptr<Region>> TakeOver(int fd, size_t bytes);

  /// Maps a region that another process made; takes the descriptor. Errors: FAILED_PRECONDITION if it is smaller than
  /// `bytes` or can shrink; UNAVAILABLE when the kernel refuses a call.
  static absl::StatusOr<std::unique_ptr<Region>> Map(int fd, size_t bytes, bool writable);

  ~Region();
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  int fd() const { return fd_; }  // stays the region's; a receiver gets a duplicate; -1 if it was not kept
  int keeper_fd() const { return keeper_fd_; }  // of kKept, likewise; else -1

  /// A descriptor for another process to read by, the caller's; not of kWritable. Errors: UNAVAILABLE.
  absl::StatusOr<int> OpenForReading() const;
  /// Whether a process, this one included, has a descriptor of OpenForReading or memory that it mapped by one. The
  /// kernel says so (a file with other readers takes no write lease); true also where it does not know. Takes some
  /// microseconds.
  bool HasReaders() const;
  HugePages huge_pages() const { return huge_pages_; }

 private:
  Region() = default;

  static absl::StatusOr<std::unique_ptr<Region>> MapAll(int fd, size_t bytes, bool writable, bool exact);
  /// fd_ becomes keeper_fd_, and what others receive only reads.
  absl::Status SplitDescriptor();

  int fd_ = -1;
  int keeper_fd_ = -1;
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
  HugePages huge_pages_ = HugePages::kNone;
};

/// Bytes that this host and control group can still give, huge pages set aside not among them; 0 if unknown.
uint64_t AvailableMemoryBytes();
/// Bytes of free huge pages (of kHugePageBytes) that the host has set aside.
uint64_t FreeHugePageBytes();
/// Of the text of a control group's memory.stat: bytes that count as used but that the kernel takes back when memory is
/// asked for, such as cached files (shared memory is not among them).
uint64_t ReclaimableBytes(std::istream& memory_stat);

}  // namespace kvmanager
