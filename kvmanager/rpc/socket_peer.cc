#include "kvmanager/rpc/socket_peer.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace kvmanager {

ucred PeerOf(int socket) {
  ucred credentials = {};
  socklen_t bytes = sizeof credentials;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) return {0, uid_t(-1), gid_t(-1)};
  credentials.pid = std::max(credentials.pid, 0);
  return credentials;
}

uint64_t OriginOf(int socket, const ucred& peer, bool unix_socket) {
  if (unix_socket) return peer.uid;
  sockaddr_storage address{};
  socklen_t bytes = sizeof address;
  const bool known = getpeername(socket, reinterpret_cast<sockaddr*>(&address), &bytes) == 0;
  absl::string_view host;
  if (known && address.ss_family == AF_INET) {
    const in_addr& at = reinterpret_cast<const sockaddr_in&>(address).sin_addr;
    host = {reinterpret_cast<const char*>(&at), sizeof at};
  } else if (known && address.ss_family == AF_INET6) {
    // One host may have a whole /64.
    host = {reinterpret_cast<const char*>(&reinterpret_cast<const sockaddr_in6&>(address).sin6_addr), 8};
  }
  return absl::HashOf(host) | uint64_t{1} << 63;  // no user's
}

int PeerPidFd(int socket) {
  constexpr int kSoPeerPidFd = 77;  // SO_PEERPIDFD, Linux 6.5: free of races with a PID's reuse
  int pidfd = -1;
  socklen_t bytes = sizeof pidfd;
  if (getsockopt(socket, SOL_SOCKET, kSoPeerPidFd, &pidfd, &bytes) == 0) return pidfd;
  const pid_t pid = PeerOf(socket).pid;
  return pid == 0 ? -1 : static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
}

std::string PeerAddress(int socket) {
  sockaddr_storage address = {};
  socklen_t bytes = sizeof address;
  char text[INET6_ADDRSTRLEN] = "?";
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&address), &bytes) != 0) return text;
  if (address.ss_family == AF_INET6) {
    const auto& six = reinterpret_cast<const sockaddr_in6&>(address);
    inet_ntop(AF_INET6, &six.sin6_addr, text, sizeof text);
    return absl::StrCat("[", text, "]:", ntohs(six.sin6_port));
  }
  const auto& four = reinterpret_cast<const sockaddr_in&>(address);
  inet_ntop(AF_INET, &four.sin_addr, text, sizeof text);
  return absl::StrCat(text, ":", ntohs(four.sin_port));
}

std::string DescribePeer(int socket, bool unix_socket) {
  if (!unix_socket) return PeerAddress(socket);
  const ucred peer = PeerOf(socket);
  if (peer.uid == uid_t(-1)) return "an unknown process";
  if (peer.pid == 0) return absl::StrCat("a process of user ", peer.uid, " in another PID namespace");
  return absl::StrCat("process ", peer.pid, " of user ", peer.uid);
}

}  // namespace kvmanager
