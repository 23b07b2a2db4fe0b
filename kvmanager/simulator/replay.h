// Replays a trace through tiers of memory whose eviction policies are the daemon's own classes.
//
// It does what the store does for one sequence after the other. A sequence begins with the longest prefix that is
// found; blocks that a lower tier alone has are copied up, and stay there. All other blocks of the request get room,
// evicting as a policy says, and then their names; the sequence ends, and its blocks are touched, the last one first.
// What is evicted goes to the next lower tier, unless that has it, or ReplayOptions keep it from there. Blocks take the
// same bytes, or those of their rung of a ladder: the highest tier lowers some before it evicts any (ladder_share.h).
//
// Not modelled: time that calls and copies take, sequences that overlap, open and raw pages of a running sequence,
// slabs, several payers. Single-threaded.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvmanager/eviction/eviction_policy.h"
#include "kvmanager/eviction/ladder_share.h"
#include "kvmanager/simulator/trace.h"

namespace kvmanager::simulator {

struct TierOptions {
  std::string name;
  uint64_t bytes = 0;
  double read_bytes_per_s = 0;  // to the highest tier; 0: takes no time. Of the highest it is not used
};

struct ReplayOptions {
  static constexpr size_t kTiersMax = 4;
  static constexpr size_t kRungsMax = 8;
  static constexpr int kSlices = 120;  // of the trace, by requests: ReplayResult::slices

  std::vector<TierOptions> tiers;  // the highest first; 1..kTiersMax
  std::string policy = "cost";     // a name of kPolicies
  uint64_t block_bytes = 1;
  /// Of a ladder: what a block takes on rungs 1, 2, ...: each less than the one before. On rung 0 it takes block_bytes.
  std::vector<uint64_t> lower_rung_bytes;
  double lowerable_share = kLowerableShare;  // of a ladder; 0..1
  uint64_t block_tokens = 512;
  double prefill_tokens_per_s = 10000;
  /// The second tier, which there must be, gets a block as soon as it has a name, as a daemon's disk does.
  bool writes_named = false;
  /// Of the policy "cost" with a second tier: what is less likely to be used again, before it would go from the second
  /// tier, is not copied there while that is full. 0..1; 0: everything is.
  double least_chance = 0;
  std::function<void(size_t requests)> progress;  // told of each request that was replayed; may be empty
};

/// What a trace can be replayed with: the daemon's, and "arc" and "optimum" to compare with.
inline constexpr const char* kPolicies[] = {"lru", "s3fifo", "cost", "arc", "optimum"};

struct ReplayResult {
  struct Tier {
    uint64_t hit_blocks = 0;      // found there and in no higher one, in a prefix without a gap
    uint64_t evicted_blocks = 0;  // that lost their place
    uint64_t demoted_blocks = 0;  // copied from here to the next lower tier
    uint64_t refused_blocks = 0;  // not copied there, for ReplayOptions::least_chance
    uint64_t fetched_blocks = 0;  // copied from here to the highest
    uint64_t demoted_bytes = 0, fetched_bytes = 0;
  };
  struct Rung {
    uint64_t hit_blocks = 0;      // that were on it when they were found
    uint64_t lowered_blocks = 0;  // encoded again by it
  };
  struct Part {
    uint64_t blocks = 0, hit_blocks = 0;
    double ratio() const { return blocks == 0 ? 0 : static_cast<double>(hit_blocks) / static_cast<double>(blocks); }
  };
  std::vector<Tier> tiers;
  std::vector<Rung> rungs;        // one without a ladder
  Part all, halves[2];            // by requests
  std::vector<Part> slices;       // up to kSlices of as many requests each
  uint64_t refused_requests = 0;  // that need more blocks than the highest tier has
  double ttft_mean_s = 0, ttft_p50_s = 0, ttft_p95_s = 0, ttft_p99_s = 0;
};

/// Errors: INVALID_ARGUMENT naming the option of `kvctl simulate` (tiers, policy, a tier smaller than a block, rungs,
/// what needs a second tier).
absl::Status CheckReplay(const ReplayOptions& options);

/// Errors: CheckReplay's.
absl::StatusOr<ReplayResult> Replay(const Trace& trace, const ReplayOptions& options);

/// The hit ratio of a tier without a bound.
ReplayResult::Part UnlimitedHits(const Trace& trace);

}  // namespace kvmanager::simulator
