// The bytes of the arenas of all connections, and their bound. The loop's thread.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "monitoring/metrics.h"

namespace kvmanager {

class ArenaBytes {
 public:
  /// max: --arena-bytes.
  ArenaBytes(Metrics* metrics, uint64_t max)
      : max_(max), gauge_(metrics->Gauge("arena_bytes", "Bytes of arenas shared with clients")) {}
  ArenaBytes(const ArenaBytes&) = delete;
  ArenaBytes& operator=(const ArenaBytes&) = delete;

  /// Errors: RESOURCE_EXHAUSTED.
  absl::Status Reserve(uint64_t bytes) {
    if (bytes > max_ || used_ > max_ - bytes) {
      return FieldError(absl::StatusCode::kResourceExhausted, "arena bytes of all connections",
                        absl::StrCat(used_ + bytes), absl::StrCat("at most ", max_, " (--arena-bytes)"));
    }
    used_ += bytes;
    gauge_.Increment(double(bytes));
    return absl::OkStatus();
  }
  void GiveBack(uint64_t bytes) {
    used_ -= bytes;
    gauge_.Decrement(double(bytes));
  }
  uint64_t used_bytes() const { return used_; }

 private:
  const uint64_t max_;
  uint64_t used_ = 0;
  prometheus::Gauge& gauge_;
};

}  // namespace kvmanager
