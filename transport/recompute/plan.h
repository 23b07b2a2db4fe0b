// How many of a sequence's first tokens to recompute from activations while K and V of the others are copied (KVPR).
//
// K and V of `tokens` tokens of one layer come back from slower memory. Of the first l of them the activations X (the
// input of the K and V projections) are taken, and K and V are recomputed; K and V of the other tokens - l are copied
// as they are stored. A plan is the l of least modelled time.
//
// Pure functions of values: any thread; nothing is allocated but errors.
//
// Exactness. Costs are rounded once, to whole femtoseconds per token (MakeCosts); from then on times are integers of
// 128 bits, so that a time is the sum that its formula says, and a plan is the true minimum over every allowed l, ties
// going to the smallest. The bounds below keep every time under 2^126 fs: nothing overflows.
#pragma once

#include <cstdint>

#include "absl/numeric/int128.h"
#include "absl/status/statusor.h"

namespace kvmanager::recompute {

/// Which resources a reload occupies when. X(n), KV(n): link time of n tokens' activations, of their K and V; C(n):
/// compute time of n tokens' projections; each 0 for n = 0.
enum class Schedule {
  /// X is there already (KVPR, section 3.2, equation 10 without its first term):
  /// t(l) = max(C(l), KV(s - l)).
  kRow,
  /// X is moved whole, then recomputation and the copy run at once (equation 10):
  /// t(l) = X(l) + max(C(l), KV(s - l)).
  kColumn,
  /// X, in chunks of c tokens, and then the other tokens' K and V share one link; a chunk is projected as soon as it is
  /// there. For l > 0
  /// t(l) = max(X(l) + KV(s - l), X(min(c, l)) + C(l), X(l) + C(min(c, l))):
  /// the link is busy throughout, or the projections are once the first chunk is there, or the last chunk's projection
  /// follows the last of X. Exact for a two-stage pipeline of equal chunks, an upper bound if the last one is smaller.
  kSharedLink,
};
inline constexpr Schedule kSchedules[] = {Schedule::kRow, Schedule::kColumn, Schedule::kSharedLink};
const char* ScheduleName(Schedule schedule);  // "row", "column", "shared"

/// What a machine does, as a Profile measures it.
struct MachineRates {
  static constexpr int64_t kLinkBytesPerSecondMax = int64_t{1} << 50;
  static constexpr int64_t kFlopsPerSecondMax = int64_t{1} << 62;
  static constexpr int64_t kLatencyNsMax = 1'000'000'000'000;

  int64_t link_bytes_per_second = 0;     // 1..kLinkBytesPerSecondMax
  int64_t link_latency_ns = 0;           // 0..kLatencyNsMax, once for X and once for K and V if there are any
  int64_t compute_flops_per_second = 0;  // 1..kFlopsPerSecondMax, of these projections
  int64_t compute_latency_ns = 0;        // 0..kLatencyNsMax, once if anything is recomputed
};

/// What is to be reloaded: one layer of `batch` sequences of equal length.
struct ReloadShape {
  static constexpr int64_t kTokensMax = int64_t{1} << 24;
  static constexpr int64_t kBatchMax = 4096;
  static constexpr int64_t kHiddenMax = int64_t{1} << 20;
  static constexpr int64_t kHeadsMax = 65536;
  static constexpr int64_t kHeadDimMax = 65536;
  static constexpr int64_t kWidthMax = int64_t{1} << 17;  // kv_heads * head_dim
  static constexpr int64_t kTokenBytesMax = int64_t{1} << 24;

  int64_t tokens = 0;       // s', 1..kTokensMax: of each sequence
  int64_t batch = 1;        // b, 1..kBatchMax
  int64_t hidden = 0;       // h, 1..kHiddenMax: values of X per token
  int64_t kv_heads = 0;     // 1..kHeadsMax
  int64_t query_heads = 0;  // a multiple of kv_heads, up to kHeadsMax. Costs do not depend on it but through hidden.
  int64_t head_dim = 0;     // 1..kHeadDimMax
  /// Bytes that the link carries per token of one sequence and layer, all KV heads, K and V: of the codec's form if
  /// pages travel encoded. 0: raw, 4 * kv_heads * head_dim. At most kTokenBytesMax.
  int64_t kv_token_bytes = 0;
  /// The same of X. 0: two bytes a value, 2 * hidden. At most kTokenBytesMax.
  int64_t x_token_bytes = 0;
  /// Tokens that have activations, the sequence's first ones: l is at most that. -1: all.
  int64_t x_tokens = -1;
  /// Tokens per chunk of X in kSharedLink, 1..kTokensMax. Of each sequence: a chunk is that of all `batch`.
  int64_t chunk_tokens = 64;
  /// l is a multiple of this or all of x_tokens if that is `tokens`, 1..kTokensMax: page_tokens for the runtime, which
  /// copies whole pages.
  int64_t split_multiple = 1;
};

/// Femtoseconds.
using TimeFs = absl::int128;
inline double Seconds(TimeFs time) { return static_cast<double>(time) * 1e-15; }

/// A reload's costs: what schedules are made of.
struct ReloadCosts {
  int64_t tokens = 0, split_max = 0, split_multiple = 1, chunk_tokens = 1;
  TimeFs x_fs = 0, kv_fs = 0, compute_fs = 0;  // per token of all sequences, rounded to the nearest, halves up
  TimeFs link_latency_fs = 0, compute_latency_fs = 0;
};
/// x_fs = batch * x_token_bytes / link rate; kv_fs likewise; compute_fs = batch * 4 * hidden * kv_heads * head_dim /
/// compute rate (equation 8 with the width of K and V for the second h). Errors: INVALID_ARGUMENT naming the field.
absl::StatusOr<ReloadCosts> MakeCosts(const MachineRates& rates, const ReloadShape& shape);

/// t(split) of `schedule`; split: 0..costs.tokens.
TimeFs ReloadTime(const ReloadCosts& costs, Schedule schedule, int64_t split);

/// What a schedule's best split is worth beside the two ways without one.
struct SplitPlan {
  Schedule schedule = Schedule::kSharedLink;
  int64_t split_tokens = 0;  // l: 0 is all-copy; all tokens, all-recompute
  TimeFs time = 0;           // t(l)
  TimeFs all_copy = 0;       // t(0): the same in every schedule
  /// t(split_max), which is all-recompute if every token has activations.
  TimeFs recompute_most = 0;
};
/// The smallest of the allowed splits of least time: 0, the multiples of split_multiple up to split_max, and `tokens`
/// if split_max is that. O(log tokens): each schedule is convex between its few knees.
SplitPlan PlanSplit(const ReloadCosts& costs, Schedule schedule = Schedule::kSharedLink);

}  // namespace kvmanager::recompute
