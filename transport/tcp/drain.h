// Waits until the kernel reads no page of a closed lane any more. The connection is reset, so that it forgets what it
// has not sent and never sends again what it has; what a queue or a device before the network still holds leaves within
// its own time, and the socket's error queue says when. Owned by the handlers of its timer; the transport's thread
// alone.
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
