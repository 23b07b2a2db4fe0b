// A process that this one starts with some of its descriptors, and ends. Owned by whoever started it; one thread at a
// time.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvmanager::ucx {

class Child {
 public:
  /// program: what is run, and its arguments. fds: become descriptors 3, 4, ... of the child, which has no others but
  /// the standard ones. UNAVAILABLE: it cannot be started.
  static absl::StatusOr<Child> Start(const std::vector<std::string>& program, absl::Span<const int> fds);
  Child() = default;
  Child(Child&& other) noexcept : pid_(other.pid_) { other.pid_ = 0; }
  Child& operator=(Child&& other) noexcept;
  ~Child() { End(); }
  /// Kills it, and waits until it is gone.
  void End();
  pid_t pid() const { return pid_; }  // 0: none

 private:
  pid_t pid_ = 0;
};

}  // namespace kvmanager::ucx
