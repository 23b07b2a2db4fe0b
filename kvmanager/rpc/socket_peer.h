// Who is at the other end of a client's socket. Free of state; any thread.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

namespace kvmanager {

/// The process that connected over a Unix socket, and its user. pid 0: it is of another PID namespace.
ucred PeerOf(int socket);

/// Whose a connection is: the user's over a Unix socket, the host's over TCP. peer: as PeerOf says.
uint64_t OriginOf(int socket, const ucred& peer, bool unix_socket);

/// A descriptor of the process that connected over a Unix socket, the caller's to close. -1: it is of another PID
/// namespace, or the kernel is too old.
int PeerPidFd(int socket);

/// "HOST:PORT" of the other end of a TCP socket.
std::string PeerAddress(int socket);

/// For the log: "process 12 of user 1000" over a Unix socket, else "HOST:PORT".
std::string DescribePeer(int socket, bool unix_socket);

}  // namespace kvmanager
