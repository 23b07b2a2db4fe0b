// Waits until the kernel no longer reads the pages of a closed data connection. It resets the connection, so the kernel
// drops what it has not sent and never sends anything again. What is still in a queue or device before the network
// leaves within its own time, and the socket's error queue says when. Owned by the handlers of its timer. The
// transport's thread only.
#pragma once

#include <memory>

#include "transport/tcp/loop.h"
#include "transport/tcp/zero_copy.h"

namespace kvmanager::tcp {

class Drain : public std::enable_shared_from_this<Drain> {
 public:
  static constexpr int64_t kLookMsMin = 1, kLookMsMax = 32;  // between looks: a reset socket can be polled for nothing

  /// zero_copy: of `socket`, not idle. drained: called once; after wait_ms also if the kernel has not said it.
  static void Start(Loop& loop, Socket socket, ZeroCopy zero_copy, int64_t wait_ms, absl::AnyInvocable<void()> drained);

  Drain(Loop& loop, Socket socket, ZeroCopy zero_copy, int64_t wait_ms, absl::AnyInvocable<void()> drained);

 private:
  void Look();

  Socket socket_;
  ZeroCopy zero_copy_;
  Timer timer_;
  const SteadyTime deadline_;
  int64_t look_ms_ = kLookMsMin;  // the next pause
  absl::AnyInvocable<void()> drained_;
};

}  // namespace kvmanager::tcp
