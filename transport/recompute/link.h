// The way from slow memory to fast, as a CPU sees it: a plain copy, or one that is held to a rate, which stands for a
// slower link in tests and benchmarks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "kvmanager/base/clock.h"

namespace kvmanager::recompute {

/// One thread at a time.
class CopyLink {
 public:
  virtual ~CopyLink() = default;
  /// Callers cut what they copy into slices of at most this, and look between them whether to stop.
  virtual size_t slice_bytes() const = 0;
  /// Returns when `bytes` bytes from `from` have arrived at `to`; they do not overlap.
  virtual void Copy(const uint8_t* from, uint8_t* to, size_t bytes) = 0;
};

/// memcpy.
class MemoryLink final : public CopyLink {
 public:
  size_t slice_bytes() const override { return size_t{1} << 20; }
  void Copy(const uint8_t* from, uint8_t* to, size_t bytes) override;
};

/// memcpy, then waits until bytes / rate have passed since the end of the copy before, or since the call if the link
/// has been idle: an error of one wait is made up for by the next.
class PacedLink final : public CopyLink {
 public:
  static constexpr int64_t kSliceNs = 2'000'000;
  /// bytes_per_second: above 0. clock: outlives this. sleep_until_ns: of clock's time; empty: clock is a SteadyClock,
  /// and the thread sleeps.
  PacedLink(double bytes_per_second, const Clock* clock, std::function<void(int64_t ns)> sleep_until_ns = {});
  size_t slice_bytes() const override { return slice_bytes_; }
  void Copy(const uint8_t* from, uint8_t* to, size_t bytes) override;
  /// The link is idle: what follows makes up for nothing.
  void Restart() { free_at_ns_ = 0; }

 private:
  const double ns_per_byte_;
  const size_t slice_bytes_;
  const Clock* const clock_;
  const std::function<void(int64_t ns)> sleep_until_ns_;
  double free_at_ns_ = 0;
};

}  // namespace kvmanager::recompute
