#include "kvmanager/memory/region.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <linux/memfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "kvmanager/base/status.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace kvmanager {
namespace {

absl::Status SystemError(absl::string_view call, int error) {
  const bool no_memory = error == ENOMEM || error == ENOSPC;
  return absl::Status(no_memory ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kUnavailable,
                      absl::StrCat(call, " failed: ", std::strerror(error)));
}

int Fallocate(int fd, size_t bytes) {
  int error;
  do {
    error = fallocate(fd, 0, 0, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  } while (error == EINTR);
  return error;
}

// Whether the kernel ever gives a memfd huge pages on madvise: the bracketed word of its setting.
bool TransparentHugePagesAllowed() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  std::string word;
  while (file >> word) {
    if (word.front() == '[') return word != "[never]" && word != "[deny]";
  }
  return false;
}

bool ReadNumber(const char* path, uint64_t* number) {
  std::ifstream file(path);
  return static_cast<bool>(file >> *number);
}

// The number after `field` in /proc/meminfo, 0 if it is not there.
uint64_t MemInfo(absl::string_view field) {
  std::ifstream file("/proc/meminfo");
  std::string key, unit;
  uint64_t number;
  while (file >> key >> number) {
    if (key == field) return number;
    std::getline(file, unit);
  }
  return 0;
}

// A memfd with its memory, or -1 and an error number. The descriptor is closed on failure.
int MakeMemfd(const std::string& name, size_t bytes, bool hugetlb, int* error) {
  const int fd = memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING | (hugetlb ? MFD_HUGETLB : 0));
  if (fd < 0) {
    *error = errno;
    return -1;
  }
  *error = ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  if (*error == 0 && hugetlb) *error = Fallocate(fd, bytes);
  if (*error != 0) {
    close(fd);
    return -1;
  }
  return fd;
}

}  // namespace

uint64_t ReclaimableBytes(std::istream& memory_stat) {
  uint64_t bytes = 0, value;
  std::string key;
  while (memory_stat >> key >> value) {
    if (key == "inactive_file" || key == "active_file" || key == "slab_reclaimable") bytes += value;
  }
  return bytes;
}

uint64_t AvailableMemoryBytes() {
  uint64_t available = MemInfo("MemAvailable:") * 1024;
  uint64_t group_max, group_used;
  if (ReadNumber("/sys/fs/cgroup/memory.max", &group_max) && ReadNumber("/sys/fs/cgroup/memory.current", &group_used)) {
    std::ifstream stat("/sys/fs/cgroup/memory.stat");
    group_used -= std::min(group_used, ReclaimableBytes(stat));
    const uint64_t group_free = group_max > group_used ? group_max - group_used : 0;
    available = available == 0 ? group_free : std::min(available, group_free);
  }
  return available;
}

uint64_t FreeHugePageBytes() {
  if (MemInfo("Hugepagesize:") * 1024 != Region::kHugePageBytes) return 0;
  return MemInfo("HugePages_Free:") * Region::kHugePageBytes;
}

absl::StatusOr<std::unique_ptr<Region>> Region::Create(const Options& options) {
  if (options.bytes == 0 || options.bytes > kBytesMax) {
    return InvalidField("region bytes", options.bytes, absl::StrCat("1..", kBytesMax));
  }
  const size_t unit = options.huge_pages ? kHugePageBytes : static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t bytes = (options.bytes + unit - 1) / unit * unit;
  // Without this check an overcommitting kernel would answer with its OOM killer.
  const uint64_t available = AvailableMemoryBytes();
  std::unique_ptr<Region> region(new Region);
  region->bytes_ = bytes;
  int error = 0;
  if (options.huge_pages) {
    region->fd_ = MakeMemfd(options.name, bytes, /*hugetlb=*/true, &error);
    if (region->fd_ >= 0) region->huge_pages_ = HugePages::kHugetlb;
  }
  if (region->fd_ < 0) {
    if (available != 0 && bytes > available) {
      return FieldError(absl::StatusCode::kResourceExhausted, "region bytes", absl::StrCat(bytes),
                        absl::StrCat("at most the host's available ", available));
    }
    region->fd_ = MakeMemfd(options.name, bytes, /*hugetlb=*/false, &error);
    if (region->fd_ < 0) return SystemError("memfd_create", error);
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, region->fd_, 0);
  if (data == MAP_FAILED) return SystemError("mmap", errno);
  region->data_ = static_cast<uint8_t*>(data);
  if (options.huge_pages && region->huge_pages_ == HugePages::kNone && TransparentHugePagesAllowed() &&
      madvise(data, bytes, MADV_HUGEPAGE) == 0) {
    // The advice belongs to the mapping, so the pages must be faulted in through it: fallocate alone would make small
    // ones.
    if (madvise(data, bytes, MADV_POPULATE_WRITE) == 0) region->huge_pages_ = HugePages::kTransparent;
  }
  if (region->huge_pages_ != HugePages::kHugetlb) {
    error = Fallocate(region->fd_, bytes);
    if (error != 0) return SystemError("fallocate", error);
  }
  int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
  if (options.sharing == Sharing::kReadOnly) {
    seals |= F_SEAL_FUTURE_WRITE;
    // Who has had a descriptor cannot open the file anew by a name that it kept.
    if (fchmod(region->fd_, S_IRUSR | S_IWUSR) != 0) return SystemError("fchmod", errno);
  }
  if (fcntl(region->fd_, F_ADD_SEALS, seals) != 0) return SystemError("fcntl(F_ADD_SEALS)", errno);
  if (!options.keep_descriptor) {
    close(region->fd_);
    region->fd_ = -1;
  }
  if (options.sharing == Sharing::kKept) KV_RETURN_IF_ERROR(region->SplitDescriptor());
  return region;
}

