#include "kvmanager/base/locked_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

absl::Status Failed(absl::string_view what, const std::string& path) {
  return absl::UnavailableError(absl::StrCat(what, " ", path, ": ", std::strerror(errno)));
}

}  // namespace

absl::StatusOr<LockedFolder> LockedFolder::Open(absl::string_view field, const std::string& path) {
  if (path.empty()) return InvalidField(field, path, "a directory");
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return InvalidField(field, path, absl::StrCat("a directory that can be made (", std::strerror(errno), ")"));
  }
  struct stat status;
  if (stat(path.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) return InvalidField(field, path, "a directory");
  if (status.st_uid != geteuid()) {
    return FieldError(absl::StatusCode::kFailedPrecondition, field, absl::StrCat(path, ", of user ", status.st_uid),
                      absl::StrCat("a directory of this daemon's user, ", geteuid()));
  }
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    return FieldError(absl::StatusCode::kFailedPrecondition, field,
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
    return FieldError(absl::StatusCode::kFailedPrecondition, field, absl::StrCat(path, ", open in another process"),
                      "a directory of one daemon alone");
  }
  return LockedFolder(path, lock);
}

LockedFolder::~LockedFolder() {
  if (lock_ >= 0) close(lock_);
}

}  // namespace kvmanager
