// What the disk's threads ask of the operating system: reads and writes that are in flight together (DiskIo), and the
// rest of a file's life, which blocks (DiskFiles). Tests put faults and power cuts behind both.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvmanager {

/// One read or write. Owned by whoever starts it, and left alone until Wait returns it.
struct DiskOp {
  enum class Kind : uint8_t { kRead, kWrite };
  Kind kind = Kind::kRead;
  int fd = -1;
  uint64_t offset = 0;      // of the file; a multiple of 4096, as the address and bytes are
  uint8_t* data = nullptr;  // read into, or written from
  uint32_t bytes = 0;
  int64_t result = 0;  // bytes that went, perhaps fewer; 0 at the file's end; -errno
  void* owner = nullptr;
};

/// Reads and writes in flight together. Of one thread, but for Wake.
class DiskIo {
 public:
  static constexpr int kOpsMax = 128;  // in flight

  virtual ~DiskIo() = default;  // nothing is in flight
  virtual const char* name() const = 0;
  virtual void Start(DiskOp* op) = 0;
  /// Appends what has ended. Returns once there is some, or after a Wake.
  virtual void Wait(std::vector<DiskOp*>* ended) = 0;
  /// Any thread: the Wait that is under way, or the next one, returns.
  virtual void Wake() = 0;
};

/// By io_uring. nullptr: the kernel, or a container's filter of system calls, refuses it.
std::unique_ptr<DiskIo> MakeUringIo();
/// By a small pool of threads with pread and pwrite.
std::unique_ptr<DiskIo> MakeThreadIo();
/// io, or where it is nullptr MakeThreadIo's, with a line in the log.
std::unique_ptr<DiskIo> OrThreadIo(std::unique_ptr<DiskIo> io);

/// Everything else about files. Any thread; calls block. Results: 0 or -errno.
class DiskFiles {
 public:
  virtual ~DiskFiles() = default;
  /// A descriptor for reading and writing, or -errno. create: the file must not be there, and gets mode 0600. direct:
  /// set if reads and writes go past the page cache.
  virtual int Open(const std::string& path, bool create, bool* direct) = 0;
  virtual void Close(int fd) = 0;
  /// What was written to it is on the disk, and can be read after a power cut. -ENOENT: it has no name any more.
  virtual int Sync(int fd) = 0;
  /// Which files are in it is on the disk.
  virtual int SyncFolder(const std::string& path) = 0;
  /// Blocks of the disk for bytes that will be written; may do nothing.
  virtual int Reserve(int fd, uint64_t offset, uint64_t bytes) = 0;
  /// Gives the file system back what these bytes take; they read as zeros. -EOPNOTSUPP: it cannot.
  virtual int Punch(int fd, uint64_t offset, uint64_t bytes) = 0;
  virtual int Unlink(const std::string& path) = 0;
  /// The file has these bytes and mode 0600, durably; or has those that it had, or both are not known (an error).
  virtual int Replace(const std::string& path, absl::string_view bytes) = 0;
};

std::unique_ptr<DiskFiles> MakeDiskFiles();

}  // namespace kvmanager
