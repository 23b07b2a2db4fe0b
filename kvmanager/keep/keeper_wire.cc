#include "kvmanager/keep/keeper_wire.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

absl::Status Gone(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat("keeper: ", what, ": ", std::strerror(errno)));
}

}  // namespace

absl::Status SendKeeperPacket(int socket, const KeeperPacket& packet) {
  KV_CHECK(packet.name.size() <= kKeptNameBytesMax);
  std::string bytes(1, static_cast<char>(packet.type));
  bytes += packet.name;
  iovec part{bytes.data(), bytes.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (packet.fd >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &packet.fd, sizeof packet.fd);
  }
  ssize_t sent;
  do {
    sent = sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent < 0 ? Gone("sending") : absl::OkStatus();
}

absl::StatusOr<KeeperPacket> ReceiveKeeperPacket(int socket) {
  char bytes[1 + kKeptNameBytesMax + 1];
  iovec part{bytes, sizeof bytes};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  ssize_t received;
  do {
    received = recvmsg(socket, &message, MSG_CMSG_CLOEXEC);
  } while (received < 0 && errno == EINTR);
  if (received < 0) return Gone("receiving");
  KeeperPacket packet;
  size_t fds = 0;
  for (cmsghdr* part_of = CMSG_FIRSTHDR(&message); part_of != nullptr; part_of = CMSG_NXTHDR(&message, part_of)) {
    if (part_of->cmsg_level != SOL_SOCKET || part_of->cmsg_type != SCM_RIGHTS) continue;
    for (size_t at = 0; CMSG_LEN((at + 1) * sizeof(int)) <= part_of->cmsg_len; ++at) {
      int fd;
      std::memcpy(&fd, CMSG_DATA(part_of) + at * sizeof fd, sizeof fd);
      if (fds++ == 0) {
        packet.fd = fd;
      } else {
        close(fd);
      }
    }
  }
  const auto refuse = [&](absl::Status status) {
    if (packet.fd >= 0) close(packet.fd);
    return status;
  };
  if (received == 0) return refuse(absl::UnavailableError("keeper: the other has gone"));
  const bool is_whole = fds <= 1 && (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0 &&
                        static_cast<size_t>(received) <= 1 + kKeptNameBytesMax;
  if (!is_whole) return refuse(absl::InvalidArgumentError("keeper: no packet, or more than one descriptor"));
  packet.type = static_cast<KeeperPacketType>(bytes[0]);
  packet.name.assign(bytes + 1, static_cast<size_t>(received) - 1);
  return packet;
}

absl::StatusOr<std::string> KeeperPath(absl::string_view folder) {
  std::string path = absl::StrCat(folder, "/", kKeeperSocket);
  constexpr size_t kPathBytesMax = sizeof(sockaddr_un::sun_path) - 1;
  if (path.size() > kPathBytesMax) {
    return InvalidField("--state-dir", folder,
                        absl::StrCat("at most ", kPathBytesMax - sizeof kKeeperSocket, " bytes long, for its socket"));
  }
  return path;
}

bool IsOfOwnUser(int socket) {
  ucred peer{};
  socklen_t bytes = sizeof peer;
  return getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0 && peer.uid == geteuid();
}

}  // namespace kvmanager
