// What local data connections, those between daemons of one host, need of the kernel: which process is on the other
// side of a Unix socket, and whether two processes are on one host. Any thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

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

}  // namespace kvmanager::tcp
