// Counts calls, the errors that clients are answered with and turns of the loop that last too long, and keeps the
// errors for people to see.
//
// Owned by the daemon's wiring. The loop's thread.
#pragma once

#include <array>

#include "absl/status/status.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/rpc/rpc_metrics.h"
#include "kvmanager/rpc/turn_watch.h"
#include "monitoring/metrics.h"
#include "monitoring/recent_errors.h"

namespace kvmanager {

class CallRecords {
 public:
  /// Everything outlives this.
  CallRecords(Metrics* metrics, RecentErrors* errors, const Clock* clock);
  CallRecords(const CallRecords&) = delete;
  CallRecords& operator=(const CallRecords&) = delete;

  void NoteCall(Method method) { calls_[static_cast<int>(method)]->Increment(); }
  /// A client is answered with `status`, which is an error.
  void NoteError(Method method, const absl::Status& status);
  /// A client's bytes were no message, or an invalid one: its connection ends.
  void NoteMalformed() { malformed_.Increment(); }
  /// Of what the loop does for `method`: LoopTurn(calls.turns(), MethodName(method)).
  TurnWatch* turns() { return &turns_; }

 private:
  Metrics* const metrics_;
  RecentErrors* const errors_;
  const Clock* const clock_;
  std::array<prometheus::Counter*, kMethods> calls_;
  prometheus::Counter& malformed_;
  TurnWatch turns_;
};

}  // namespace kvmanager
