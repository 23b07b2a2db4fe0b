// Finds turns of the event loop that hold it for too long: with more than kTurnMaxNs of its thread's CPU time. While
// one lasts, nobody else is served.
//
// Owned by CallRecords. The loop's thread. A turn costs two looks at the clock; the CPU time, a system call, is read
// once in kLookNs at most. So a turn is taken for at most kLookNs longer than it was.
#pragma once

#include <cstdint>

#include "monitoring/metrics.h"

namespace kvmanager {

class TurnWatch {
 public:
  static constexpr int64_t kTurnMaxNs = 5'000'000;
  static constexpr int64_t kLookNs = 1'000'000;

  explicit TurnWatch(Metrics* metrics);
  TurnWatch(const TurnWatch&) = delete;
  TurnWatch& operator=(const TurnWatch&) = delete;

 private:
  friend class LoopTurn;
  void Begin();
  void End(const char* call);
  prometheus::Counter& LongTurns(const char* call);

  Metrics* const metrics_;
  prometheus::Gauge& longest_;
  double longest_s_ = 0;
  int depth_ = 0;
  int64_t begin_ns_ = 0;   // of the turn
  int64_t looked_ns_ = 0;  // when the CPU time was read, and what it was
  int64_t cpu_ns_ = 0;
};

/// What the loop does from here to the end of the scope, and for which call. Of turns in one another the outermost
/// counts.
class LoopTurn {
 public:
  /// call: lives for ever.
  LoopTurn(TurnWatch* watch, const char* call) : watch_(watch), call_(call) { watch_->Begin(); }
  ~LoopTurn() { watch_->End(call_); }
  LoopTurn(const LoopTurn&) = delete;
  LoopTurn& operator=(const LoopTurn&) = delete;

 private:
  TurnWatch* const watch_;
  const char* const call_;
};

/// `fn` in a turn of `call`.
template <typename Fn>
auto InLoopTurn(TurnWatch* watch, const char* call, Fn fn) {
  const LoopTurn turn(watch, call);
  return fn();
}

}  // namespace kvmanager
