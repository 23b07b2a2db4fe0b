// The bytes of the arenas of all connections, and their bounds: of all, and of one user. The loop's thread.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/container/flat_hash_map.h"
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

  static constexpr uint64_t OfUserMax(uint64_t max) { return max / 4 * 3; }

  /// user: whoever asks for it. Errors: RESOURCE_EXHAUSTED.
  absl::Status Reserve(uint32_t user, uint64_t bytes) {
    const uint64_t of_user_max = OfUserMax(max_);
    const auto of_user = of_user_.find(user);
    const uint64_t own = of_user == of_user_.end() ? 0 : of_user->second;
    if (bytes > of_user_max || own > of_user_max - bytes) {
      return FieldError(
          absl::StatusCode::kResourceExhausted, "arena bytes of this user", absl::StrCat(own + bytes),
          absl::StrCat("at most ", of_user_max, ", three quarters of --arena-bytes; so others find room"));
    }
    if (bytes > max_ || used_ > max_ - bytes) {
      return FieldError(absl::StatusCode::kResourceExhausted, "arena bytes of all connections",
                        absl::StrCat(used_ + bytes), absl::StrCat("at most ", max_, " (--arena-bytes)"));
    }
    used_ += bytes;
    of_user_[user] += bytes;
    gauge_.Increment(double(bytes));
    return absl::OkStatus();
  }
  void GiveBack(uint32_t user, uint64_t bytes) {
    used_ -= bytes;
    if (const auto of_user = of_user_.find(user); (of_user->second -= bytes) == 0) of_user_.erase(of_user);
    gauge_.Decrement(double(bytes));
  }
  uint64_t used_bytes() const { return used_; }
  /// Of the user who has most.
  uint64_t most_of_user() const {
    uint64_t most = 0;
    for (const auto& [user, bytes] : of_user_) most = std::max(most, bytes);
    return most;
  }

 private:
  const uint64_t max_;
  uint64_t used_ = 0;
  absl::flat_hash_map<uint32_t, uint64_t> of_user_;  // of it; none is 0
  prometheus::Gauge& gauge_;
};

}  // namespace kvmanager
