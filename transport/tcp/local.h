// What local data connections, those between daemons of one host, need of the kernel: which process is on the other
// side of a Unix socket, descriptors that travel with bytes, and whether two processes are on one host. Any thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "absl/types/span.h"
#include "transport/tcp/wire.h"

namespace kvmanager::tcp {

/// This host's boot id; zeros if the kernel does not say.
HostId ThisHost();

/// A new name in the abstract namespace of Unix sockets, which nobody else has; without the leading zero byte.
std::string NewLocalName();

/// The process that connected `socket`, or that listens on its other side: 0, and -1 instead of a descriptor of it (the
/// caller's, readable once it has ended), if it is of another PID namespace or the kernel does not say.
pid_t PeerPid(int socket);
int OpenPeerProcess(int socket);

/// Whether the process on the other side of `socket` runs as this one's user.
bool IsSameUser(int socket);

/// As send() and recv() on a non-blocking Unix socket, with a descriptor beside the first byte: -1 for none, -1 if none
/// came, and kDescriptorLost if one came that this process has no room for. A descriptor that came is the caller's; of
/// several at once the first is taken and the others are closed.
inline constexpr int kDescriptorLost = -2;
ssize_t SendWithDescriptor(int socket, absl::Span<const uint8_t> bytes, int fd);
ssize_t ReceiveWithDescriptor(int socket, absl::Span<uint8_t> bytes, int* fd);

}  // namespace kvmanager::tcp
