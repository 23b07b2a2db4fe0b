// Addresses of sockets as text: "HOST:PORT", "unix:PATH", "tcp:HOST:PORT". Pure functions.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvmanager {

struct HostPort {
  std::string host;
  uint16_t port = 0;
};
/// "HOST:PORT" or "[IPV6]:PORT". Errors: INVALID_ARGUMENT naming `field`.
absl::StatusOr<HostPort> ParseHostPort(absl::string_view field, absl::string_view text);

/// Whether only processes of this host can reach what listens there: 127.0.0.0/8, ::1 or localhost.
bool IsLoopback(absl::string_view host);

struct ListenAddress {
  std::string unix_path;  // empty: TCP
  HostPort tcp;
};
/// "unix:PATH" or "tcp:HOST:PORT". Errors: INVALID_ARGUMENT naming `field`.
absl::StatusOr<ListenAddress> ParseListenAddress(absl::string_view field, absl::string_view text);

/// An address that ends with ":PORT", with this port: of what listens on a port that the kernel chose.
std::string WithPort(absl::string_view address, uint16_t port);

}  // namespace kvmanager
