// What a daemon and the keeper of its memory say to one another, on a SOCK_SEQPACKET socket: one packet each, with at
// most one descriptor. A keeper that takes another one's place speaks as a daemon does.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvmanager {

enum class KeeperPacketType : uint8_t {
  kList = 'L',    // daemon: what is kept? Answered by kKept packets and kDone
  kKept = 'H',    // keeper: name and descriptor
  kKeep = 'K',    // daemon: keep this descriptor by this name. Answered by kDone, or kRefused
  kForget = 'F',  // daemon: keep nothing any more. Answered by kDone
  kIdle = 'I',    // daemon: without a daemon, end after so many seconds (name). Answered by kDone, or kRefused
  kPing = 'P',    // daemon: is somebody there? Answered by kDone; by an older keeper with kRefused
  kYield =
      'Y',  // a service's keeper, which has what is kept: end. Answered by kDone; by another service's with kRefused
  kDone = 'D',
  kRefused = 'R',  // keeper: it has too much, or does not understand
};

struct KeeperPacket {
  KeeperPacketType type = KeeperPacketType::kDone;
  std::string name;
  int fd = -1;  // the receiver's
};

constexpr size_t kKeptNameBytesMax = 64;
constexpr size_t kKeptMax = 2048;  // descriptors
constexpr char kKeeperSocket[] = "keeper";

/// Connects to the keeper that listens at `path`, if its process is of this user; what the socket waits for it waits 5
/// s for. -1: there is none; errno EAGAIN: there is, and it takes no connection.
int ConnectToKeeper(const std::string& path);
/// Sends one packet; `packet.fd` stays the caller's. Errors: UNAVAILABLE.
absl::Status SendKeeperPacket(int socket, const KeeperPacket& packet);
/// Waits for one packet. Errors: UNAVAILABLE (the other has gone, or the socket's timeout is over); INVALID_ARGUMENT
/// (what it sent is no packet).
absl::StatusOr<KeeperPacket> ReceiveKeeperPacket(int socket);
/// The address of the keeper of a folder. Errors: INVALID_ARGUMENT (its path is too long for a socket).
absl::StatusOr<std::string> KeeperPath(absl::string_view folder);

}  // namespace kvmanager
