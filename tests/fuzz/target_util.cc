#include "tests/fuzz/target_util.h"

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "tests/harness.h"

namespace kvmanager::fuzz {
namespace {

/// A connection to a Unix socket, or to a port of 127.0.0.1 from the next of 65,536 addresses of this host: the ports
/// of one address would all be waiting for late packets (TIME_WAIT) after half a minute.
int Connect(const std::string& address) {
  if (absl::StartsWith(address, "unix:")) return testing::ConnectSocket(address);
  uint32_t port = 0;
  KV_CHECK(absl::SimpleAtoi(address.substr(address.rfind(':') + 1), &port));
  static uint32_t connections = 0;
  const auto of_host = [](uint32_t host, uint32_t at) {
    sockaddr_in made{};
    made.sin_family = AF_INET;
    made.sin_addr.s_addr = htonl(host);
    made.sin_port = htons(static_cast<uint16_t>(at));
    return made;
  };
  const sockaddr_in from = of_host(0x7f010000 + connections++ % 65536, 0), to = of_host(INADDR_LOOPBACK, port);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  KV_CHECK(fd >= 0 && bind(fd, reinterpret_cast<const sockaddr*>(&from), sizeof from) == 0);
  KV_CHECK(connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof to) == 0);
  return fd;
}

}  // namespace

void RunStream(const std::string& address, absl::Span<const uint8_t> input) {
  const int fd = Connect(address);
  KV_CHECK(fd >= 0);
  // Answers are read while writing: neither side may wait for the other.
  absl::string_view rest(reinterpret_cast<const char*>(input.data()), input.size());
  char bytes[16384];
  bool open = true;
  while (!rest.empty() && open) {
    pollfd p{fd, POLLIN | POLLOUT, 0};
    KV_CHECK(poll(&p, 1, -1) == 1);
    if ((p.revents & (POLLIN | POLLHUP | POLLERR)) != 0) open = recv(fd, bytes, sizeof bytes, MSG_DONTWAIT) > 0;
    if (open && (p.revents & POLLOUT) != 0) {
      const ssize_t n = send(fd, rest.data(), rest.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
      if (n > 0) rest.remove_prefix(n);
      if (n < 0 && errno != EAGAIN) open = false;
    }
  }
  shutdown(fd, SHUT_WR);
  while (open && recv(fd, bytes, sizeof bytes, 0) > 0) {
  }
  close(fd);
}

}  // namespace kvmanager::fuzz
