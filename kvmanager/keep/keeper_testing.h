// What tests of the keeper share.
#pragma once

#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "kvmanager/base/local_socket.h"
#include "kvmanager/base/status.h"
#include "kvmanager/keep/keeper_wire.h"

namespace kvmanager::testing {

/// A connection to the keeper of a folder; -1: there is none.
inline int ConnectToKeeper(const std::string& folder) {
  const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  const sockaddr_un address = UnixAddress(KeeperPath(folder).value());
  if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) return fd;
  close(fd);
  return -1;
}

/// The process that keeps the memory of a folder; 0: there is none.
inline pid_t KeeperOf(const std::string& folder) {
  const int fd = ConnectToKeeper(folder);
  if (fd < 0) return 0;
  ucred peer{};
  socklen_t bytes = sizeof peer;
  KV_CHECK(getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) == 0);
  close(fd);
  return peer.pid;
}

/// Ends it, if there is one, by SIGKILL.
inline void KillKeeperOf(const std::string& folder) {
  const pid_t pid = KeeperOf(folder);
  if (pid > 0) kill(pid, SIGKILL);
  while (pid > 0 && KeeperOf(folder) == pid) usleep(1000);
}

}  // namespace kvmanager::testing
