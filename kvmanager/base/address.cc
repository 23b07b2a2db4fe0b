#include "kvmanager/base/address.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/un.h>

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

absl::StatusOr<HostPort> ParseHostPort(absl::string_view field, absl::string_view text) {
  constexpr absl::string_view kBound = "HOST:PORT, such as 127.0.0.1:9464 or [::1]:9464, with a port of 0..65535";
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos) return InvalidField(field, text, kBound);
  absl::string_view host = text.substr(0, colon);
  if (absl::ConsumePrefix(&host, "[")) {
    if (!absl::ConsumeSuffix(&host, "]")) return InvalidField(field, text, kBound);
  } else if (host.find(':') != absl::string_view::npos) {
    return InvalidField(field, text, kBound);
  }
  uint32_t port;
  if (host.empty() || !absl::SimpleAtoi(text.substr(colon + 1), &port) || port > 65535) {
    return InvalidField(field, text, kBound);
  }
  return HostPort{std::string(host), static_cast<uint16_t>(port)};
}

bool IsLoopback(absl::string_view host) {
  const std::string text(host);
  in_addr four{};
  if (inet_pton(AF_INET, text.c_str(), &four) == 1) return ntohl(four.s_addr) >> 24 == IN_LOOPBACKNET;
  in6_addr six{};
  if (inet_pton(AF_INET6, text.c_str(), &six) == 1) return IN6_IS_ADDR_LOOPBACK(&six) != 0;
  return host == "localhost";
}

absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view field, absl::string_view text) {
  ListenAddress address;
  absl::string_view rest = text;
  if (absl::ConsumePrefix(&rest, "unix:")) {
    constexpr size_t kPathMax = sizeof(sockaddr_un{}.sun_path) - 1;
    if (rest.empty() || rest.size() > kPathMax || rest.find('\0') != absl::string_view::npos) {
      return InvalidField(field, text, absl::StrCat("unix:PATH with a path of 1..", kPathMax, " bytes"));
    }
    address.unix_path = std::string(rest);
    return address;
  }
  if (absl::ConsumePrefix(&rest, "tcp:")) {
    auto tcp = ParseHostPort(field, rest);
    if (!tcp.ok()) return InvalidField(field, text, "unix:PATH or tcp:HOST:PORT with a port of 0..65535");
    address.tcp = *std::move(tcp);
    return address;
  }
  return InvalidField(field, text, "unix:PATH or tcp:HOST:PORT");
}

std::string WithPort(absl::string_view address, uint16_t port) {
  return absl::StrCat(address.substr(0, address.rfind(':') + 1), port);
}

}  // namespace kvmanager
