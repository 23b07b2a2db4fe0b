// A child process that is started with some of this process's descriptors, and ended. Owned by whoever started it; one
// thread at a time.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvmanager {

class ChildProcess {
 public:
  enum class Environment {
    kSame,  // this process's
    kLean,  // of it what a loader and sanitizers read: LD_LIBRARY_PATH and *SAN_OPTIONS
  };

  /// program: what is run, and its arguments. fds: become descriptors 3, 4, ... of the child, which has no others but
  /// the standard ones. output: its standard output and error; -1: this process's. UNAVAILABLE: it cannot be started.
  static absl::StatusOr<ChildProcess> Start(const std::vector<std::string>& program, absl::Span<const int> fds,
                                            Environment environment = Environment::kSame, int output = -1);
  ChildProcess() = default;
  ChildProcess(ChildProcess&& other) noexcept : pid_(other.pid_) { other.pid_ = 0; }
  ChildProcess& operator=(ChildProcess&& other) noexcept;
  ~ChildProcess() { End(); }
  /// Kills it, and waits until it is gone. Its wait status; 0 if there is none.
  int End();
  /// Waits until it has ended by itself, at most so long; then as End.
  int EndWithin(int ms);
  /// It goes on by itself, also when this process ends.
  void Leave() { pid_ = 0; }
  pid_t pid() const { return pid_; }  // 0: none

 private:
  pid_t pid_ = 0;
};

}  // namespace kvmanager
