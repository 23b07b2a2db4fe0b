#include "kvmanager/gpu/launch_cuts.h"

#include <algorithm>

#include "attention/prefill_plan.h"
#include "codecs/device/attend_params.h"
#include "codecs/device/prefill_params.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

// All rates are of an H200's 132 multiprocessors, at their slowest where codecs differ.
constexpr double kMultiprocessors = 132;
constexpr double kHeadDim = 128;

/// Of a query head: million:m=64,bits=8 takes 7,769 us for 2,048 tokens over 32,768 with 32 heads of 128
/// (docs/benchmarks/2026-11-22-gpu-stacks.md); zack+hack 0.55, hack 0.40, raw 0.29 and zack 0.25 of that. Heads of 64
/// take 0.7 of it, and are taken for 128.
constexpr double kLongPairNs = 3.52e-3;

/// What plans take a page to cost is bytes of raw pages that would take as long. Raw pages are read at 4.3 TB/s
/// (docs/benchmarks/2026-11-22-gpu-whole.md: 16 sequences of 32,768 tokens with 8 KV heads in 501.6 us).
constexpr double kCostPerNs = 4.2e3;

/// pq:m=4,bits=8,ratio=0.1, of 8 KV heads with a group of 4: 80.8 us for one sequence of 131,072 tokens
/// (docs/benchmarks/2026-11-22-gpu-pq.md), 0.40 of that for each of 16 of 32,768.
constexpr double kSparsePairNs = 0.62;
constexpr double kSparseKvHeads = 8, kSparseGroup = 4;

/// Of a query head, for two products with a matrix of 128 by 128 at 17 of the H200's 60 fp32 TFLOP/s: an assumption,
/// which matters where contexts are shorter than some hundred tokens.
constexpr double kMapNs = 4e-3;

int DividedUp(int a, int b) { return (a + b - 1) / b; }

/// Context tokens that `tokens` queries from `position` on read together.
double Pairs(uint64_t position, int tokens) { return double(tokens) * (double(position) + (double(tokens) + 1) / 2); }

bool IsLong(const AttentionRates& rates, int exact) {
  return rates.long_pair > 0 && exact >= PrefillPlanner::kTokensMin;
}

/// The most of 1..most tokens for which fits(tokens), 0: not even one. fits: true up to some number.
template <typename Fits>
int MostThatFit(int most, const Fits& fits) {
  int low = 0;
  while (low < most) {
    const int middle = low + (most - low + 1) / 2;
    if (fits(middle)) {
      low = middle;
    } else {
      most = middle - 1;
    }
  }
  return low;
}

/// The entry's first `tokens` tokens.
AttentionWork FirstTokens(const AttentionWork& work, int tokens) {
  const int exact = work.tokens - work.sparse_queries;
  return {work.position, tokens, std::max(0, tokens - exact)};
}

}  // namespace

uint32_t EncodeLaunchPages(uint64_t raw_page_bytes) {
  return static_cast<uint32_t>(std::max<uint64_t>(1, kEncodeLaunchBytes / raw_page_bytes));
}

AttentionRates RatesOf(const AttentionShape& shape) {
  KV_CHECK(shape.kv_heads > 0 && shape.query_heads >= shape.kv_heads && shape.multiprocessors > 0);
  const double slower = kMultiprocessors / shape.multiprocessors;
  AttentionRates rates;
  rates.group_heads = shape.query_heads / shape.kv_heads;
  if (shape.has_long_kernels) {
    rates.long_pair = slower * kLongPairNs * shape.query_heads * std::max(1.0, shape.head_dim / kHeadDim);
  }
  constexpr int kBytesOfRaw = 4;  // K and V of a channel, 16 bits each
  rates.tile_raw = slower * shape.kv_heads * kBytesOfRaw * shape.head_dim / kCostPerNs;
  rates.tile_encoded = shape.identity
                           ? rates.tile_raw
                           : slower * shape.kv_heads * shape.encoded_cost / device::kPrefillPageTokens / kCostPerNs;
  rates.raw_tokens = double(shape.lag_pages + 2) * device::kPrefillPageTokens;
  rates.sparse_pair =
      slower * kSparsePairNs * shape.kv_heads / kSparseKvHeads * std::max(1.0, rates.group_heads / kSparseGroup);
  rates.query_token = slower * kMapNs * shape.query_heads;
  return rates;
}

