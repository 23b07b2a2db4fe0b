#include "tests/fuzz/target_util.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

#include "tests/harness.h"

namespace kvmanager::fuzz {

void RunStream(const std::string& address, absl::Span<const uint8_t> input) {
  const int fd = testing::ConnectSocket(address);
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
