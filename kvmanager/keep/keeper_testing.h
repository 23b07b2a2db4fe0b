// What tests of the keeper share.
#pragma once

#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "kvmanager/base/status.h"
#include "kvmanager/keep/keeper_wire.h"

namespace kvmanager::testing {

/// The process that keeps the memory of a folder; 0: there is none.
inline pid_t KeeperOf(const std::string& folder) {
  const int fd = ConnectToKeeper(KeeperPath(folder).value());
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
