#include "transport/recompute/plan.h"

#include <algorithm>

#include "kvmanager/base/status.h"

namespace kvmanager::recompute {
namespace {

constexpr int64_t kFsPerSecond = 1'000'000'000'000'000;
constexpr int64_t kFsPerNs = 1'000'000;

absl::Status CheckRange(absl::string_view field, int64_t value, int64_t min, int64_t max) {
  if (value >= min && value <= max) return absl::OkStatus();
  return InvalidField(field, value, absl::StrCat(min, "..", max));
}

absl::Status Check(const MachineRates& r) {
  KV_RETURN_IF_ERROR(
      CheckRange("link_bytes_per_second", r.link_bytes_per_second, 1, MachineRates::kLinkBytesPerSecondMax));
  KV_RETURN_IF_ERROR(CheckRange("link_latency_ns", r.link_latency_ns, 0, MachineRates::kLatencyNsMax));
  KV_RETURN_IF_ERROR(
      CheckRange("compute_flops_per_second", r.compute_flops_per_second, 1, MachineRates::kFlopsPerSecondMax));
  return CheckRange("compute_latency_ns", r.compute_latency_ns, 0, MachineRates::kLatencyNsMax);
}

absl::Status Check(const ReloadShape& s) {
  KV_RETURN_IF_ERROR(CheckRange("tokens", s.tokens, 1, ReloadShape::kTokensMax));
  KV_RETURN_IF_ERROR(CheckRange("batch", s.batch, 1, ReloadShape::kBatchMax));
  KV_RETURN_IF_ERROR(CheckRange("hidden", s.hidden, 1, ReloadShape::kHiddenMax));
  KV_RETURN_IF_ERROR(CheckRange("kv_heads", s.kv_heads, 1, ReloadShape::kHeadsMax));
  KV_RETURN_IF_ERROR(CheckRange("query_heads", s.query_heads, s.kv_heads, ReloadShape::kHeadsMax));
  if (s.query_heads % s.kv_heads != 0) {
    return InvalidField("query_heads", s.query_heads, absl::StrCat("a multiple of kv_heads, ", s.kv_heads));
  }
  KV_RETURN_IF_ERROR(CheckRange("head_dim", s.head_dim, 1, ReloadShape::kHeadDimMax));
  KV_RETURN_IF_ERROR(CheckRange("kv_heads * head_dim", s.kv_heads * s.head_dim, 1, ReloadShape::kWidthMax));
  KV_RETURN_IF_ERROR(CheckRange("kv_token_bytes", s.kv_token_bytes, 0, ReloadShape::kTokenBytesMax));
  KV_RETURN_IF_ERROR(CheckRange("x_token_bytes", s.x_token_bytes, 0, ReloadShape::kTokenBytesMax));
  KV_RETURN_IF_ERROR(CheckRange("x_tokens", s.x_tokens, -1, s.tokens));
  KV_RETURN_IF_ERROR(CheckRange("chunk_tokens", s.chunk_tokens, 1, ReloadShape::kTokensMax));
  return CheckRange("split_multiple", s.split_multiple, 1, ReloadShape::kTokensMax);
}

TimeFs DivideRounded(TimeFs numerator, int64_t denominator) { return (numerator + denominator / 2) / denominator; }

TimeFs X(const ReloadCosts& c, int64_t n) { return n == 0 ? TimeFs(0) : c.link_latency_fs + c.x_fs * n; }
TimeFs Kv(const ReloadCosts& c, int64_t n) { return n == 0 ? TimeFs(0) : c.link_latency_fs + c.kv_fs * n; }
TimeFs Compute(const ReloadCosts& c, int64_t n) { return n == 0 ? TimeFs(0) : c.compute_latency_fs + c.compute_fs * n; }

}  // namespace

const char* ScheduleName(Schedule schedule) {
  switch (schedule) {
    case Schedule::kRow:
      return "row";
    case Schedule::kColumn:
      return "column";
    case Schedule::kSharedLink:
      return "shared";
  }
  return "unknown";
}

absl::StatusOr<ReloadCosts> MakeCosts(const MachineRates& rates, const ReloadShape& shape) {
  KV_RETURN_IF_ERROR(Check(rates));
  KV_RETURN_IF_ERROR(Check(shape));
  // The largest, of all tokens: 4 * 2^20 * 2^17 FLOP * 2^12 sequences * 10^15 fs * 2^24 tokens < 2^125; two such times
  // and a latency are the most that are added.
  const int64_t width = shape.kv_heads * shape.head_dim;
  const int64_t kv_bytes = shape.kv_token_bytes == 0 ? 4 * width : shape.kv_token_bytes;
  const int64_t x_bytes = shape.x_token_bytes == 0 ? 2 * shape.hidden : shape.x_token_bytes;
  const TimeFs per_token = TimeFs(shape.batch) * kFsPerSecond;
  ReloadCosts costs;
  costs.tokens = shape.tokens;
  costs.split_max = shape.x_tokens < 0 ? shape.tokens : shape.x_tokens;
  costs.split_multiple = shape.split_multiple;
  costs.chunk_tokens = shape.chunk_tokens;
  costs.x_fs = DivideRounded(per_token * x_bytes, rates.link_bytes_per_second);
  costs.kv_fs = DivideRounded(per_token * kv_bytes, rates.link_bytes_per_second);
  costs.compute_fs = DivideRounded(per_token * 4 * shape.hidden * width, rates.compute_flops_per_second);
  costs.link_latency_fs = TimeFs(rates.link_latency_ns) * kFsPerNs;
  costs.compute_latency_fs = TimeFs(rates.compute_latency_ns) * kFsPerNs;
  return costs;
}

TimeFs ReloadTime(const ReloadCosts& c, Schedule schedule, int64_t split) {
  KV_CHECK(split >= 0 && split <= c.tokens);
  const TimeFs copy = Kv(c, c.tokens - split);
  if (split == 0) return copy;
  switch (schedule) {
    case Schedule::kRow:
      return std::max(Compute(c, split), copy);
    case Schedule::kColumn:
      return X(c, split) + std::max(Compute(c, split), copy);
    case Schedule::kSharedLink: {
      const int64_t chunk = std::min(c.chunk_tokens, split);
      return std::max({X(c, split) + copy, X(c, chunk) + Compute(c, split), X(c, split) + Compute(c, chunk)});
    }
  }
  return copy;
}

SplitPlan PlanSplit(const ReloadCosts& c, Schedule schedule) {
  SplitPlan plan{.schedule = schedule};
  plan.all_copy = plan.time = ReloadTime(c, schedule, 0);
  plan.recompute_most = ReloadTime(c, schedule, c.split_max);
  const auto consider = [&](int64_t split) {
    const TimeFs time = ReloadTime(c, schedule, split);
    if (time < plan.time) {
      plan.split_tokens = split;
      plan.time = time;
    }
  };
  // Inside (0, tokens) a schedule is the maximum of functions that are linear but for a knee at chunk_tokens: convex on
  // either side of it, also along multiples. Differences of a convex function do not decrease, so the first index whose
  // next value is not smaller is its smallest minimum.
  const auto search = [&](int64_t first, int64_t last) {  // of multiples first * m .. last * m
    if (first > last) return;
    const auto time = [&](int64_t i) { return ReloadTime(c, schedule, i * c.split_multiple); };
    int64_t low = first, high = last;
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (time(middle + 1) >= time(middle)) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    consider(low * c.split_multiple);
  };
  const int64_t last = std::min(c.split_max, c.tokens - 1) / c.split_multiple;
  const int64_t knee = std::min(c.chunk_tokens / c.split_multiple, last);
  search(1, knee);
  search(knee + 1, last);
  if (c.split_max == c.tokens) consider(c.tokens);  // the copy's latency is gone: no part of the convex run
  return plan;
}

}  // namespace kvmanager::recompute
