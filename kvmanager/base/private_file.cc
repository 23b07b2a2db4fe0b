#include "kvmanager/base/private_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

class OpenFile {
 public:
  explicit OpenFile(const std::string& path) : fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)) {}
  ~OpenFile() {
    if (fd_ >= 0) close(fd_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  int fd() const { return fd_; }

 private:
  const int fd_;
};

}  // namespace

absl::StatusOr<PrivateFile> ReadPrivateFile(absl::string_view flag, const std::string& path,
                                            const PrivateFileRules& rules) {
  const auto unreadable = [&] {
    return InvalidField(flag, path, absl::StrCat("a file that can be read (", std::strerror(errno), ")"));
  };
  const OpenFile file(path);
  if (file.fd() < 0) return unreadable();
  struct stat status;
  if (fstat(file.fd(), &status) != 0 || !S_ISREG(status.st_mode)) return InvalidField(flag, path, "a plain file");
  if (status.st_uid != rules.owner && status.st_uid != 0) {
    return InvalidField(
        flag, absl::StrCat(path, ", of user ", status.st_uid),
        absl::StrCat("a file of this daemon's user, ", rules.owner, ", or of root: chown ", rules.owner, " ", path));
  }
  const std::string value = absl::StrCat(path, ", mode ", absl::StrFormat("%04o", status.st_mode & 07777));
  if (rules.secret && (status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    return InvalidField(flag, value, absl::StrCat("a file that its owner alone can read: chmod 600 ", path));
  }
  if ((status.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return InvalidField(flag, value, absl::StrCat("a file that its owner alone can write: chmod go-w ", path));
  }
  PrivateFile result{std::string(rules.bytes_max + 1, '\0'), status.st_mode};
  size_t bytes = 0;
  while (bytes < result.text.size()) {
    const ssize_t n = read(file.fd(), result.text.data() + bytes, result.text.size() - bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return unreadable();
    if (n == 0) break;
    bytes += static_cast<size_t>(n);
  }
  if (bytes < rules.bytes_min || bytes > rules.bytes_max) {
    return InvalidField(flag,
                        absl::StrCat(path, ", of ", bytes > rules.bytes_max ? "more than " : "",
                                     std::min(bytes, rules.bytes_max), " bytes"),
                        absl::StrCat(rules.bytes_min, "..", rules.bytes_max, " bytes",
                                     rules.made_by.empty() ? "" : ": ", rules.made_by));
  }
  result.text.resize(bytes);
  return result;
}

}  // namespace kvmanager
