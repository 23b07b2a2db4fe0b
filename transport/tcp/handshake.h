// Exchanges the two HELLOs with which every connection begins. Owned by Dial or PendingConnection and by the handlers
// of its pending operations. The transport's thread only. `done` is called once, unless Cancel comes first.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/tcp/loop.h"
#include "transport/tcp/wire.h"

namespace kvmanager::tcp {

class Handshake : public std::enable_shared_from_this<Handshake> {
 public:
  /// status: OK: both may go on. UNIMPLEMENTED: of another version; INVALID_ARGUMENT, DATA_LOSS: no hello; then the
  /// socket is still good for telling so. UNAUTHENTICATED: the peer exchanges keys first, and this side has none, or
  /// the peer did not take its proof. UNAVAILABLE, DEADLINE_EXCEEDED: the socket is closed.
  using Done = absl::AnyInvocable<void(absl::Status status, Socket socket, HelloFrame theirs)>;

  /// stall_ms: what this side says it is.
  Handshake(Loop& loop, Socket socket, int64_t stall_ms, SteadyTime deadline, Done done);
  /// first: a frame that is sent at once behind the hello.
  void Start(const std::string& first = "");
  void Cancel();

 private:
  void Write();
  void Read();
  void MaybeDone();
  void Finish(absl::Status status, bool close);

  Socket socket_;
  Timer timer_;
  const uint32_t features_;
  const bool has_key_;
  const int64_t stall_ms_;
  const SteadyTime deadline_;
  Done done_;  // empty once called
  std::string out_;
  size_t out_sent_ = 0;
  std::vector<uint8_t> in_;
  bool heard_ = false;
  HelloFrame theirs_;
};

}  // namespace kvmanager::tcp