double AttentionNs(const AttentionRates& rates, const AttentionWork& work, ReadForm pages) {
  const int exact = work.tokens - work.sparse_queries;
  double ns = work.tokens * rates.query_token;
  if (work.sparse_queries > 0) {
    ns += Pairs(work.position + uint64_t(exact), work.sparse_queries) * rates.sparse_pair;
  }
  if (exact == 0) return ns;
  const double pairs = Pairs(work.position, exact);
  if (IsLong(rates, exact)) return ns + pairs * rates.long_pair;
  const int tiles = DividedUp(exact * rates.group_heads, device::kTileRows);
  const double context = pairs / exact;  // on average
  const double raw = pages == ReadForm::kRaw ? context : std::min(context, rates.raw_tokens);
  return ns + tiles * (raw * rates.tile_raw + (context - raw) * rates.tile_encoded);
}

double AttentionNs(const AttentionRates& rates, absl::Span<const AttentionWork> entries, ReadForm pages) {
  double ns = 0;
  for (const AttentionWork& work : entries) ns += AttentionNs(rates, work, pages);
  return ns;
}

bool TakesTooLong(const AttentionRates& rates, absl::Span<const AttentionWork> entries, uint64_t encoded_pairs,
                  uint64_t raw_pairs) {
  // Pages that wait for an encoder are no reason. Most steps read no more than those.
  constexpr double kRoomNs = 0.2 * kLaunchNs;
  const double more = rates.tile_raw - rates.tile_encoded;
  const int tiles = DividedUp(rates.group_heads, device::kTileRows);  // of a query token, at most
  if (double(raw_pairs) * tiles * more <= kRoomNs) return false;
  if (entries.size() == 1 && entries[0].tokens == 1) return false;
  const double encoded_ns = AttentionNs(rates, entries, ReadForm::kEncoded);
  const double raw_ns = AttentionNs(rates, entries, ReadForm::kRaw);
  const double share = double(raw_pairs) / (double(raw_pairs) + double(encoded_pairs));
  return encoded_ns + (raw_ns - encoded_ns) * share > kLaunchNs + kRoomNs;
}

LaunchCut FirstLaunch(const AttentionRates& rates, absl::Span<const AttentionWork> entries, ReadForm pages) {
  KV_CHECK(!entries.empty());
  double left = kLaunchNs;
  LaunchCut cut;
  for (const AttentionWork& work : entries) {
    const double ns = AttentionNs(rates, work, pages);
    if (ns <= left) {
      left -= ns;
      ++cut.entries;
      cut.tokens_of_last = work.tokens;
      continue;
    }
    const auto fits = [&](int tokens) { return AttentionNs(rates, FirstTokens(work, tokens), pages) <= left; };
    const int exact = work.tokens - work.sparse_queries;
    constexpr int kLong = PrefillPlanner::kTokensMin;
    int tokens = 0;
    if (IsLong(rates, exact)) {
      // Whole tiles, and no piece that kernels for few tokens would have to serve.
      tokens = MostThatFit(exact / kLong, [&](int pieces) { return fits(pieces * kLong); }) * kLong;
      if (tokens > kLong && exact > tokens && exact - tokens < kLong) tokens -= kLong;
      if (tokens == 0 && cut.entries == 0) tokens = MostThatFit(kLong - 1, fits);
    } else {
      tokens = MostThatFit(work.tokens - 1, fits);
    }
    if (tokens == 0 && cut.entries == 0) tokens = 1;
    if (tokens > 0) {
      ++cut.entries;
      cut.tokens_of_last = tokens;
    }
    break;
  }
  return cut;
}

}  // namespace kvmanager
