// A kvmanagerd of one's own, for a program that was given none: on a Unix socket in a temporary directory, gone when
// this is.
//
// Owned by main(); one thread. The daemon also goes when this process dies (parent-death signal).
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace kvmanager::engine {

/// Where kvmanagerd is: `given` if not empty, else $KVMANAGERD, else beside this program, else in its Bazel output tree
/// or runfiles. Errors: NOT_FOUND listing the places.
absl::StatusOr<std::string> FindDaemon(const std::string& given);

class DaemonProcess {
 public:
  /// Starts `program` with a host pool of `pool_bytes`, and waits until its socket accepts connections or it ends or a
  /// bound passes. network: a descriptor of the network namespace in which it runs; -1: this process's.
  static absl::StatusOr<std::unique_ptr<DaemonProcess>> Start(const std::string& program, uint64_t pool_bytes,
                                                              const std::vector<std::string>& more_flags = {},
                                                              int network = -1);
  /// SIGTERM, then SIGKILL after a bound.
  ~DaemonProcess();
  DaemonProcess(const DaemonProcess&) = delete;
  DaemonProcess& operator=(const DaemonProcess&) = delete;

  /// Removes the socket: who is connected stays so, and nobody else will be. Afterwards nothing is left behind, however
  /// this process ends.
  void HideSocket();

  std::string address() const { return "unix:" + directory_ + "/socket"; }

 private:
  DaemonProcess() = default;
  std::string directory_;
  pid_t pid_ = -1;
};

}  // namespace kvmanager::engine
