#include "kvmanager/base/local_socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t kDescriptorsMax = 8;  // that the other end may attach at once; the kernel drops more

}  // namespace

sockaddr_un UnixAddress(absl::string_view path) {
  sockaddr_un address{};
  KV_CHECK(path.size() < sizeof address.sun_path);
  address.sun_family = AF_UNIX;
  std::copy(path.begin(), path.end(), address.sun_path);
  return address;
}

int TakeListening(int fd, int family) {
  const auto is = [fd](int option, int wanted) {
    int value = 0;
    socklen_t bytes = sizeof value;
    return getsockopt(fd, SOL_SOCKET, option, &value, &bytes) == 0 && value == wanted;
  };
  if (fd < 0 || !is(SO_ACCEPTCONN, 1) || !is(SO_DOMAIN, family) || !is(SO_TYPE, SOCK_STREAM)) return -1;
  return fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

bool IsOfOwnUser(int socket) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

ssize_t SendWithDescriptor(int socket, absl::Span<const uint8_t> bytes, int fd, int flags) {
  iovec part{const_cast<uint8_t*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof fd)] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &message, MSG_NOSIGNAL | flags);
  } while (sent < 0 && errno == EINTR);
  return sent;
}

ssize_t ReceiveWithDescriptor(int socket, absl::Span<uint8_t> bytes, int* fd, int flags) {
  *fd = kNoDescriptor;
  iovec part{bytes.data(), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kDescriptorsMax * sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t received;
  do {
    received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC | flags);
  } while (received < 0 && errno == EINTR);
  if (received < 0) return received;
  if ((message.msg_flags & MSG_CTRUNC) != 0) *fd = kDescriptorLost;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int came = kNoDescriptor;
      std::memcpy(&came, CMSG_DATA(header) + i * sizeof came, sizeof came);
      if (*fd == kNoDescriptor) {
        *fd = came;
      } else {
        close(came);
      }
    }
  }
  return received;
}

}  // namespace kvmanager
