// The segment files of a disk: opened when they are needed, few at once.
//
// Any thread; calls block on the file system. A segment is a file of its number in the folder; it is written once, from
// its beginning on, by the daemon that made it.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/disk/disk_io.h"
#include "kvmanager/disk/record.h"

namespace kvmanager {

/// UNAVAILABLE naming `what` and the error; error: -errno.
absl::Status FileError(absl::string_view what, int error);

class SegmentFiles {
 public:
  static constexpr size_t kOpenMax = 128;

  /// files: outlives it.
  SegmentFiles(std::string folder, DiskFiles* files) : folder_(std::move(folder)), files_(files) {}

  class File {
   public:
    File(int fd, DiskFiles* files) : fd_(fd), files_(files) {}
    ~File() { files_->Close(fd_); }
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    int fd() const { return fd_; }

   private:
    const int fd_;
    DiskFiles* const files_;
  };
  using Shared = std::shared_ptr<File>;  // shared: a file that is closed for others may still be read

  struct Found {
    uint32_t segment = 0;
    uint64_t bytes = 0;
  };
  /// The segments that are there.
  absl::StatusOr<std::vector<Found>> List() const;
  /// create: it is not there yet. Result: the file, or nullptr and -errno in *error.
  Shared Open(uint32_t segment, bool create, int* error);
  /// Reserves the disk's blocks for what is going to be written behind `offset`.
  void Reserve(const File& file, uint64_t offset, uint64_t bytes) {
    (void)files_->Reserve(file.fd(), offset, bytes);  // writing says what is wrong
  }
  /// Any thread. The folder is not there any more, or another's: nothing in it is opened, made or removed from now on.
  void Leave() { left_ = true; }
  bool has_left() const { return left_; }
  // Results: 0 or -errno.
  /// All records written to it are on the disk, and it is itself. -ENOENT: somebody else has removed it.
  int Sync(uint32_t segment);
  int Punch(const SegmentPlace& place);
  int Unlink(uint32_t segment);
  /// Files that were removed stay so.
  int SyncFolder() { return left_ ? -ENOENT : files_->SyncFolder(folder_); }
  std::string PathOf(uint32_t segment) const;

 private:
  const std::string folder_;
  DiskFiles* const files_;
  std::atomic<bool> is_new_{false};  // a file of the folder, which may be gone after a power cut
  std::atomic<bool> said_{false};    // that the page cache is in the way
  std::atomic<bool> left_{false};
  Mutex mutex_;
  struct Opened {
    Shared file;
    uint64_t last_use = 0;
  };
  absl::flat_hash_map<uint32_t, Opened> open_ ABSL_GUARDED_BY(mutex_);
  uint64_t uses_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace kvmanager
