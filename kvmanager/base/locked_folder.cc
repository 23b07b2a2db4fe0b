#include "kvmanager/base/locked_folder.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr int kTryUs = 10000;
constexpr int kLivingTries = 20, kTries = 6000;  // 0.2 s, a minute

absl::Status Failed(absl::string_view what, const std::string& path) {
  return absl::UnavailableError(absl::StrCat(what, " ", path, ": ", std::strerror(errno)));
}

// Whether a process is ending, or was killed and has not noticed. true, too: it has gone.
bool IsEnding(const std::string& pid) {
  std::ifstream stat("/proc/" + pid + "/stat"), status("/proc/" + pid + "/status");
  std::string text;
  if (!std::getline(stat, text)) return true;
  // PID (NAME) STATE PPID PGRP SESSION TTY TPGID FLAGS
  const std::vector<std::string> fields = absl::StrSplit(text.substr(text.rfind(')') + 1), ' ', absl::SkipEmpty());
  constexpr uint64_t kExiting = 4;  // PF_EXITING of the kernel
  uint64_t flags = 0;
  if (fields.size() > 6 && absl::SimpleAtoi(fields[6], &flags) && (flags & kExiting) != 0) return true;
  while (std::getline(status, text)) {
    absl::string_view line = text;
    uint64_t pending = 0;
    if (!absl::ConsumePrefix(&line, "SigPnd:") && !absl::ConsumePrefix(&line, "ShdPnd:")) continue;
    if (absl::SimpleHexAtoi(absl::StripAsciiWhitespace(line), &pending) && (pending >> (SIGKILL - 1) & 1) != 0)
      return true;
  }
  return false;
}

// Whether the process that has the file locked is ending: the kernel first unmaps its memory, a second for each 10 to
// 20 GiB, and only then closes its files.
bool IsHolderEnding(int lock) {
  struct stat file;
  if (fstat(lock, &file) != 0) return false;
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    // 7: FLOCK ADVISORY WRITE 1234 fe:00:5678 0 EOF
    const std::vector<std::string> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (words.size() < 6 || words[1] != "FLOCK") continue;
    const std::string place =
        absl::StrFormat("%02x:%02x:%u", major(file.st_dev), minor(file.st_dev), static_cast<uint64_t>(file.st_ino));
    if (words[5] != place) continue;
    return IsEnding(words[4]);
  }
  return false;
}

// Waits for a holder that is ending; one that is not is looked at for a moment, since there are moments between.
bool Lock(int lock) {
  for (int tries = 0, living = 0; flock(lock, LOCK_EX | LOCK_NB) != 0; ++tries) {
    if (errno != EWOULDBLOCK) return false;
    living = IsHolderEnding(lock) ? 0 : living + 1;
    if (tries >= kTries || living >= kLivingTries) {
      errno = EWOULDBLOCK;
      return false;
    }
    usleep(kTryUs);
  }
  return true;
}

// With errno.
absl::Status CannotBeMade(absl::string_view field, const std::string& path) {
  return InvalidField(field, path, absl::StrCat("a directory that can be made (", std::strerror(errno), ")"));
}

}  // namespace

absl::Status LockedFolder::CheckPlace(absl::string_view field, const std::string& path) {
  if (path.empty()) return InvalidField(field, path, "a directory");
  struct stat status;
  if (lstat(path.c_str(), &status) != 0) {
    if (errno != ENOENT) return CannotBeMade(field, path);
    std::filesystem::path made = std::filesystem::absolute(path).lexically_normal();
    if (!made.has_filename()) made = made.parent_path();
    if (access(made.parent_path().c_str(), W_OK | X_OK) != 0) return CannotBeMade(field, path);
    return absl::OkStatus();
  }
  if (stat(path.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) return InvalidField(field, path, "a directory");
  if (status.st_uid != geteuid()) {
    return FieldError(absl::StatusCode::kFailedPrecondition, field, absl::StrCat(path, ", of user ", status.st_uid),
                      absl::StrCat("a directory of this daemon's user, ", geteuid()));
  }
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    return FieldError(absl::StatusCode::kFailedPrecondition, field,
                      absl::StrCat(path, ", mode ", absl::StrFormat("%04o", status.st_mode & 07777)),
                      // Not of /tmp and its like.
                      (status.st_mode & S_ISVTX) != 0
                          ? absl::StrCat("a directory of the daemon's own: ", path, "/kvmanager, for example")
                          : absl::StrCat("a directory for its owner alone: chmod 700 ", path));
  }
  return absl::OkStatus();
}

absl::StatusOr<LockedFolder> LockedFolder::Open(absl::string_view field, const std::string& path) {
  if (path.empty()) return InvalidField(field, path, "a directory");
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return CannotBeMade(field, path);
  KV_RETURN_IF_ERROR(CheckPlace(field, path));
  const std::string lock_path = path + "/lock";
  const int lock = open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
  if (lock < 0) {
    return FieldError(absl::StatusCode::kUnavailable, field,
                      absl::StrCat(path, " (opening ", lock_path, ": ", std::strerror(errno), ")"),
                      "a directory in which this daemon can write: on a file system that is mounted read-write and has "
                      "room (a systemd unit also needs ReadWritePaths=)");
  }
  if (!Lock(lock)) {
    const bool is_open = errno == EWOULDBLOCK;
    const absl::Status failed = Failed("locking", lock_path);
    close(lock);
    if (!is_open) return failed;
    return FieldError(absl::StatusCode::kFailedPrecondition, field, absl::StrCat(path, ", open in another process"),
                      "a directory of one daemon alone");
  }
  return LockedFolder(path, lock);
}

LockedFolder::~LockedFolder() {
  if (lock_ >= 0) close(lock_);
}

}  // namespace kvmanager
