#include "transport/recompute/link.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

#include "kvmanager/base/status.h"

namespace kvmanager::recompute {
namespace {

constexpr double kSliceBytesMin = 4096, kSliceBytesMax = 1 << 20;
constexpr double kIdleNs = 1'000'000;  // a copy that begins so late found the link idle; else it was merely woken late

void SleepUntil(int64_t ns) {
  std::this_thread::sleep_until(std::chrono::steady_clock::time_point(
      std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::nanoseconds(ns))));
}

}  // namespace

void MemoryLink::Copy(const uint8_t* from, uint8_t* to, size_t bytes) { std::memcpy(to, from, bytes); }

PacedLink::PacedLink(double bytes_per_second, const Clock* clock, std::function<void(int64_t ns)> sleep_until_ns)
    : ns_per_byte_(1e9 / bytes_per_second),
      slice_bytes_(size_t(std::clamp(kSliceNs / ns_per_byte_, kSliceBytesMin, kSliceBytesMax))),
      clock_(clock),
      sleep_until_ns_(sleep_until_ns ? std::move(sleep_until_ns) : SleepUntil) {
  KV_CHECK(bytes_per_second > 0);
}

void PacedLink::Copy(const uint8_t* from, uint8_t* to, size_t bytes) {
  const double now_ns = double(clock_->NowNs());
  if (now_ns > free_at_ns_ + kIdleNs) free_at_ns_ = now_ns;
  free_at_ns_ += double(bytes) * ns_per_byte_;
  std::memcpy(to, from, bytes);
  sleep_until_ns_(int64_t(free_at_ns_));
}

}  // namespace kvmanager::recompute
