#include "kvmanager/rpc/listen_socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/address.h"
#include "kvmanager/base/local_socket.h"
#include "kvmanager/base/status.h"
#include "kvmanager/rpc/socket_peer.h"

namespace kvmanager {
namespace {

absl::Status CannotListen(absl::string_view flag, absl::string_view address, absl::string_view why) {
  return WithDetail(absl::UnavailableError(absl::StrCat("cannot listen on ", address, ": ", why)),
                    {std::string(flag), std::string(address), ""});
}

// What a connection to a path finds.
struct Probed {
  bool refused = false;  // nobody listens
  pid_t listener = 0;    // who does; 0: it is not known
};

Probed Probe(const sockaddr_un& address) {
  Probed probed;
  const int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (probe < 0) return probed;
  if (connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
    probed.listener = PeerOf(probe).pid;
  } else {
    probed.refused = errno == ECONNREFUSED;
  }
  close(probe);
  return probed;
}

// True if the path is a socket that nobody listens on.
bool IsStale(const sockaddr_un& address) {
  struct stat info;
  return lstat(address.sun_path, &info) == 0 && S_ISSOCK(info.st_mode) && Probe(address).refused;
}

// What to do about a path that could not be bound.
std::string WhyNotBound(const std::string& path, int error) {
  struct stat info;
  if (error == EADDRINUSE && lstat(path.c_str(), &info) == 0) {
    if (S_ISSOCK(info.st_mode)) {
      const Probed probed = Probe(UnixAddress(path));
      if (probed.refused)
        return "a socket that nobody listens on is there, and cannot be removed; remove it, or listen elsewhere";
      const std::string who = probed.listener == 0 ? "another process" : absl::StrCat("process ", probed.listener);
      return absl::StrCat(who, " listens there already; use that daemon, or stop it, or listen elsewhere");
    }
    return absl::StrCat(S_ISDIR(info.st_mode) ? "a directory" : "a file that is no socket",
                        " is there; remove it, or listen elsewhere");
  }
  const size_t slash = path.rfind('/');
  if (error == ENOENT && slash != std::string::npos && slash > 0) {
    const std::string directory = path.substr(0, slash);
    return absl::StrCat("there is no directory ", directory, "; make it first: mkdir -p ", directory);
  }
  return std::strerror(error);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ListenSocket>> ListenSocket::Bind(absl::string_view address, const Options& options) {
  KV_ASSIGN_OR_RETURN(const ListenAddress parsed, ParseListenAddress(options.flag, address));
  const auto cannot = [&](absl::string_view why) { return CannotListen(options.flag, address, why); };
  std::unique_ptr<ListenSocket> result(new ListenSocket());
  result->admin_ = options.admin;
  result->unix_socket_ = !parsed.unix_path.empty();
  constexpr int kType = SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK;
  if (!parsed.unix_path.empty()) {
    const sockaddr_un name = UnixAddress(parsed.unix_path);
    struct stat file;
    const bool is_there = lstat(name.sun_path, &file) == 0 && S_ISSOCK(file.st_mode);
    result->fd_ = is_there ? TakeListening(options.inherited, AF_UNIX) : -1;
    const bool inherited = result->fd_ >= 0;
    if (!inherited) result->fd_ = socket(AF_UNIX, kType, 0);
    if (result->fd_ < 0) return cannot(std::strerror(errno));
    // bind() gives the file the mode of the socket, less the umask: there is no moment in which others may connect.
    if (options.mode.has_value() && fchmod(result->fd_, *options.mode) != 0) return cannot(std::strerror(errno));
    if (!inherited && IsStale(name)) unlink(name.sun_path);
    if (!inherited && bind(result->fd_, reinterpret_cast<const sockaddr*>(&name), sizeof name) != 0) {
      return cannot(WhyNotBound(parsed.unix_path, errno));
    }
    if (lstat(name.sun_path, &file) != 0) return cannot(std::strerror(errno));
    result->path_ = parsed.unix_path;
    result->device_ = file.st_dev;
    result->inode_ = file.st_ino;
    result->address_ = std::string(address);
  } else {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
    const int error = getaddrinfo(parsed.tcp.host.c_str(), absl::StrCat(parsed.tcp.port).c_str(), &hints, &found);
    if (error != 0) return cannot(gai_strerror(error));
    const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> list(found, &freeaddrinfo);
    result->fd_ = TakeListening(options.inherited, list->ai_family);
    if (result->fd_ < 0) {
      result->fd_ = socket(list->ai_family, kType, 0);
      if (result->fd_ < 0) return cannot(std::strerror(errno));
      const int on = 1;
      setsockopt(result->fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
      if (bind(result->fd_, list->ai_addr, list->ai_addrlen) != 0) return cannot(std::strerror(errno));
    }
    sockaddr_storage bound = {};
    socklen_t bound_bytes = sizeof bound;
    KV_CHECK(getsockname(result->fd_, reinterpret_cast<sockaddr*>(&bound), &bound_bytes) == 0);
    const in_port_t port = bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6&>(bound).sin6_port
                                                       : reinterpret_cast<const sockaddr_in&>(bound).sin_port;
    result->address_ = WithPort(address, ntohs(port));
  }
  if (listen(result->fd_, kBacklog) != 0) return cannot(std::strerror(errno));
  return result;
}

ListenSocket::~ListenSocket() {
  struct stat file;
  if (!path_.empty() && lstat(path_.c_str(), &file) == 0 && file.st_dev == device_ && file.st_ino == inode_) {
    unlink(path_.c_str());
  }
  if (fd_ >= 0) close(fd_);
}

}  // namespace kvmanager
