// "HOST:PORT" as flags and requests say it: an IPv4 address, "[IPv6]" or a name, and a decimal port. Pure functions,
// any thread.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvmanager::tcp {

inline constexpr size_t kHostBytesMax = 255;

struct HostPort {
  std::string host;  // without brackets
  uint16_t port = 0;
};

/// INVALID_ARGUMENT naming `field` if `text` is not "HOST:PORT", or its port is 0 and `allow_port_0` is false.
absl::StatusOr<HostPort> ParseHostPort(absl::string_view field, absl::string_view text, bool allow_port_0);

/// The inverse: brackets around a host with a colon.
std::string FormatHostPort(const std::string& host, uint16_t port);

}  // namespace kvmanager::tcp
