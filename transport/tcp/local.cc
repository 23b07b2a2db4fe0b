#include "transport/tcp/local.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kvmanager/base/status.h"

namespace kvmanager::tcp {
namespace {

constexpr size_t kDescriptorsMax = 8;  // that a peer may attach at once; the kernel drops more

}  // namespace

HostId ThisHost() {
  HostId id = {};
  std::string text;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
  const std::string bytes = absl::HexStringToBytes(absl::StrReplaceAll(text, {{"-", ""}}));
  if (bytes.size() == id.size()) std::memcpy(id.data(), bytes.data(), id.size());
  return id;
}

std::string NewLocalName() {
  uint8_t random[16];
  KV_CHECK(getrandom(random, sizeof(random), 0) == static_cast<ssize_t>(sizeof(random)));
  return absl::StrCat("kvmanager-peer-",
                      absl::BytesToHexString({reinterpret_cast<const char*>(random), sizeof(random)}));
}

bool IsSameUser(int socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0 && credentials.uid == ::geteuid();
}

ssize_t SendWithDescriptor(int socket, absl::Span<const uint8_t> bytes, int fd) {
  iovec piece = {const_cast<uint8_t*>(bytes.data()), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  if (fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &fd, sizeof(fd));
  }
  return ::sendmsg(socket, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

ssize_t ReceiveWithDescriptor(int socket, absl::Span<uint8_t> bytes, int* fd) {
  *fd = -1;
  iovec piece = {bytes.data(), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(kDescriptorsMax * sizeof(int))];
  msghdr message{};
  message.msg_iov = &piece;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t n = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  if (n < 0) return n;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int received = -1;
      std::memcpy(&received, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      if (*fd < 0) {
        *fd = received;
      } else {
        ::close(received);
      }
    }
  }
  return n;
}

}  // namespace kvmanager::tcp
