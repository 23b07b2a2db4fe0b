#include "kvmanager/keep/memory_keeper.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/child_process.h"
#include "kvmanager/base/local_socket.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr int kTries = 500;  // to reach a keeper that was just started
constexpr int kTryUs = 10000;
constexpr int kPingMs = 1000;

}  // namespace

absl::StatusOr<std::unique_ptr<MemoryKeeper>> MemoryKeeper::Open(const std::string& folder,
                                                                 const std::vector<std::string>& program) {
  KV_ASSIGN_OR_RETURN(const std::string path, KeeperPath(folder));
  struct stat of;
  if (stat(folder.c_str(), &of) != 0) {
    return absl::UnavailableError(absl::StrCat("--state-dir ", folder, ": ", std::strerror(errno),
                                               "; was it moved or removed? Put it back, or restart the daemon"));
  }
  auto keeper = Reach(path, program);
  // One whose time was over may have gone while this daemon connected.
  if (absl::IsUnavailable(keeper.status())) keeper = Reach(path, program);
  if (keeper.ok() || !absl::IsUnavailable(keeper.status())) return keeper;
  return absl::UnavailableError(absl::StrCat("--state-dir ", folder, ": ", keeper.status().message(),
                                             "; end the process that holds the memory there (kvmanagerd --keeper ",
                                             folder, "), whose blocks are lost then, or take another folder"));
}

absl::StatusOr<std::unique_ptr<MemoryKeeper>> MemoryKeeper::Reach(const std::string& path,
                                                                  const std::vector<std::string>& program) {
  int socket = ConnectToKeeper(path);
  bool silent = socket < 0 && errno == EAGAIN;
  if (socket < 0 && !silent) {
    KV_ASSIGN_OR_RETURN(ChildProcess keeper, ChildProcess::Start(program, {}, ChildProcess::Environment::kLean));
    for (int i = 0; i < kTries && socket < 0 && !silent; ++i) {
      usleep(kTryUs);
      socket = ConnectToKeeper(path);
      silent = socket < 0 && errno == EAGAIN;
    }
    if (socket >= 0) keeper.Leave();
  }
  if (socket < 0) return absl::UnavailableError(absl::StrCat("keeper: it takes no connection at ", path));
  std::unique_ptr<MemoryKeeper> keeper(new MemoryKeeper(socket, path));
  KV_RETURN_IF_ERROR(keeper->List());
  return keeper;
}

MemoryKeeper::MemoryKeeper(int socket, const std::string& path) : socket_(socket), path_(path) {
  struct stat of;
  if (stat(path.c_str(), &of) != 0) return;
  device_ = of.st_dev;
  inode_ = of.st_ino;
}

bool MemoryKeeper::is_found() const {
  struct stat of;
  return stat(path_.c_str(), &of) == 0 && of.st_dev == device_ && of.st_ino == inode_;
}

MemoryKeeper::~MemoryKeeper() {
  CloseFound();
  close(socket_);
}

void MemoryKeeper::CloseFound() {
  for (const auto& [name, fd] : found_) close(fd);
  found_.clear();
}

absl::Status MemoryKeeper::List() {
  KV_RETURN_IF_ERROR(SendKeeperPacket(socket_, {KeeperPacketType::kList, "", -1}));
  for (;;) {
    KV_ASSIGN_OR_RETURN(KeeperPacket packet, ReceiveKeeperPacket(socket_));
    if (packet.type == KeeperPacketType::kKept && packet.fd >= 0 && found_.emplace(packet.name, packet.fd).second) {
      continue;
    }
    if (packet.fd >= 0) close(packet.fd);
    if (packet.type == KeeperPacketType::kDone) return absl::OkStatus();
    return absl::UnavailableError("keeper: it does not say what it has");
  }
}

int MemoryKeeper::Take(const std::string& name) {
  const auto found = found_.find(name);
  if (found == found_.end()) return -1;
  const int fd = found->second;
  found_.erase(found);
  return fd;
}

absl::Status MemoryKeeper::Ask(KeeperPacketType type, absl::string_view name, int fd) {
  KV_RETURN_IF_ERROR(SendKeeperPacket(socket_, {type, std::string(name), fd}));
  KV_ASSIGN_OR_RETURN(KeeperPacket packet, ReceiveKeeperPacket(socket_));
  if (packet.fd >= 0) close(packet.fd);
  if (packet.type == KeeperPacketType::kDone) return absl::OkStatus();
  return absl::UnavailableError(type == KeeperPacketType::kKeep
                                    ? absl::StrCat("keeper: it refuses to keep ", name,
                                                   ": it may have too few descriptors (ulimit -n, or "
                                                   "LimitNOFILE of its service, which should be ",
                                                   2 * kKeptMax, ")")
                                    : "keeper: it is of an earlier version");
}

absl::Status MemoryKeeper::Keep(absl::string_view name, int fd) { return Ask(KeeperPacketType::kKeep, name, fd); }

absl::Status MemoryKeeper::SetIdle(int64_t seconds) { return Ask(KeeperPacketType::kIdle, absl::StrCat(seconds), -1); }

absl::Status MemoryKeeper::Ping() {
  KV_RETURN_IF_ERROR(SendKeeperPacket(socket_, {KeeperPacketType::kPing, "", -1}));
  pollfd answer{socket_, POLLIN, 0};
  while (poll(&answer, 1, kPingMs) < 0 && errno == EINTR) {
  }
  if (answer.revents == 0) {
    return absl::DeadlineExceededError(absl::StrCat("keeper: no answer within ", kPingMs, " ms"));
  }
  KV_ASSIGN_OR_RETURN(KeeperPacket packet, ReceiveKeeperPacket(socket_));
  if (packet.fd >= 0) close(packet.fd);
  return absl::OkStatus();
}

bool MemoryKeeper::gone() const {
  pollfd look{socket_, 0, 0};
  return poll(&look, 1, 0) > 0 && (look.revents & (POLLHUP | POLLERR)) != 0;
}

uint32_t MemoryKeeper::pid() const {
  ucred peer{};
  socklen_t bytes = sizeof(peer);
  if (getsockopt(socket_, SOL_SOCKET, SO_PEERCRED, &peer, &bytes) != 0) return 0;
  return static_cast<uint32_t>(peer.pid);
}

absl::Status MemoryKeeper::Forget() {
  CloseFound();
  return Ask(KeeperPacketType::kForget, "", -1);
}

}  // namespace kvmanager
