#include "kvmanager/daemon/handed_sockets.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace kvmanager {
namespace {

constexpr int kFirstFd = 3;

}  // namespace

std::vector<HandedSocket> TakeHandedSockets() {
  std::vector<HandedSocket> sockets;
  const char* const variable = std::getenv(kHandedSocketsVariable);
  if (variable == nullptr) return sockets;
  for (const absl::string_view line : absl::StrSplit(variable, '\n', absl::SkipEmpty())) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, absl::MaxSplits(' ', 2));
    HandedSocket socket;
    if (words.size() != 3 || !absl::SimpleAtoi(words[0], &socket.fd) || socket.fd < kFirstFd) continue;
    if (fcntl(socket.fd, F_SETFD, FD_CLOEXEC) != 0) continue;
    socket.flag = std::string(words[1]);
    socket.address = std::string(words[2]);
    sockets.push_back(std::move(socket));
  }
  unsetenv(kHandedSocketsVariable);
  return sockets;
}

void CloseHandedSockets(absl::Span<const HandedSocket> sockets, absl::Span<const std::string> kept) {
  for (const HandedSocket& socket : sockets) {
    close(socket.fd);
    absl::string_view path = socket.address;
    if (!absl::ConsumePrefix(&path, "unix:") || std::find(kept.begin(), kept.end(), socket.address) != kept.end()) {
      continue;
    }
    const std::string file(path);
    struct stat info;
    if (lstat(file.c_str(), &info) == 0 && S_ISSOCK(info.st_mode)) unlink(file.c_str());
  }
}

int FindHanded(absl::Span<const HandedSocket> sockets, absl::string_view flag, absl::string_view address) {
  for (const HandedSocket& socket : sockets) {
    if (socket.flag == flag && socket.address == address) return socket.fd;
  }
  return -1;
}

void HandSocket(absl::string_view flag, absl::string_view address, int fd, std::vector<HandedSocket>* sockets) {
  const int copy = fd < 0 || absl::StrContains(address, '\n') ? -1 : fcntl(fd, F_DUPFD_CLOEXEC, kFirstFd);
  if (copy >= 0) sockets->push_back({std::string(flag), std::string(address), copy});
}

void PassHandedSockets(absl::Span<const HandedSocket> sockets) {
  constexpr unsigned kCloseOnExec = 1 << 2;  // CLOSE_RANGE_CLOEXEC
  (void)syscall(SYS_close_range, unsigned{kFirstFd}, ~0U, kCloseOnExec);
  std::string lines;
  for (const HandedSocket& socket : sockets) {
    if (fcntl(socket.fd, F_SETFD, 0) == 0) {
      absl::StrAppend(&lines, socket.fd, " ", socket.flag, " ", socket.address, "\n");
    }
  }
  setenv(kHandedSocketsVariable, lines.c_str(), 1);
}

}  // namespace kvmanager
