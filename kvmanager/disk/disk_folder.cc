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

bool DiskFolder::is_damaged() const { return access((folder_.path() + "/damaged").c_str(), F_OK) == 0; }

bool DiskFolder::has_segments() const {
  std::error_code error;
  return !std::filesystem::is_empty(segments(), error) || error;
}

absl::Status DiskFolder::MarkDamaged() const {
  const std::string path = folder_.path() + "/damaged";
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return Failed("making", path);
  close(fd);
  return SyncFolder(folder_.path());
}

absl::StatusOr<std::string> DiskFolder::SetAside(absl::string_view why) const {
  const std::time_t now = std::time(nullptr);
  std::tm utc;
  char time[32];
  KV_CHECK(gmtime_r(&now, &utc) != nullptr && std::strftime(time, sizeof time, "%Y%m%dT%H%M%SZ", &utc) > 0);
  std::string aside = absl::StrCat(folder_.path(), "/set-aside-", time);
  int again = 0;
  while (mkdir(aside.c_str(), 0700) != 0) {
    if (errno != EEXIST || ++again > kSameSecondMax) return Failed("making", aside);
    aside = absl::StrCat(folder_.path(), "/set-aside-", time, "-", again);
  }
  for (const char* const name : {"index", "segments"}) {
    const std::string from = absl::StrCat(folder_.path(), "/", name), to = absl::StrCat(aside, "/", name);
    if (rename(from.c_str(), to.c_str()) != 0 && errno != ENOENT) return Failed("renaming", from);
  }
  if (unlink((folder_.path() + "/damaged").c_str()) != 0 && errno != ENOENT)
    return Failed("removing damaged in", folder_.path());
  KV_RETURN_IF_ERROR(SyncFolder(folder_.path()));
  spdlog::error(
      "the disk's blocks in {} cannot be used ({}). They were moved to {}, and the disk begins empty. If an older or "
      "newer version of this daemon wrote them, end this one, remove index and segments, and move them back; else "
      "remove {} to free its space.",
      folder_.path(), std::string(why), aside, aside);
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
