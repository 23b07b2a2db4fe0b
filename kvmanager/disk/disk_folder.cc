#include "kvmanager/disk/disk_folder.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr char kField[] = "--disk-path";
constexpr int kSameSecondMax = 1000;

absl::Status Failed(absl::string_view what, const std::string& path) {
  return absl::UnavailableError(absl::StrCat(what, " ", path, ": ", std::strerror(errno)));
}

absl::Status MakeFolder(const std::string& path) {
  if (mkdir(path.c_str(), 0700) == 0 || errno == EEXIST) return absl::OkStatus();
  return Failed("making", path);
}

absl::Status SyncFolder(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  const bool synced = fd >= 0 && fsync(fd) == 0;
  absl::Status status = synced ? absl::OkStatus() : Failed("syncing", path);
  if (fd >= 0) close(fd);
  return status;
}

}  // namespace

absl::StatusOr<DiskFolder> DiskFolder::Open(const std::string& path) {
  if (path.empty()) return InvalidField(kField, path, "a directory");
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return InvalidField(kField, path, absl::StrCat("a directory that can be made (", std::strerror(errno), ")"));
  }
  struct stat status;
  if (stat(path.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) return InvalidField(kField, path, "a directory");
  if (status.st_uid != geteuid()) {
    return FieldError(absl::StatusCode::kFailedPrecondition, kField, absl::StrCat(path, ", of user ", status.st_uid),
                      absl::StrCat("a directory of this daemon's user, ", geteuid()));
  }
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    return FieldError(absl::StatusCode::kFailedPrecondition, kField,
                      absl::StrCat(path, ", mode ", absl::StrFormat("%04o", status.st_mode & 07777)),
                      absl::StrCat("a directory for its owner alone: chmod 700 ", path));
  }
  const std::string lock_path = path + "/lock";
  const int lock = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (lock < 0) return Failed("opening", lock_path);
  if (flock(lock, LOCK_EX | LOCK_NB) != 0) {
    const bool is_open = errno == EWOULDBLOCK;
    const absl::Status failed = Failed("locking", lock_path);
    close(lock);
    if (!is_open) return failed;
    return FieldError(absl::StatusCode::kFailedPrecondition, kField, absl::StrCat(path, ", open in another process"),
                      "a directory of one daemon alone");
  }
  return DiskFolder(path, lock);
}

DiskFolder::DiskFolder(DiskFolder&& other) noexcept
    : path_(std::move(other.path_)), lock_(std::exchange(other.lock_, -1)) {}

DiskFolder::~DiskFolder() {
  if (lock_ >= 0) close(lock_);
}

absl::Status DiskFolder::Make() const {
  KV_RETURN_IF_ERROR(MakeFolder(index()));
  KV_RETURN_IF_ERROR(MakeFolder(segments()));
  return SyncFolder(path_);
}

bool DiskFolder::is_damaged() const { return access((path_ + "/damaged").c_str(), F_OK) == 0; }

bool DiskFolder::has_segments() const {
  std::error_code error;
  return !std::filesystem::is_empty(segments(), error) || error;
}

absl::Status DiskFolder::MarkDamaged() const {
  const std::string path = path_ + "/damaged";
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return Failed("making", path);
  close(fd);
  return SyncFolder(path_);
}

absl::StatusOr<std::string> DiskFolder::SetAside(absl::string_view why) const {
  const std::time_t now = std::time(nullptr);
  std::tm utc;
  char time[32];
  KV_CHECK(gmtime_r(&now, &utc) != nullptr && std::strftime(time, sizeof time, "%Y%m%dT%H%M%SZ", &utc) > 0);
  std::string aside = absl::StrCat(path_, "/set-aside-", time);
  int again = 0;
  while (mkdir(aside.c_str(), 0700) != 0) {
    if (errno != EEXIST || ++again > kSameSecondMax) return Failed("making", aside);
    aside = absl::StrCat(path_, "/set-aside-", time, "-", again);
  }
  for (const char* const name : {"index", "segments"}) {
    const std::string from = absl::StrCat(path_, "/", name), to = absl::StrCat(aside, "/", name);
    if (rename(from.c_str(), to.c_str()) != 0 && errno != ENOENT) return Failed("renaming", from);
  }
  if (unlink((path_ + "/damaged").c_str()) != 0 && errno != ENOENT) return Failed("removing damaged in", path_);
  KV_RETURN_IF_ERROR(SyncFolder(path_));
  spdlog::error(
      "the disk's blocks in {} cannot be used ({}). They were moved to {}, and the disk begins empty. If an older or "
      "newer version of this daemon wrote them, end this one, remove index and segments, and move them back; else "
      "remove {} to free its space.",
      path_, std::string(why), aside, aside);
  return aside;
}

absl::StatusOr<std::unique_ptr<IndexDb>> OpenIndex(const DiskFolder& folder, rocksdb::FileSystem* index_files,
                                                   DiskMetrics* metrics) {
  std::string why = "its index was found damaged";
  bool aside = folder.is_damaged();
  absl::StatusOr<std::unique_ptr<IndexDb>> db = absl::UnavailableError("");
  if (!aside) {
    KV_RETURN_IF_ERROR(folder.Make());
    db = IndexDb::Open(folder.index(), index_files);
    aside = absl::IsDataLoss(db.status());
    if (aside) why = std::string(db.status().message());
    if (db.ok() && (*db)->is_new() && folder.has_segments()) {
      aside = true;
      why = "its index is missing";
      db->reset();
    }
  }
  if (aside) {
    KV_RETURN_IF_ERROR(folder.SetAside(why).status());
    metrics->set_aside.Increment();
    KV_RETURN_IF_ERROR(folder.Make());
    db = IndexDb::Open(folder.index(), index_files);
  }
  return db;
}

}  // namespace kvmanager
