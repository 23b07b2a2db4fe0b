#include "kvmanager/keep/keeper.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
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

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/journal.h"
#include "kvmanager/base/local_socket.h"
#include "kvmanager/base/status.h"
#include "kvmanager/keep/keeper_wire.h"

namespace kvmanager {
namespace {

constexpr int kExitFailed = 1, kExitUsage = 2;
constexpr uint64_t kSecondsMax = 1000000;
constexpr size_t kDaemonsMax = 8;

constexpr int kTries = 10;  // to take the socket's place

using Kept = std::map<std::string, int>;  // descriptors

void CloseAll(Kept* kept) {
  for (const auto& [name, fd] : *kept) close(fd);
  kept->clear();
}

/// Of the keeper at the other end of `socket`, which ends then. Errors: UNAVAILABLE: it has gone; FAILED_PRECONDITION:
/// it does not end for this.
absl::Status TakeOver(int socket, Kept* kept) {
  Kept theirs;
  const absl::Cleanup close_theirs = [&theirs] { CloseAll(&theirs); };
  KV_RETURN_IF_ERROR(SendKeeperPacket(socket, {KeeperPacketType::kList, "", -1}));
  for (bool yields = false;;) {
    KV_ASSIGN_OR_RETURN(KeeperPacket packet, ReceiveKeeperPacket(socket));
    if (packet.type == KeeperPacketType::kKept && packet.fd >= 0 && theirs.size() < kKeptMax &&
        theirs.emplace(packet.name, packet.fd).second) {
      continue;
    }
    if (packet.fd >= 0) close(packet.fd);
    if (packet.type != KeeperPacketType::kDone) {
      return absl::FailedPreconditionError(
          "another keeper is there, a service's or of an earlier version: end it first");
    }
    if (yields) break;
    yields = true;
    KV_RETURN_IF_ERROR(SendKeeperPacket(socket, {KeeperPacketType::kYield, "", -1}));
  }
  if (!theirs.empty()) kept->swap(theirs);  // one that a daemon has just started has nothing yet
  return absl::OkStatus();
}

/// Whether the process at the other end has closed its own.
bool IsGone(int socket) {
  pollfd look{socket, 0, 0};
  return poll(&look, 1, 0) > 0 && (look.revents & (POLLHUP | POLLERR)) != 0;
}

/// The socket that daemons connect to; -1: another keeper has it. kept: nullptr, or what takes over from that one,
/// which a daemon started, instead.
absl::StatusOr<int> Listen(const std::string& path, Kept* kept) {
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
      const absl::Status taken = other >= 0 && kept != nullptr ? TakeOver(other, kept) : absl::OkStatus();
      const bool is_silent = other < 0 || (!taken.ok() && !IsGone(other));
      if (other >= 0) close(other);
      if (is_there && kept == nullptr) return -1;
      if (absl::IsFailedPrecondition(taken)) return taken;
      if (is_there && is_silent)
        return absl::UnavailableError("another keeper is there, and does not answer: end it first");
      if (is_there && tries < kTries) continue;
    }
    errno = why;
    if (why != EADDRINUSE || tries == kTries) return failed("binding");
    // Of a keeper that has ended.
    if (unlink(path.c_str()) != 0 && errno != ENOENT) return failed("removing");
  }
}

class Keeper {
 public:
  /// idle_ns: 0: it never ends by itself. of_daemon: a daemon started it, and daemons may say another time.
  Keeper(std::string path, int listen, int64_t idle_ns, bool of_daemon, Kept kept)
      : path_(std::move(path)), listen_(listen), idle_ns_(idle_ns), of_daemon_(of_daemon), kept_(std::move(kept)) {}

  /// Until its time is over, or another one has taken its place.
  void Run() {
    Serve();
    if (!yields_) unlink(path_.c_str());
  }

 private:
  void Serve() {
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
      if (yields_) return;
      if ((fds[0].revents & POLLIN) != 0) Accept();
    }
  }
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
        CloseAll(&kept_);
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
      case KeeperPacketType::kYield:
        if (packet->fd >= 0) close(packet->fd);
        if (!of_daemon_) return Answer(daemon, KeeperPacketType::kRefused);
        unlink(path_.c_str());  // before the answer: the next one is there then
        yields_ = true;
        return Answer(daemon, KeeperPacketType::kDone);
      default:
        if (packet->fd >= 0) close(packet->fd);
        return Answer(daemon, KeeperPacketType::kRefused);
    }
    if (packet->fd >= 0) close(packet->fd);
    return Answer(daemon, KeeperPacketType::kDone);
  }
  static bool Answer(int daemon, KeeperPacketType type) { return SendKeeperPacket(daemon, {type, "", -1}).ok(); }

  const std::string path_;
  const int listen_;
  int64_t idle_ns_;
  const bool of_daemon_;
  bool yields_ = false;
  SteadyClock clock_;
  std::vector<int> daemons_;  // connections: one, and for moments that of the next daemon, or of somebody who looks
  Kept kept_;
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

int RunKeeper(int argc, char** argv, const std::function<void()>& ready) {
  uint64_t seconds = 0;
  if (argc < 3 || argc > 4 || (argc == 4 && (!absl::SimpleAtoi(argv[3], &seconds) || seconds > kSecondsMax))) {
    std::fprintf(stderr, "%susage: kvmanagerd %s FOLDER [SECONDS], SECONDS 0..%llu\n", ErrorPrefix(), kKeeperFlag,
                 static_cast<unsigned long long>(kSecondsMax));
    return kExitUsage;
  }
  // A descriptor for each region of a pool.
  if (rlimit files; getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
  const bool of_daemon = argc == 4;
  const auto path = KeeperPath(argv[2]);
  umask(0177);
  Kept kept;
  // Keepers that start at once take turns, or one would remove the socket that another is just binding. The daemon has
  // locked a file of the folder, not this.
  const int folder = open(argv[2], O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) flock(folder, LOCK_EX);
  auto listening = path.ok() ? Listen(*path, of_daemon ? nullptr : &kept) : absl::StatusOr<int>(path.status());
  if (!listening.ok()) {
    std::fprintf(stderr, "%skvmanagerd %s: %s\n", ErrorPrefix(), kKeeperFlag,
                 std::string(listening.status().message()).c_str());
    return kExitFailed;
  }
  if (folder >= 0) close(folder);
  if (*listening < 0) return 0;
  prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
  prctl(PR_SET_NAME, "kvmanager-keep");
  if (of_daemon) LeaveStarter();
  if (ready) ready();
  Keeper(*path, *listening, static_cast<int64_t>(seconds) * 1000000000, of_daemon, std::move(kept)).Run();
  return 0;
}

}  // namespace kvmanager
