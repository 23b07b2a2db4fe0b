// Time as an injected object, so that tests never sleep to synchronise.
#pragma once

#include <chrono>
#include <cstdint>

namespace kvmanager {

class Clock {
 public:
  virtual ~Clock() = default;
  /// Monotonic nanoseconds since an arbitrary start. Any thread.
  virtual int64_t NowNs() const = 0;
};

/// std::chrono::steady_clock.
class SteadyClock final : public Clock {
 public:
  int64_t NowNs() const override {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  }
};

/// Moves only when told to; one thread.
class ManualClock final : public Clock {
 public:
  int64_t NowNs() const override { return now_ns_; }
  void AdvanceNs(int64_t ns) { now_ns_ += ns; }

 private:
  int64_t now_ns_ = 0;
};

}  // namespace kvmanager
