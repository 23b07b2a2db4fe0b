// A token bucket for bytes: at most `bytes_per_s` on average, and kBurstMs worth of them at once. Owned by the
// transport; its thread alone. Time comes in, so that tests need none.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvmanager::tcp {

class RateLimit {
 public:
  static constexpr int64_t kBurstMs = 20;
  static constexpr int kGrantsPerBurst = 4;  // at most
  static constexpr uint64_t kBytesPerSMin = 64 << 10;

  /// 0: no limit; else at least kBytesPerSMin.
  explicit RateLimit(uint64_t bytes_per_s)
      : bytes_per_s_(bytes_per_s),
        burst_bytes_(static_cast<double>(bytes_per_s) * kBurstMs / 1000),
        bytes_(burst_bytes_) {}

  /// How many of `want` bytes may be sent at `now_ns` (monotonic); they count as sent. 0: ask again later. Never a few
  /// bytes of many: each grant is a call of the kernel on both sides.
  uint64_t Take(uint64_t want, int64_t now_ns) {
    if (bytes_per_s_ == 0) return want;
    if (now_ns > last_ns_) {
      const double earned = static_cast<double>(now_ns - last_ns_) * 1e-9 * static_cast<double>(bytes_per_s_);
      bytes_ = std::min(burst_bytes_, bytes_ + earned);
      last_ns_ = now_ns;
    }
    const uint64_t granted = std::min(want, static_cast<uint64_t>(bytes_));
    if (granted < want && static_cast<double>(granted) < burst_bytes_ / kGrantsPerBurst) return 0;
    bytes_ -= static_cast<double>(granted);
    return granted;
  }

  /// Bytes taken and not sent after all.
  void GiveBack(uint64_t bytes) {
    if (bytes_per_s_ != 0) bytes_ = std::min(burst_bytes_, bytes_ + static_cast<double>(bytes));
  }

 private:
  uint64_t bytes_per_s_;
  double burst_bytes_;
  double bytes_;
  int64_t last_ns_ = 0;
};

}  // namespace kvmanager::tcp
