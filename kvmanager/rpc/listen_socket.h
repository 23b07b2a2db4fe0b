// A bound, listening, non-blocking socket for clients. Owns the descriptor and, of a Unix one, the file: it goes with
// the object.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvmanager {

class ListenSocket {
 public:
  static constexpr int kBacklog = 1024;

  /// address: "unix:PATH" or "tcp:HOST:PORT"; port 0 takes a free one. A stale socket file, which nobody listens on, is
  /// replaced. Errors: INVALID_ARGUMENT (address), UNAVAILABLE (it cannot be bound, and why).
  static absl::StatusOr<std::unique_ptr<ListenSocket>> Bind(absl::string_view address);
  ~ListenSocket();
  ListenSocket(const ListenSocket&) = delete;
  ListenSocket& operator=(const ListenSocket&) = delete;

  int fd() const { return fd_; }
  bool unix_socket() const { return !path_.empty(); }
  const std::string& address() const { return address_; }  // as given, with the bound port

 private:
  ListenSocket() = default;

  int fd_ = -1;
  std::string path_;
  std::string address_;
};

}  // namespace kvmanager
