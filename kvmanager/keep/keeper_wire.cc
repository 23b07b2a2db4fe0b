#include "kvmanager/keep/keeper_wire.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/local_socket.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr timeval kPatience{.tv_sec = 5, .tv_usec = 0};

absl::Status Gone(absl::string_view what) {
  const bool silent = errno == EAGAIN || errno == EWOULDBLOCK;
  return absl::UnavailableError(
      absl::StrCat("keeper: ", what, ": ",
                   silent ? absl::StrCat("no answer within ", kPatience.tv_sec, " s") : std::strerror(errno)));
}

}  // namespace

int ConnectToKeeper(const std::string& path) {
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  const sockaddr_un address = UnixAddress(path);
  // Also connecting may wait: for a keeper that is stopped.
  const bool waits = setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &kPatience, sizeof kPatience) == 0 &&
                     setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &kPatience, sizeof kPatience) == 0;
  if (waits && connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 && IsOfOwnUser(fd)) {
    return fd;
  }
  const int why = errno;
  close(fd);
  errno = why;
  return -1;
}

absl::Status SendKeeperPacket(int socket, const KeeperPacket& packet) {
  KV_CHECK(packet.name.size() <= kKeptNameBytesMax);
  uint8_t bytes[1 + kKeptNameBytesMax] = {static_cast<uint8_t>(packet.type)};
  std::copy(packet.name.begin(), packet.name.end(), bytes + 1);
  const ssize_t sent = SendWithDescriptor(socket, {bytes, 1 + packet.name.size()}, packet.fd, /*flags=*/0);
  return sent < 0 ? Gone("sending") : absl::OkStatus();
}

absl::StatusOr<KeeperPacket> ReceiveKeeperPacket(int socket) {
  uint8_t bytes[1 + kKeptNameBytesMax + 1];
  KeeperPacket packet;
  const ssize_t received = ReceiveWithDescriptor(socket, absl::MakeSpan(bytes), &packet.fd, /*flags=*/0);
  if (received < 0) return Gone("receiving");
  const auto refuse = [&](absl::Status status) {
    if (packet.fd >= 0) close(packet.fd);
    return status;
  };
  if (received == 0) return refuse(absl::UnavailableError("keeper: the other has gone"));
  if (packet.fd == kDescriptorLost || received == sizeof bytes) {
    return refuse(absl::InvalidArgumentError("keeper: a packet that is too long, or whose descriptor was lost"));
  }
  packet.type = static_cast<KeeperPacketType>(bytes[0]);
  packet.name.assign(bytes + 1, bytes + received);
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

}  // namespace kvmanager
