#include "kvmanager/rpc/turn_watch.h"

#include <spdlog/spdlog.h>
#include <time.h>

#include <algorithm>

namespace kvmanager {
namespace {

int64_t Now(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

}  // namespace

TurnWatch::TurnWatch(Metrics* metrics)
    : metrics_(metrics),
      longest_(metrics->Gauge("loop_longest_turn_seconds",
                              "CPU time of the event loop's longest turn above 5 ms; 0: there was none")) {
  LongTurns("connectionEnd");  // so that the metric is there from the start
}

prometheus::Counter& TurnWatch::LongTurns(const char* call) {
  return metrics_->Counter("loop_long_turns_total", "Turns of the event loop with more than 5 ms of CPU time, by call",
                           {{"call", call}});
}

void TurnWatch::Begin() {
  if (depth_++ > 0) return;
  begin_ns_ = Now(CLOCK_MONOTONIC);
  if (begin_ns_ - looked_ns_ < kLookNs) return;
  looked_ns_ = begin_ns_;
  cpu_ns_ = Now(CLOCK_THREAD_CPUTIME_ID);
}

void TurnWatch::End(const char* call) {
  if (--depth_ > 0) return;
  if (Now(CLOCK_MONOTONIC) - begin_ns_ < kTurnMaxNs) return;
  const int64_t took_ns = Now(CLOCK_THREAD_CPUTIME_ID) - cpu_ns_;
  if (took_ns <= kTurnMaxNs) return;  // the thread had to wait for a core
  LongTurns(call).Increment();
  longest_s_ = std::max(longest_s_, double(took_ns) * 1e-9);
  longest_.Set(longest_s_);
  spdlog::debug("{} held the event loop for {} ms", call, took_ns / 1'000'000);
}

}  // namespace kvmanager
