// What a PQ cache is made with, and how many tokens a query then reads. Values; any thread.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "codecs/registry.h"
#include "codecs/sequence_index.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager::pq {

/// "pq:m=4,bits=8,ratio=0.1,sinks=32,scores=codes,iterations=auto,rebuild=0,cache_blocks=0,cache_policy=lfu".
struct Parameters {
  enum class Scores : uint8_t { kCodes, kExact };
  enum class CachePolicy : uint8_t { kLfu, kLru };
  static constexpr uint32_t kMillion = 1000000;
  static constexpr uint32_t kSinksMax = 1 << 16;
  static constexpr uint32_t kIterationsMin = 3,
                            kIterationsMax = IndexFacts::kIterationsMax;  // of auto; iterations=N: 1..kIterationsMax
  static constexpr uint32_t kRebuildMin = 64;
  static constexpr uint32_t kCacheBlocksMax = 1 << 16;
  static constexpr int kSubspacesMax = 32;

  int m = 4;                           // sub-vectors of a key; divides head_dim, at most kSubspacesMax
  int bits = 8;                        // 2^bits centroids each, 4..8
  uint32_t ratio_millionths = 100000;  // of the context that is read: half by score, half newest; 1..kMillion
  uint32_t sinks = 32;                 // first tokens, always read
  Scores scores = Scores::kCodes;      // kExact: the oracle, scores of the keys themselves
  uint32_t iterations = 0;             // of k-means; 0: auto
  uint32_t rebuild = 0;                // train again after so many tokens; 0: never
  uint32_t cache_blocks = 0;           // of the fast pool, per sequence, layer and KV head
  CachePolicy cache_policy = CachePolicy::kLfu;

  int centroids() const { return 1 << bits; }
  std::string Spec() const;

  /// PQCache's budget (reference.py, pqcache): max(1, floor((p + 1 - sinks) * ratio / 2)) for a query at position p.
  /// So many of the newest tokens are read, and as many of the middle ones: those that are neither sinks nor newest.
  uint64_t Budget(uint64_t position) const;
  struct Reads {
    uint64_t sinks = 0;        // tokens 0 .. sinks - 1
    uint64_t local_begin = 0;  // tokens local_begin .. position; at least `sinks`
    uint64_t chosen = 0;       // of tokens sinks .. local_begin - 1, the most probable
    uint64_t total(uint64_t position) const { return sinks + chosen + (position + 1 - local_begin); }
  };
  /// Sinks, chosen and local tokens, disjoint.
  Reads ReadsOf(uint64_t position) const;
  /// Queries at positions from here on choose what they read: from the end of the prompt, but at least as many tokens
  /// as there are centroids.
  uint64_t FirstPosition(uint64_t prompt_tokens) const;
  /// The tokens that the codebooks which a query at `position` uses were trained on: FirstPosition and, with `rebuild`,
  /// a multiple of it more. REQUIRES: position >= FirstPosition(prompt_tokens).
  uint64_t TrainedTokens(uint64_t prompt_tokens, uint64_t position) const;
};

/// Errors: INVALID_ARGUMENT with parameter, value and bound.
absl::StatusOr<Parameters> ParseParameters(const PageLayout& layout, const CodecParameters& parameters);

}  // namespace kvmanager::pq
