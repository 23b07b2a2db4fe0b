// What a Unix socket knows and carries beside bytes: who is at the other end, and descriptors. Any thread.
#pragma once

#include <sys/types.h>
#include <sys/un.h>

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmanager {

/// The address of a socket's file. path: shorter than sockaddr_un's.
sockaddr_un UnixAddress(absl::string_view path);

/// A duplicate, which is the caller's and closed by exec(), of a listening socket of this family that the process was
/// given; -1: `fd` is none. fd: -1 too.
int TakeListening(int fd, int family);

/// Whether the process at the other end of `socket` runs as this one's user.
bool IsOfOwnUser(int socket);

/// As sendmsg() with MSG_NOSIGNAL and `flags`, again where a signal interrupts it, with a descriptor beside the first
/// byte; fd -1: none.
ssize_t SendWithDescriptor(int socket, absl::Span<const uint8_t> bytes, int fd, int flags);

inline constexpr int kNoDescriptor = -1;
inline constexpr int kDescriptorLost = -2;
/// As recvmsg() with `flags`, again where a signal interrupts it. *fd: the descriptor that came, which is the caller's
/// and closed by exec(); kNoDescriptor; kDescriptorLost if one came that this process has no room for. Of several at
/// once the first is taken and the others are closed.
ssize_t ReceiveWithDescriptor(int socket, absl::Span<uint8_t> bytes, int* fd, int flags);

}  // namespace kvmanager
