#include "transport/tcp/local.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "kvmanager/base/status.h"

namespace kvmanager::tcp {

HostId ThisHost() {
  HostId id = {};
  std::string text;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
  const std::string bytes = absl::HexStringToBytes(absl::StrReplaceAll(text, {{"-", ""}}));
  if (bytes.size() == id.size()) std::memcpy(id.data(), bytes.data(), id.size());
  return id;
}

std::string NewLocalName() {
  uint8_t random[16];
  KV_CHECK(getrandom(random, sizeof(random), 0) == static_cast<ssize_t>(sizeof(random)));
  return absl::StrCat("kvmanager-peer-",
                      absl::BytesToHexString({reinterpret_cast<const char*>(random), sizeof(random)}));
}

pid_t PeerPid(int socket) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  const bool known = ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0;
  return known ? std::max<pid_t>(credentials.pid, 0) : 0;
}

int OpenPeerProcess(int socket) {
  constexpr int kSoPeerPidFd = 77;  // SO_PEERPIDFD, Linux 6.5: free of races with a PID's reuse
  int process = -1;
  socklen_t size = sizeof(process);
  if (::getsockopt(socket, SOL_SOCKET, kSoPeerPidFd, &process, &size) == 0) return process;
  const pid_t pid = PeerPid(socket);
  return pid == 0 ? -1 : static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
}

}  // namespace kvmanager::tcp