// A seal would keep a successor from writing, too. So others get a descriptor that was opened for reading, and the
// file's mode keeps them from opening it anew.
absl::Status Region::SplitDescriptor() {
  keeper_fd_ = std::exchange(fd_, -1);
  if (fchmod(keeper_fd_, S_IRUSR) != 0) return SystemError("fchmod", errno);
  fd_ = open(absl::StrCat("/proc/self/fd/", keeper_fd_).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd_ < 0) return SystemError("opening /proc/self/fd", errno);
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Region>> Region::TakeOver(int fd, size_t bytes) {
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Region> region, MapAll(fd, bytes, /*writable=*/true, /*exact=*/true));
  struct statfs files;
  if (fstatfs(fd, &files) == 0 && files.f_type == HUGETLBFS_MAGIC) {
    region->huge_pages_ = HugePages::kHugetlb;
  } else if (TransparentHugePagesAllowed() && madvise(region->data_, bytes, MADV_HUGEPAGE) == 0) {
    region->huge_pages_ = HugePages::kTransparent;
  }
  KV_RETURN_IF_ERROR(region->SplitDescriptor());
  return region;
}

absl::StatusOr<std::unique_ptr<Region>> Region::Map(int fd, size_t bytes, bool writable) {
  return MapAll(fd, bytes, writable, /*exact=*/false);
}

absl::StatusOr<std::unique_ptr<Region>> Region::MapAll(int fd, size_t bytes, bool writable, bool exact) {
  std::unique_ptr<Region> region(new Region);
  region->fd_ = fd;
  struct stat info;
  if (fstat(fd, &info) != 0) return SystemError("fstat", errno);
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0) {
    return absl::FailedPreconditionError("region descriptor can shrink: it must carry F_SEAL_SHRINK");
  }
  const bool fits = info.st_size >= 0 && static_cast<uint64_t>(info.st_size) >= bytes;
  if (bytes == 0 || !fits || (exact && static_cast<uint64_t>(info.st_size) != bytes)) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "region bytes", absl::StrCat(bytes),
                      exact ? absl::StrCat(info.st_size, ", the region's") : absl::StrCat("1..", info.st_size));
  }
  void* data = mmap(nullptr, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return SystemError("mmap", errno);
  region->data_ = static_cast<uint8_t*>(data);
  region->bytes_ = bytes;
  return region;
}

absl::StatusOr<int> Region::OpenForReading() const {
  const int fd = open(absl::StrCat("/proc/self/fd/", fd_).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return SystemError("opening /proc/self/fd", errno);
  return fd;
}

bool Region::HasReaders() const {
  // The lease counts files that were opened. A memfd itself was not; fd_ of kKept was, and must take the lease itself.
  int fd = fd_;
  if (keeper_fd_ < 0) {
    fd = open(absl::StrCat("/proc/self/fd/", fd_).c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) return true;
  }
  const bool alone = fcntl(fd, F_SETLEASE, F_WRLCK) == 0;
  if (alone) fcntl(fd, F_SETLEASE, F_UNLCK);
  if (fd != fd_) close(fd);
  return !alone;
}

Region::~Region() {
  if (data_ != nullptr) munmap(data_, bytes_);
  for (const int fd : {fd_, keeper_fd_}) {
    if (fd >= 0) close(fd);
  }
}

}  // namespace kvmanager
