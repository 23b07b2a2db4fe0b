#include "kvmanager/disk/segment_files.h"

#include <spdlog/spdlog.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace kvmanager {

absl::Status FileError(absl::string_view what, int error) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(-error)));
}

std::string SegmentFiles::PathOf(uint32_t segment) const { return absl::StrFormat("%s/%08u", folder_, segment); }

absl::StatusOr<std::vector<SegmentFiles::Found>> SegmentFiles::List() const {
  std::vector<Found> found;
  std::error_code error;
  std::filesystem::directory_iterator it(folder_, error), end;
  while (!error && it != end) {
    uint32_t segment;
    const std::string name = it->path().filename();
    std::error_code gone;
    const bool is_file = it->symlink_status(gone).type() == std::filesystem::file_type::regular;
    const uint64_t bytes = is_file && !gone ? it->file_size(gone) : 0;
    if (is_file && !gone && name.size() >= 8 && absl::SimpleAtoi(name, &segment) && segment <= kSegmentMax &&
        it->path() == PathOf(segment)) {
      found.push_back({segment, bytes});
    }
    it.increment(error);
  }
  if (error) return FileError(folder_, -error.value());
  return found;
}

SegmentFiles::Shared SegmentFiles::Open(uint32_t segment, bool create, int* error) {
  {
    MutexLock lock(mutex_);
    const auto found = open_.find(segment);
    if (found != open_.end()) {
      found->second.last_use = ++uses_;
      return found->second.file;
    }
  }
  bool direct = true;
  const int fd = left_ ? -ENOENT : files_->Open(PathOf(segment), create, &direct);
  if (fd < 0) {
    *error = fd;
    return nullptr;
  }
  if (create) is_new_ = true;
  if (!direct && !said_.exchange(true)) {
    spdlog::info("the file system of {} has no O_DIRECT: blocks go through the page cache", folder_);
  }
  const auto file = std::make_shared<File>(fd, files_);
  std::vector<Shared> closed;  // behind the lock
  MutexLock lock(mutex_);
  while (open_.size() >= kOpenMax) {
    auto oldest = open_.begin();
    for (auto it = open_.begin(); it != open_.end(); ++it) {
      if (it->second.last_use < oldest->second.last_use) oldest = it;
    }
    closed.push_back(std::move(oldest->second.file));
    open_.erase(oldest);
  }
  // Another thread may have opened it meanwhile: either will do.
  return open_.try_emplace(segment, Opened{file, ++uses_}).first->second.file;
}

int SegmentFiles::Sync(uint32_t segment) {
  int error = 0;
  const Shared file = Open(segment, /*create=*/false, &error);
  if (file == nullptr) return error;
  error = files_->Sync(file->fd());
  if (error != 0) return error;
  if (is_new_.exchange(false)) {
    error = files_->SyncFolder(folder_);
    if (error != 0) is_new_ = true;
  }
  return error;
}

int SegmentFiles::Punch(const SegmentPlace& place) {
  int error = 0;
  const Shared file = Open(place.segment, /*create=*/false, &error);
  return file == nullptr ? error : files_->Punch(file->fd(), place.offset, place.bytes);
}

int SegmentFiles::Unlink(uint32_t segment) {
  Shared closed;  // behind the lock
  {
    MutexLock lock(mutex_);
    const auto found = open_.find(segment);
    if (found != open_.end()) {
      closed = std::move(found->second.file);
      open_.erase(found);
    }
  }
  return left_ ? -ENOENT : files_->Unlink(PathOf(segment));
}

}  // namespace kvmanager
