// Addresses of a daemon, and sockets connected to them: no RPC here.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/fork_guard.h"

namespace kvmanager::client {

/// "unix:PATH" (at most 107 bytes), or "tcp:HOST:PORT" or "tls:HOST:PORT" ("tcp:[::1]:7000" for IPv6).
struct Address {
  bool is_unix = false, is_tls = false;
  std::string path;
  std::string host, port;
  std::string text;  // as given
};

absl::StatusOr<Address> ParseAddress(absl::string_view text);

/// One attempt. A connected, non-blocking socket; UNAVAILABLE if there is none within `timeout_ms`.
/// TCP: no delay, and a peer that is gone without a word is noticed within 30 s (keepalive, TCP_USER_TIMEOUT).
absl::StatusOr<GuardedFd> Dial(const Address& address, int64_t timeout_ms);

}  // namespace kvmanager::client
