#include "kvmanager/disk/disk_folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <spdlog/spdlog.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <optional>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kvmanager/base/status.h"
#include "kvmanager/disk/disk_io.h"
#include "kvmanager/disk/index_seal.h"
#include "kvmanager/disk/segment_files.h"

namespace kvmanager {
namespace {

constexpr int kSameSecondMax = 1000;
constexpr size_t kDamageBytesMax = 1000;  // of what MarkDamaged says
constexpr char kAsidePrefix[] = "set-aside-";
constexpr const char* kContents[] = {"index", "segments"};
constexpr char kMarks[] = "marks";

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

// What SetAside calls a folder: set-aside-20261129T211422Z; -1 and so on behind it for others of that second.
struct Aside {
  std::string name, time;
  int again = 0;
};

std::optional<Aside> ParseAside(const std::string& name) {
  absl::string_view rest = name;
  if (!absl::ConsumePrefix(&rest, kAsidePrefix)) return std::nullopt;
  constexpr absl::string_view kForm = "ddddddddTddddddZ";
  if (rest.size() < kForm.size()) return std::nullopt;
  Aside aside{name, std::string(rest.substr(0, kForm.size()))};
  for (size_t i = 0; i < kForm.size(); ++i) {
    if (kForm[i] == 'd' ? !absl::ascii_isdigit(rest[i]) : rest[i] != kForm[i]) return std::nullopt;
  }
  rest.remove_prefix(kForm.size());
  if (rest.empty()) return aside;
  if (!absl::ConsumePrefix(&rest, "-") || !absl::SimpleAtoi(rest, &aside.again)) return std::nullopt;
  const bool is_ours = aside.again >= 1 && aside.again <= kSameSecondMax && absl::StrCat(aside.again) == rest;
  return is_ours ? std::optional(aside) : std::nullopt;
}

// The names in a folder, which is no link.
std::vector<std::string> NamesIn(int parent, const char* name) {
  std::vector<std::string> names;
  const int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  DIR* const folder = fd < 0 ? nullptr : fdopendir(fd);
  if (folder == nullptr) {
    if (fd >= 0) close(fd);
    return names;
  }
  while (const dirent* const entry = readdir(folder)) {
    const std::string each = entry->d_name;
    if (each != "." && each != "..") names.push_back(each);
  }
  closedir(folder);
  return names;
}

bool IsFolderOfOurs(int parent, const char* name) {
  struct stat of;
  return fstatat(parent, name, &of, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(of.st_mode) && of.st_uid == geteuid();
}

// Removes a folder with the files in its index and segments. What else there is in it stays, and then it, too; no link
// is followed. Returns 0 or the error.
int RemoveAside(int parent, const char* name) {
  const int aside = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (aside < 0) return errno;
  for (const char* const content : kContents) {
    if (!IsFolderOfOurs(aside, content)) continue;
    const int folder = openat(aside, content, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    for (const std::string& file : NamesIn(aside, content)) (void)unlinkat(folder, file.c_str(), 0);
    if (folder >= 0) close(folder);
    (void)unlinkat(aside, content, AT_REMOVEDIR);
  }
  (void)unlinkat(aside, kMarks, 0);
  close(aside);
  return unlinkat(parent, name, AT_REMOVEDIR) == 0 ? 0 : errno;
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

absl::Status DiskFolder::CheckFiles() const {
  for (const std::string& path : {marks(), sealed(), folder_.path() + "/damaged"}) {
    struct stat of;
    if (lstat(path.c_str(), &of) != 0 || !S_ISDIR(of.st_mode)) continue;
    return absl::FailedPreconditionError(absl::StrCat(path, " is a folder, must be a file: move it away"));
  }
  return absl::OkStatus();
}

absl::Status DiskFolder::damage() const {
  const std::string path = folder_.path() + "/damaged";
  if (access(path.c_str(), F_OK) != 0) return absl::OkStatus();
  std::string why(kDamageBytesMax, '\0');
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  const ssize_t bytes = fd < 0 ? 0 : read(fd, why.data(), why.size());
  if (fd >= 0) close(fd);
  why.resize(bytes > 0 ? static_cast<size_t>(bytes) : 0);
  return absl::DataLossError(absl::StrCat("the last daemon could not read it", why.empty() ? "" : ": ", why));
}

bool DiskFolder::has_segments() const {
  std::error_code error;
  return !std::filesystem::is_empty(segments(), error) || error;
}

bool DiskFolder::has_index() const { return access((index() + "/CURRENT").c_str(), F_OK) == 0; }

bool DiskFolder::has_index_log() const {
  std::error_code error;
  std::filesystem::directory_iterator it(index(), error), end;
  for (; !error && it != end; it.increment(error)) {
    if (it->path().extension() == ".log") return true;
  }
  return false;
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

absl::Status DiskFolder::Remove(const char* name) const {
  const std::string path = absl::StrCat(folder_.path(), "/", name);
  if (unlink(path.c_str()) != 0 && errno != ENOENT) return Failed("removing", path);
  return SyncFolder(folder_.path());
}

absl::Status DiskFolder::ClearDamaged() const { return Remove("damaged"); }

absl::Status DiskFolder::RemoveSealed() const { return Remove("sealed"); }

void DiskFolder::Seal(DiskFiles* files) const {
  if (!damage().ok()) return;
  const absl::StatusOr<std::string> text = SealIndex(index());
  if (text.ok()) (void)files->Replace(sealed(), *text);  // as behind a crash
}

absl::Status DiskFolder::RemoveIndex() const {
  std::error_code error;
  std::filesystem::remove_all(index(), error);
  if (error) return absl::UnavailableError(absl::StrCat("removing ", index(), ": ", error.message()));
  return SyncFolder(folder_.path());
}

void DiskFolder::RemoveOldAsides() const {
  const int folder = open(folder_.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return;
  std::vector<Aside> asides;
  for (const std::string& name : NamesIn(folder, ".")) {
    std::optional<Aside> aside = ParseAside(name);
    if (aside.has_value() && IsFolderOfOurs(folder, name.c_str())) asides.push_back(*std::move(aside));
  }
  std::sort(asides.begin(), asides.end(),
            [](const Aside& a, const Aside& b) { return std::tie(b.time, b.again) < std::tie(a.time, a.again); });
  for (size_t i = kSetAsideMax - 1; i < asides.size(); ++i) {
    const std::string path = absl::StrCat(folder_.path(), "/", asides[i].name);
    spdlog::warn("{} is removed, which was set aside before: of such folders the newest {} are kept", path,
                 kSetAsideMax);
    const int error = RemoveAside(folder, asides[i].name.c_str());
    if (error != 0) spdlog::warn("{} could not be removed ({}): remove it", path, std::strerror(error));
  }
  close(folder);
}

absl::Status DiskFolder::SetAside(const absl::Status& why) const {
  RemoveOldAsides();
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
  for (const char* const name : {kContents[0], kContents[1], kMarks}) {
    const std::string from = absl::StrCat(folder_.path(), "/", name), to = absl::StrCat(aside, "/", name);
    if (rename(from.c_str(), to.c_str()) != 0 && errno != ENOENT) return Failed("renaming", from);
  }
  KV_RETURN_IF_ERROR(Remove("sealed"));
  KV_RETURN_IF_ERROR(Remove("damaged"));
  const std::string text(why.message());
  if (absl::IsUnimplemented(why)) {
    spdlog::error(
        "the disk's index in {} is of another version ({}). index, segments and marks were moved to {}, and the disk "
        "begins empty. To use them again end this daemon, remove index, segments and marks, move those back, and start "
        "the version that wrote them; else remove {} to free its space.",
        folder_.path(), text, aside, aside);
  } else {
    spdlog::error(
        "the disk's index in {} is damaged ({}), and its blocks cannot be found without it. index, segments and "
        "marks were moved to {}, which nothing reads again, and the disk begins empty. Remove {} to free its space, "
        "and look for errors of the device (dmesg, smartctl).",
        folder_.path(), text, aside, aside);
  }
  return absl::OkStatus();
}

FolderWatch::FolderWatch(const DiskFolder& folder) {
  for (const std::string& path : {folder.path() + "/lock", folder.index(), folder.segments()}) {
    struct stat of;
    if (stat(path.c_str(), &of) == 0) parts_.push_back({path, of.st_dev, of.st_ino});
  }
}

bool FolderWatch::IsThere() const {
  return std::any_of(parts_.begin(), parts_.end(), [](const Part& part) {
    struct stat of;
    return stat(part.path.c_str(), &of) == 0 && of.st_dev == part.device && of.st_ino == part.inode;
  });
}

absl::Status FolderWatch::Check() const {
  for (const Part& part : parts_) {
    struct stat of;
    if (stat(part.path.c_str(), &of) == 0) {
      if (of.st_dev == part.device && of.st_ino == part.inode) continue;
      return absl::NotFoundError(absl::StrCat(part.path, " is another than at the start"));
    }
    if (errno == ENOENT || errno == ENOTDIR) return absl::NotFoundError(absl::StrCat(part.path, " is gone"));
  }
  return absl::OkStatus();
}

namespace {

// The index that is there, or a new one of a new disk. Errors: also DATA_LOSS and UNIMPLEMENTED: it cannot be used.
absl::StatusOr<std::unique_ptr<IndexDb>> OpenAsItIs(const DiskFolder& folder, rocksdb::FileSystem* index_files) {
  KV_RETURN_IF_ERROR(folder.CheckFiles());
  KV_RETURN_IF_ERROR(folder.damage());
  KV_RETURN_IF_ERROR(folder.Make());
  KV_RETURN_IF_ERROR(CheckIndexSeal(folder.sealed(), folder.index()));
  const absl::Status missing = absl::DataLossError(absl::StrCat(folder.index(), " is missing, or has nothing in it"));
  if (!folder.has_index() && folder.has_segments()) return missing;
  if (folder.has_segments() && !folder.has_index_log()) {
    return absl::DataLossError(absl::StrCat(folder.index(), " has no log (*.log) of what was written last"));
  }
  KV_RETURN_IF_ERROR(folder.RemoveSealed());  // before the index changes
  KV_ASSIGN_OR_RETURN(std::unique_ptr<IndexDb> db, IndexDb::Open(folder.index(), index_files));
  if (db->is_new() && folder.has_segments()) return missing;
  return db;
}

absl::StatusOr<RecordMarks> NewMarks(const DiskFolder& folder) {
  RecordMarks marks = RecordMarks::New();
  KV_RETURN_IF_ERROR(marks.Write(folder.marks(), MakeDiskFiles().get()));
  return marks;
}

absl::StatusOr<OpenedIndex> OpenInSomeWay(const DiskFolder& folder, rocksdb::FileSystem* index_files,
                                          DiskMetrics* metrics) {
  OpenedIndex opened;
  absl::StatusOr<std::unique_ptr<IndexDb>> db = OpenAsItIs(folder, index_files);
  absl::StatusOr<RecordMarks> marks = RecordMarks::Read(folder.marks());
  const absl::Status why = db.status();
  if (db.ok()) {
    if (!marks.ok() && !absl::IsNotFound(marks.status())) {
      spdlog::warn("{}: the blocks that the disk has now cannot be found any more if its index is damaged, too",
                   std::string(marks.status().message()));
    }
    if (!marks.ok()) marks = NewMarks(folder);
  } else if (absl::IsDataLoss(why) && marks.ok()) {
    opened.damage = std::string(why.message());
    if (folder.damage().ok()) KV_RETURN_IF_ERROR(folder.MarkDamaged(opened.damage));
    spdlog::error(
        "the disk's index in {} is damaged ({}): it is made anew from the records. Look for errors of the device "
        "(dmesg, smartctl).",
        folder.path(), opened.damage);
    metrics->errors("index").Increment();
    KV_RETURN_IF_ERROR(folder.RemoveSealed());
    KV_RETURN_IF_ERROR(folder.RemoveIndex());
    KV_RETURN_IF_ERROR(folder.Make());
    db = IndexDb::Open(folder.index(), index_files);
  } else if (absl::IsDataLoss(why) || absl::IsUnimplemented(why)) {
    const bool is_other = absl::IsUnimplemented(why);
    KV_RETURN_IF_ERROR(folder.SetAside(
        is_other ? why : absl::DataLossError(absl::StrCat(why.message(), "; ", marks.status().message()))));
    metrics->set_aside.Increment();
    KV_RETURN_IF_ERROR(folder.Make());
    marks = NewMarks(folder);
    db = IndexDb::Open(folder.index(), index_files);
  }
  KV_RETURN_IF_ERROR(db.status());
  KV_RETURN_IF_ERROR(marks.status());
  opened.db = *std::move(db);
  opened.marks = *std::move(marks);
  opened.segment_of_most = opened.marks.segment_of_most();
  const std::unique_ptr<DiskFiles> files = MakeDiskFiles();
  KV_ASSIGN_OR_RETURN(const auto segments, SegmentFiles(folder.segments(), files.get()).List());
  for (const auto& each : segments) opened.segment_of_most = std::max(opened.segment_of_most, each.segment);
  return opened;
}

}  // namespace

absl::StatusOr<OpenedIndex> OpenIndex(const DiskFolder& folder, rocksdb::FileSystem* index_files,
                                      DiskMetrics* metrics) {
  absl::StatusOr<OpenedIndex> opened = OpenInSomeWay(folder, index_files, metrics);
  if (opened.ok()) return opened;
  return FieldError(
      opened.status().code(), "--disk-path", absl::StrCat(folder.path(), " (", opened.status().message(), ")"),
      "a folder that one daemon alone uses and can write: on a file system that is mounted read-write and "
      "has room (a systemd unit also needs ReadWritePaths=)");
}

}  // namespace kvmanager
