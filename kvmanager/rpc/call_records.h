// Counts calls, the errors that clients are answered with and turns of the loop that last too long, and keeps the
// errors for people to see.
//
// Owned by the daemon's wiring. The loop's thread.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

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

  /// A call that is under way, for as long as this lives.
  class UnderWay {
   public:
    explicit UnderWay(CallRecords* records) : records_(records) { ++records_->under_way_; }
    UnderWay(UnderWay&& other) noexcept : records_(std::exchange(other.records_, nullptr)) {}
    UnderWay& operator=(UnderWay&&) = delete;
    ~UnderWay() {
      if (records_ != nullptr) --records_->under_way_;
    }

   private:
    CallRecords* records_;
  };
  uint64_t under_way() const { return under_way_; }

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
  uint64_t under_way_ = 0;
  TurnWatch turns_;
};

}  // namespace kvmanager
