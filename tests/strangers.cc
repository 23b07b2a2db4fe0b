#include "tests/strangers.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_split.h"
#include "transport/tcp/wire.h"

namespace kvmanager::testing {
namespace {

std::vector<std::string> SocketsOf(const DaemonProcess& daemon) {
  std::vector<std::string> sockets = absl::StrSplit(daemon.listen(), ',');
  for (const std::string& more : {daemon.peer(), daemon.metrics(), daemon.http()}) {
    if (!more.empty()) sockets.push_back(more);
  }
  return sockets;
}

}  // namespace

Stranger::Stranger(const DaemonProcess& daemon, std::string recorded, uint64_t seed)
    : sockets_(SocketsOf(daemon)), recorded_(std::move(recorded)), random_(seed) {}

std::string Stranger::Noise(size_t bytes) {
  std::string noise(bytes, '\0');
  for (char& c : noise) c = static_cast<char>(Draw(4) == 0 ? 0 : random_());
  return noise;
}

// Mostly behind the hello, so that the daemon gets further.
std::string Stranger::Changed() {
  constexpr size_t kHello = 300;
  std::string bytes = recorded_;
  for (uint64_t changes = 1 + Draw(6); changes > 0; --changes) {
    const size_t from = Draw(10) == 0 ? 0 : std::min(kHello, bytes.size() - 1);
    const size_t at = from + Draw(bytes.size() - from);
    switch (Draw(5)) {
      case 0:
        bytes[at] = static_cast<char>(random_());
        break;
      case 1:
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << Draw(8)));
        break;
      case 2:  // a word of small numbers, of which pointers are made
        for (size_t i = at & ~size_t{7}; i < std::min(bytes.size(), (at & ~size_t{7}) + 8); ++i)
          bytes[i] = char(Draw(3));
        break;
      case 3:
        bytes.resize(std::max<size_t>(at, 1));
        break;
      default:  // said again
        bytes.insert(at & ~size_t{7}, bytes.substr(at & ~size_t{7}, 8 * Draw(200)));
    }
  }
  return bytes;
}

void Stranger::Say(const std::string& address, const std::string& bytes, int64_t listen_ms) {
  ++said_;
  const int fd = ConnectSocket(address);
  if (fd < 0) return;
  const int64_t until = NowMs() + listen_ms;
  size_t sent = 0;
  char taken[65536];
  for (int64_t now; (now = NowMs()) < until;) {
    pollfd wait{fd, short(POLLIN | (sent < bytes.size() ? POLLOUT : 0)), 0};
    if (poll(&wait, 1, static_cast<int>(until - now)) <= 0) break;
    if (wait.revents & POLLOUT) {
      const ssize_t n = send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n < 0) break;
      sent += static_cast<size_t>(n);
    }
    if ((wait.revents & ~POLLOUT) != 0 && recv(fd, taken, sizeof taken, MSG_DONTWAIT) <= 0) break;
  }
  close(fd);
}

void Stranger::Turn() {
  const std::string& socket = sockets_[Draw(sockets_.size())];
  switch (Draw(8)) {
    case 0:
      return Say(socket, Noise(1 + Draw(4096)), 20);
    case 1:
      return Say(socket, "", 5);
    case 2:
      return Say(socket, recorded_.substr(0, Draw(std::min<size_t>(recorded_.size(), 400))), 20);
    case 3:
      return Say(socket, tcp::EncodeHello({}) + tcp::EncodeEmpty(tcp::FrameType::kPing) + Noise(Draw(512)), 20);
    case 4:
      return Say(socket, "GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n" + Noise(Draw(64)) + "\r\n\r\n", 20);
    default:
      return Say(sockets_[0], Changed(), 20 + static_cast<int64_t>(Draw(200)));
  }
}

}  // namespace kvmanager::testing
