#include "client/dial.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/local_socket.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client {
namespace {

constexpr int kSilentPeerSecondsMax = 30;

struct Endpoint {
  sockaddr_storage address{};
  socklen_t length = 0;
};

absl::Status Failed(const Address& address, absl::string_view why) {
  return absl::UnavailableError(absl::StrCat("cannot connect to ", address.text, ": ", why));
}

/// getaddrinfo on a thread of its own: it has no deadline, and a resolver that is away must not hang an engine.
absl::StatusOr<std::vector<Endpoint>> Resolve(const Address& address, int64_t timeout_ms) {
  using Found = absl::StatusOr<std::vector<Endpoint>>;
  auto promise = std::make_shared<std::promise<Found>>();  // shared with a thread that may outlive this call
  auto found = promise->get_future();
  const auto look_up = [address, promise] {
    addrinfo hints{}, *list = nullptr;
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    const int error = ::getaddrinfo(address.host.c_str(), address.port.c_str(), &hints, &list);
    if (error != 0) {
      promise->set_value(Failed(address, ::gai_strerror(error)));
      return;
    }
    std::vector<Endpoint> endpoints;
    for (addrinfo* a = list; a != nullptr; a = a->ai_next) {
      Endpoint endpoint;
      std::memcpy(&endpoint.address, a->ai_addr, a->ai_addrlen);
      endpoint.length = a->ai_addrlen;
      endpoints.push_back(endpoint);
    }
    ::freeaddrinfo(list);
    promise->set_value(std::move(endpoints));
  };
  in6_addr numeric;
  if (::inet_pton(AF_INET, address.host.c_str(), &numeric) == 1 ||
      ::inet_pton(AF_INET6, address.host.c_str(), &numeric) == 1) {
    look_up();
  } else {
    std::thread(look_up).detach();
    if (found.wait_for(std::chrono::milliseconds(timeout_ms)) != std::future_status::ready) {
      return Failed(address, absl::StrCat("the name was not resolved within ", timeout_ms, " ms"));
    }
  }
  return found.get();
}

void SetTcpOptions(int fd) {
  const int on = 1, idle_s = 10, interval_s = 5, probes = 4, silent_ms = kSilentPeerSecondsMax * 1000;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof(interval_s));
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &silent_ms, sizeof(silent_ms));
}

absl::StatusOr<GuardedFd> DialEndpoint(const Address& address, const sockaddr* to, socklen_t length,
                                       int64_t timeout_ms) {
  GuardedFd fd = Guarded([to] { return ::socket(to->sa_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); });
  if (!fd.valid()) return Failed(address, std::strerror(errno));
  if (!address.is_unix) SetTcpOptions(fd.get());
  if (::connect(fd.get(), to, length) == 0) return fd;
  if (errno != EINPROGRESS && errno != EINTR) return Failed(address, std::strerror(errno));
  pollfd waiting{fd.get(), POLLOUT, 0};
  const int ready = ::poll(&waiting, 1, int(std::clamp<int64_t>(timeout_ms, 0, INT32_MAX)));
  if (ready <= 0) return Failed(address, absl::StrCat("no answer within ", timeout_ms, " ms"));
  int error = 0;
  socklen_t error_length = sizeof(error);
  ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &error_length);
  if (error != 0) return Failed(address, std::strerror(error));
  return fd;
}

}  // namespace

absl::StatusOr<Address> ParseAddress(absl::string_view text) {
  constexpr absl::string_view kForms = "unix:PATH, tcp:HOST:PORT or tls:HOST:PORT";
  Address address;
  address.text = std::string(text);
  if (text.find('\0') != absl::string_view::npos) return InvalidField("address", "with a zero byte", kForms);
  if (absl::StartsWith(text, "unix:")) {
    address.is_unix = true;
    address.path = std::string(text.substr(5));
    constexpr size_t kPathBytesMax = sizeof(sockaddr_un::sun_path) - 1;
    if (address.path.empty()) return InvalidField("address", address.text, kForms);
    if (address.path.size() > kPathBytesMax) {
      return InvalidField("address", address.text, absl::StrCat("a path of at most ", kPathBytesMax, " bytes"));
    }
    return address;
  }
  address.is_tls = absl::StartsWith(text, "tls:");
  if (!address.is_tls && !absl::StartsWith(text, "tcp:")) return InvalidField("address", address.text, kForms);
  const absl::string_view rest = text.substr(4);
  const size_t colon = rest.rfind(':');
  if (colon == absl::string_view::npos || colon == 0) return InvalidField("address", address.text, kForms);
  absl::string_view host = rest.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  address.host = std::string(host);
  address.port = std::string(rest.substr(colon + 1));
  int port = 0;
  if (!absl::SimpleAtoi(address.port, &port) || port < 1 || port > 65535) {
    return InvalidField("address", address.text, "tcp:HOST:PORT or tls:HOST:PORT with a port of 1..65535");
  }
  return address;
}

absl::StatusOr<GuardedFd> Dial(const Address& address, int64_t timeout_ms) {
  if (address.is_unix) {
    const sockaddr_un to = UnixAddress(address.path);
    return DialEndpoint(address, reinterpret_cast<const sockaddr*>(&to), sizeof(to), timeout_ms);
  }
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(timeout_ms);
  KV_ASSIGN_OR_RETURN(const std::vector<Endpoint> endpoints, Resolve(address, timeout_ms));
  absl::Status last = Failed(address, "the name has no address");
  for (const Endpoint& endpoint : endpoints) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    auto fd = DialEndpoint(address, reinterpret_cast<const sockaddr*>(&endpoint.address), endpoint.length,
                           std::max<int64_t>(left.count(), 1));
    if (fd.ok()) return fd;
    last = fd.status();
  }
  return last;
}

}  // namespace kvmanager::client
