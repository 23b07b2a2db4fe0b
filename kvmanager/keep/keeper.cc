#include "kvmanager/keep/keeper.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/local_socket.h"
#include "kvmanager/base/status.h"
#include "kvmanager/keep/keeper_wire.h"

namespace kvmanager {
namespace {

constexpr int kExitFailed = 1, kExitUsage = 2;
constexpr uint64_t kSecondsMax = 1000000;
constexpr size_t kDaemonsMax = 8;

constexpr int kTries = 10;  // of keepers that start at once, to take the socket's place

/// The socket that daemons connect to; -1: another keeper has it.
absl::StatusOr<int> Listen(const std::string& path) {
  const sockaddr_un address = UnixAddress(path);
  const auto* const to = reinterpret_cast<const sockaddr*>(&address);
  const auto failed = [&](absl::string_view what) {
    return absl::UnavailableError(absl::StrCat(what, " ", path, ": ", std::strerror(errno)));
  };
  for (int tries = 0;; ++tries) {
    const int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0) return failed("opening");
    if (bind(fd, to, sizeof address) == 0) {
      if (listen(fd, 4) == 0) return fd;
      close(fd);
      return failed("listening at");
    }
    const int why = errno;
    close(fd);
    if (why == EADDRINUSE) {
      const int other = ConnectToKeeper(path);
      const bool is_there = other >= 0 || errno == EAGAIN;
      if (other >= 0) close(other);
      if (is_there) return -1;
    }
    errno = why;
    if (why != EADDRINUSE || tries == kTries) return failed("binding");
    // Of a keeper that has ended; or another one that starts now was faster.
    if (unlink(path.c_str()) != 0 && errno != ENOENT) return failed("removing");
  }
}

class Keeper {
 public:
  /// idle_ns: 0: it never ends by itself. of_daemon: a daemon started it, and daemons may say another time.
  Keeper(int listen, int64_t idle_ns, bool of_daemon) : listen_(listen), idle_ns_(idle_ns), of_daemon_(of_daemon) {}

  void Run() {
    int64_t ends_ns = clock_.NowNs() + idle_ns_;
    for (;;) {
      std::vector<pollfd> fds = {{listen_, POLLIN, 0}};
      for (const int fd : daemons_) fds.push_back({fd, POLLIN, 0});
      int wait_ms = -1;
      if (daemons_.empty() && idle_ns_ > 0) {
        const int64_t left_ns = ends_ns - clock_.NowNs();
        if (left_ns <= 0) return;
        wait_ms = static_cast<int>(left_ns / 1000000 + 1);
      }
      if (poll(fds.data(), fds.size(), wait_ms) < 0) {
        if (errno == EINTR) continue;
        return;
      }
      for (size_t i = 1; i < fds.size(); ++i) {
        if (fds[i].revents == 0 || Serve(fds[i].fd)) continue;
        close(fds[i].fd);
        std::erase(daemons_, fds[i].fd);
        ends_ns = clock_.NowNs() + idle_ns_;
      }
      if ((fds[0].revents & POLLIN) != 0) Accept();
    }
  }

 private:
  void Accept() {
    const int fd = accept4(listen_, nullptr, nullptr, SOCK_CLOEXEC);
    if (fd < 0) return;
    // One that does not take what it is sent is not waited for.
    const timeval patience{.tv_sec = 5, .tv_usec = 0};
    if (daemons_.size() < kDaemonsMax && IsOfOwnUser(fd) &&
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience) == 0) {
      daemons_.push_back(fd);
    } else {
      close(fd);
    }
  }
  // False: the daemon has gone, or says what no daemon says.
  bool Serve(int daemon) {
    const auto packet = ReceiveKeeperPacket(daemon);
    if (!packet.ok()) return absl::IsInvalidArgument(packet.status()) && Answer(daemon, KeeperPacketType::kRefused);
    switch (packet->type) {
      case KeeperPacketType::kList:
        for (const auto& [name, fd] : kept_) {
          if (!SendKeeperPacket(daemon, {KeeperPacketType::kKept, name, fd}).ok()) return false;
        }
        break;
      case KeeperPacketType::kKeep:
        if (packet->fd < 0 || packet->name.empty() || (kept_.size() >= kKeptMax && !kept_.contains(packet->name))) {
          if (packet->fd >= 0) close(packet->fd);
          return Answer(daemon, KeeperPacketType::kRefused);
        }
        if (const auto [place, is_new] = kept_.try_emplace(packet->name, packet->fd); !is_new) {
          close(std::exchange(place->second, packet->fd));
        }
        return Answer(daemon, KeeperPacketType::kDone);
      case KeeperPacketType::kForget:
        for (const auto& [name, fd] : kept_) close(fd);
        kept_.clear();
        break;
      case KeeperPacketType::kIdle: {
        uint64_t seconds = 0;
        if (!absl::SimpleAtoi(packet->name, &seconds) || seconds > kSecondsMax) {
          if (packet->fd >= 0) close(packet->fd);
          return Answer(daemon, KeeperPacketType::kRefused);
        }
        if (of_daemon_) idle_ns_ = static_cast<int64_t>(seconds) * 1000000000;
        break;
      }
      case KeeperPacketType::kPing:
        break;
      default:
        if (packet->fd >= 0) close(packet->fd);
        return Answer(daemon, KeeperPacketType::kRefused);
    }
    if (packet->fd >= 0) close(packet->fd);
    return Answer(daemon, KeeperPacketType::kDone);
  }
  static bool Answer(int daemon, KeeperPacketType type) { return SendKeeperPacket(daemon, {type, "", -1}).ok(); }

  const int listen_;
  int64_t idle_ns_;
  const bool of_daemon_;
  SteadyClock clock_;
  std::vector<int> daemons_;  // connections: one, and for moments that of the next daemon, or of somebody who looks
  std::map<std::string, int> kept_;  // descriptors
};

// It outlives whoever started it, and what that reads its output with.
void LeaveStarter() {
  setsid();
  const int nothing = open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int fd : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (nothing >= 0) dup2(nothing, fd);
  }
  if (nothing > STDERR_FILENO) close(nothing);
}

}  // namespace

int RunKeeper(int argc, char** argv) {
  uint64_t seconds = 0;
  if (argc < 3 || argc > 4 || (argc == 4 && (!absl::SimpleAtoi(argv[3], &seconds) || seconds > kSecondsMax))) {
    std::fprintf(stderr, "usage: kvmanagerd %s FOLDER [SECONDS], SECONDS 0..%llu\n", kKeeperFlag,
                 static_cast<unsigned long long>(kSecondsMax));
    return kExitUsage;
  }
  const auto path = KeeperPath(argv[2]);
  umask(0177);
  auto listening = path.ok() ? Listen(*path) : absl::StatusOr<int>(path.status());
  if (!listening.ok()) {
    std::fprintf(stderr, "kvmanagerd %s: %s\n", kKeeperFlag, std::string(listening.status().message()).c_str());
    return kExitFailed;
  }
  if (*listening < 0) return 0;
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  prctl(PR_SET_NAME, "kvmanager-keep");
  if (argc == 4) LeaveStarter();
  // A descriptor for each region of a pool.
  if (rlimit files; getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
  Keeper(*listening, static_cast<int64_t>(seconds) * 1000000000, /*of_daemon=*/argc == 4).Run();
  unlink(path->c_str());
  return 0;
}

}  // namespace kvmanager
