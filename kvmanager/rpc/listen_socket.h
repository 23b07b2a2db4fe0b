// A bound, listening, non-blocking socket for clients. Owns the descriptor and, of a Unix one, the file: it goes with
// the object, unless another process has put a file of its own there.
#pragma once

#include <sys/types.h>

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvmanager {

class ListenSocket {
 public:
  static constexpr int kBacklog = 1024;

  struct Options {
    absl::string_view flag = "--listen";  // that errors name
    std::optional<mode_t> mode;           // of a Unix socket's file, less the umask; none: 0777
    bool admin = false;                   // whether its clients may have Admin
    int inherited = -1;                   // that listens there already, which stays the caller's; -1: none
  };

  /// address: "unix:PATH" or "tcp:HOST:PORT"; port 0 takes a free one. A stale socket file, which nobody listens on, is
  /// replaced. Errors: INVALID_ARGUMENT (address), UNAVAILABLE (it cannot be bound, and why).
  static absl::StatusOr<std::unique_ptr<ListenSocket>> Bind(absl::string_view address) {
    return Bind(address, Options());
  }
  static absl::StatusOr<std::unique_ptr<ListenSocket>> Bind(absl::string_view address, const Options& options);
  ~ListenSocket();
  ListenSocket(const ListenSocket&) = delete;
  ListenSocket& operator=(const ListenSocket&) = delete;

  /// Another process listens there from now on, by a duplicate of fd(): the file stays.
  void LeaveFile() { path_.clear(); }

  int fd() const { return fd_; }
  bool unix_socket() const { return unix_socket_; }
  bool admin() const { return admin_; }
  const std::string& address() const { return address_; }  // as given, with the bound port

 private:
  ListenSocket() = default;

  int fd_ = -1;
  bool admin_ = false, unix_socket_ = false;
  std::string path_;
  dev_t device_ = 0;  // with inode_: the file at path_ as it was bound
  ino_t inode_ = 0;
  std::string address_;
};

}  // namespace kvmanager
