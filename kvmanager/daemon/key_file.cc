#include "kvmanager/daemon/key_file.h"

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
  explicit OpenFile(const std::string& path) : fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {}
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

absl::StatusOr<std::string> ReadKeyFile(absl::string_view flag, const std::string& path, size_t bytes_min,
                                        size_t bytes_max) {
  const OpenFile file(path);
  if (file.fd() < 0) {
    return InvalidField(flag, path, absl::StrCat("a file that can be read (", std::strerror(errno), ")"));
  }
  struct stat status;
  if (fstat(file.fd(), &status) != 0 || !S_ISREG(status.st_mode)) return InvalidField(flag, path, "a plain file");
  if (status.st_uid != geteuid() && status.st_uid != 0) {
    return InvalidField(flag, absl::StrCat(path, ", of user ", status.st_uid),
                        absl::StrCat("a file of this daemon's user, ", geteuid(), ", or of root"));
  }
  if ((status.st_mode & (S_IRWXG | S_IRWXO)) != 0) {
    return InvalidField(flag, absl::StrCat(path, ", mode ", absl::StrFormat("%04o", status.st_mode & 07777)),
                        absl::StrCat("a file that its owner alone can read: chmod 600 ", path));
  }
  std::string key(bytes_max + 1, '\0');
  size_t bytes = 0;
  while (bytes < key.size()) {
    const ssize_t n = read(file.fd(), key.data() + bytes, key.size() - bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return InvalidField(flag, path, absl::StrCat("a file that can be read (", std::strerror(errno), ")"));
    if (n == 0) break;
    bytes += static_cast<size_t>(n);
  }
  if (bytes < bytes_min || bytes > bytes_max) {
    return InvalidField(
        flag, absl::StrCat(path, ", of ", bytes > bytes_max ? "more than " : "", std::min(bytes, bytes_max), " bytes"),
        absl::StrCat(bytes_min, "..", bytes_max, " bytes: openssl rand -out ", path, " 32"));
  }
  key.resize(bytes);
  return key;
}

}  // namespace kvmanager
