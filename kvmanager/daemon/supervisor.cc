#include "kvmanager/daemon/supervisor.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

absl::Status NotifySupervisor(absl::string_view state) {
  const char* const variable = std::getenv("NOTIFY_SOCKET");
  if (variable == nullptr) return absl::OkStatus();
  const absl::string_view name = variable;
  sockaddr_un to{};
  if (name.size() < 2 || name.size() >= sizeof to.sun_path || (name[0] != '/' && name[0] != '@')) {
    return InvalidField("NOTIFY_SOCKET", name,
                        absl::StrCat("an absolute path, or @ and a name, of 2..", sizeof to.sun_path - 1, " bytes"));
  }
  to.sun_family = AF_UNIX;
  std::copy(name.begin(), name.end(), to.sun_path);
  if (name[0] == '@') to.sun_path[0] = 0;
  const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + name.size());
  const int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  const bool sent = fd >= 0 && sendto(fd, state.data(), state.size(), MSG_NOSIGNAL,
                                      reinterpret_cast<const sockaddr*>(&to), bytes) >= 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  if (!sent) return absl::UnavailableError(absl::StrCat("NOTIFY_SOCKET ", name, ": ", std::strerror(error)));
  return absl::OkStatus();
}

}  // namespace kvmanager
