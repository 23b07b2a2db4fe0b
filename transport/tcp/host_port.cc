#include "transport/tcp/host_port.h"

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::tcp {

absl::StatusOr<HostPort> ParseHostPort(absl::string_view field, absl::string_view text, bool allow_port_0) {
  const auto invalid = [&] {
    const absl::string_view shown = text.substr(0, kHostBytesMax);
    return InvalidField(field, shown,
                        absl::StrCat("HOST:PORT or [IPv6]:PORT, host of 1..", kHostBytesMax, " bytes, port ",
                                     allow_port_0 ? 0 : 1, "..65535"));
  };
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos) return invalid();
  absl::string_view host = text.substr(0, colon);
  const absl::string_view port = text.substr(colon + 1);
  if (!host.empty() && host.front() == '[') {
    if (host.size() < 3 || host.back() != ']') return invalid();
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != absl::string_view::npos) {
    return invalid();
  }
  if (host.empty() || host.size() > kHostBytesMax || port.empty() || port.size() > 5) return invalid();
  for (const char c : host) {
    if (!absl::ascii_isgraph(c) || c == '[' || c == ']') return invalid();
  }
  uint32_t number = 0;
  for (const char c : port) {
    if (!absl::ascii_isdigit(c)) return invalid();
    number = number * 10 + (c - '0');
  }
  if (number > UINT16_MAX || (number == 0 && !allow_port_0)) return invalid();
  return HostPort{std::string(host), static_cast<uint16_t>(number)};
}

std::string FormatHostPort(const std::string& host, uint16_t port) {
  return host.find(':') == std::string::npos ? absl::StrCat(host, ":", port) : absl::StrCat("[", host, "]:", port);
}

}  // namespace kvmanager::tcp
