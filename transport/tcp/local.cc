#include "transport/tcp/local.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
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

pid_t PeerPid(int socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  const bool known = ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0;
  return known ? std::max<pid_t>(credentials.pid, 0) : 0;
}

int OpenPeerProcess(int socket) {
  constexpr int kSoPeerPidFd = 77;  // SO_PEERPIDFD, Linux 6.5: free of races with a PID's reuse
  int process = -1;
  socklen_t size = sizeof(process);
  if (::getsockopt(socket, SOL_SOCKET, kSoPeerPidFd, &process, &size) == 0) return process;
  const pid_t pid = PeerPid(socket);
  return pid == 0 ? -1 : static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
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
  if ((message.msg_flags & MSG_CTRUNC) != 0) *fd = kDescriptorLost;
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr; header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (header->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int received = -1;
      std::memcpy(&received, CMSG_DATA(header) + i * sizeof(int), sizeof(int));
      if (*fd == -1) {
        *fd = received;
      } else {
        ::close(received);
      }
    }
  }
  return n;
}

}  // namespace kvmanager::tcp
