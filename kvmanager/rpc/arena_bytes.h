// The bytes of the arenas of all connections, and their bounds: of all, and of one user. The loop's thread.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/owner_counts.h"
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

  static constexpr uint64_t OfUserMax(uint64_t max) { return max / 4 * 3; }

  /// user: whoever asks for it. Errors: RESOURCE_EXHAUSTED.
  absl::Status Reserve(uint32_t user, uint64_t bytes) {
    const uint64_t of_user_max = OfUserMax(max_);
    const uint64_t own = used_.Of(user);
    if (bytes > of_user_max || own > of_user_max - bytes) {
      return FieldError(
          absl::StatusCode::kResourceExhausted, "arena bytes of this user", absl::StrCat(own + bytes),
          absl::StrCat("at most ", of_user_max, ", three quarters of --arena-bytes; so others find room"));
    }
    if (bytes > max_ || used_.all() > max_ - bytes) {
      return FieldError(absl::StatusCode::kResourceExhausted, "arena bytes of all connections",
                        absl::StrCat(used_.all() + bytes), absl::StrCat("at most ", max_, " (--arena-bytes)"));
    }
    used_.Add(user, bytes);
    gauge_.Increment(double(bytes));
    return absl::OkStatus();
  }
  void GiveBack(uint32_t user, uint64_t bytes) {
    used_.Remove(user, bytes);
    gauge_.Decrement(double(bytes));
  }
  uint64_t used_bytes() const { return used_.all(); }
  /// Of the user who has most.
  uint64_t most_of_user() const { return used_.most(); }

 private:
  const uint64_t max_;
  OwnerCounts<uint32_t> used_;
  prometheus::Gauge& gauge_;
};

}  // namespace kvmanager
