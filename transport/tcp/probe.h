// Asks a peer how much it has to do. Owned by Loop::probes and the handlers of its pending operations; the transport's
// thread alone.
#pragma once

#include <memory>
#include <string>

#include "transport/tcp/dial.h"
#include "transport/tcp/frame_link.h"
#include "transport/tcp/loop.h"

namespace kvmanager::tcp {

class Probe : public std::enable_shared_from_this<Probe> {
 public:
  using Done = absl::AnyInvocable<void(absl::StatusOr<ReceiverLoad>)>;

  Probe(Loop& loop, std::string peer, Done done);
  /// REQUIRES: this is in loop.probes.
  void Start();
  void Stop() { Finish(absl::CancelledError("the transport is shutting down")); }

 private:
  void Ask(Dial::Connection connection);
  void OnFrame(Frame frame);
  void Finish(absl::StatusOr<ReceiverLoad> result);

  Loop& loop_;
  const std::string peer_;
  Done done_;
  Timer timer_;
  std::shared_ptr<Dial> dial_;
  std::shared_ptr<FrameLink> link_;
};

}  // namespace kvmanager::tcp
