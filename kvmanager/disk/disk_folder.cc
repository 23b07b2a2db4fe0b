#include "kvmanager/disk/disk_folder.h"

#include <fcntl.h>
#include <spdlog/spdlog.h>
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
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr int kSameSecondMax = 1000;
constexpr size_t kDamageBytesMax = 1000;  // of what MarkDamaged says
constexpr char kAsidePrefix[] = "set-aside-";
constexpr const char* kContents[] = {"index", "segments"};

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
  KV_ASSIGN_OR_RETURN(LockedFolder folder, LockedFolder::Open("--disk-path", path));
  return DiskFolder(std::move(folder));
}

absl::Status DiskFolder::Make() const {
  KV_RETURN_IF_ERROR(MakeFolder(index()));
  KV_RETURN_IF_ERROR(MakeFolder(segments()));
  return SyncFolder(folder_.path());
}

absl::Status DiskFolder::damage() const {
  const std::string path = folder_.path() + "/damaged";
  if (access(path.c_str(), F_OK) != 0) return absl::OkStatus();
  std::string why(kDamageBytesMax, '\0');
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
  const ssize_t bytes = fd < 0 ? 0 : read(fd, why.data(), why.size());
  if (fd >= 0) close(fd);
  why.resize(bytes > 0 ? static_cast<size_t>(bytes) : 0);
  return absl::DataLossError(absl::StrCat("the last daemon could not read it", why.empty() ? "" : ": ", why));
}

bool DiskFolder::has_segments() const {
  std::error_code error;
  return !std::filesystem::is_empty(segments(), error) || error;
}

absl::Status DiskFolder::MarkDamaged(absl::string_view why) const {
  const std::string path = folder_.path() + "/damaged";
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (fd < 0) return Failed("making", path);
  const absl::string_view text = why.substr(0, kDamageBytesMax);
  (void)!write(fd, text.data(), text.size());  // that it is there counts
  close(fd);
  return SyncFolder(folder_.path());
}

absl::Status DiskFolder::SetAside(const absl::Status& why) const {
  const std::time_t now = std::time(nullptr);
  std::tm utc;
  char time[32];
  KV_CHECK(gmtime_r(&now, &utc) != nullptr && std::strftime(time, sizeof time, "%Y%m%dT%H%M%SZ", &utc) > 0);
  std::string aside = absl::StrCat(folder_.path(), "/", kAsidePrefix, time);
  int again = 0;
  while (mkdir(aside.c_str(), 0700) != 0) {
    if (errno != EEXIST || ++again > kSameSecondMax) return Failed("making", aside);
    aside = absl::StrCat(folder_.path(), "/", kAsidePrefix, time, "-", again);
  }
  for (const char* const name : kContents) {
    const std::string from = absl::StrCat(folder_.path(), "/", name), to = absl::StrCat(aside, "/", name);
    if (rename(from.c_str(), to.c_str()) != 0 && errno != ENOENT) return Failed("renaming", from);
  }
  if (unlink((folder_.path() + "/damaged").c_str()) != 0 && errno != ENOENT)
    return Failed("removing damaged in", folder_.path());
  KV_RETURN_IF_ERROR(SyncFolder(folder_.path()));
  const std::string text(why.message());
  if (absl::IsUnimplemented(why)) {
    spdlog::error(
        "the disk's index in {} is of another version ({}). index and segments were moved to {}, and the disk begins "
        "empty. To use them again end this daemon, remove index and segments, move those back, and start the version "
        "that wrote them; else remove {} to free its space.",
        folder_.path(), text, aside, aside);
  } else {
    spdlog::error(
        "the disk's index in {} is damaged ({}), and its blocks cannot be found without it. index and segments were "
        "moved to {}, which nothing reads again, and the disk begins empty. Remove {} to free its space, and look for "
        "errors of the device (dmesg, smartctl).",
        folder_.path(), text, aside, aside);
  }
  return absl::OkStatus();
}

namespace {

absl::StatusOr<std::unique_ptr<IndexDb>> OpenOrSetAside(const DiskFolder& folder, rocksdb::FileSystem* index_files,
                                                        DiskMetrics* metrics) {
  absl::Status why = folder.damage();
  if (why.ok()) {
    KV_RETURN_IF_ERROR(folder.Make());
    absl::StatusOr<std::unique_ptr<IndexDb>> db = IndexDb::Open(folder.index(), index_files);
    if (db.ok() && (*db)->is_new() && folder.has_segments()) {
      db = absl::DataLossError(absl::StrCat(folder.index(), " is missing, or has nothing in it"));
    }
    if (!absl::IsDataLoss(db.status()) && !absl::IsUnimplemented(db.status())) return db;
    why = db.status();
  }
  KV_RETURN_IF_ERROR(folder.SetAside(why));
  metrics->set_aside.Increment();
  KV_RETURN_IF_ERROR(folder.Make());
  return IndexDb::Open(folder.index(), index_files);
}

}  // namespace

absl::StatusOr<std::unique_ptr<IndexDb>> OpenIndex(const DiskFolder& folder, rocksdb::FileSystem* index_files,
                                                   DiskMetrics* metrics) {
  absl::StatusOr<std::unique_ptr<IndexDb>> db = OpenOrSetAside(folder, index_files, metrics);
  if (db.ok()) return db;
  return FieldError(
      db.status().code(), "--disk-path", absl::StrCat(folder.path(), " (", db.status().message(), ")"),
      "a folder that one daemon alone uses and can write: on a file system that is mounted read-write and "
      "has room");
}

}  // namespace kvmanager
