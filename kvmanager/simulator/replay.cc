#include "kvmanager/simulator/replay.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/eviction/cost_eviction.h"
#include "kvmanager/simulator/arc_eviction.h"
#include "kvmanager/simulator/optimum.h"

namespace kvmanager::simulator {
namespace {

// A block's id is its number + 1 times this, so that ids are spread over 64 bits; and back.
constexpr uint64_t kSpread = 0x9E3779B97F4A7C15, kBack = 0xF1DE83E19937733D;
static_assert(kSpread * kBack == 1);

struct SimulatedBlock : Evictable {
  bool here = false;
  uint8_t rung = 0;
};

// What a block takes on each rung, and how much of a tier is lowered.
struct Ladder {
  std::vector<uint64_t> bytes;
  double lowerable_share = 0;
  std::vector<ReplayResult::Rung> results;
};

// A tier: the blocks of the trace that are there, and the policy.
class SimulatedTier {
 public:
  /// lowers: whether blocks are lowered here. ladder: outlives it.
  SimulatedTier(const TierOptions& options, Ladder* ladder, bool lowers, std::unique_ptr<EvictionPolicy> policy,
                const Trace& trace)
      : read_bytes_per_s(options.read_bytes_per_s),
        bytes_(options.bytes),
        ladder_(ladder),
        lowers_(lowers),
        policy_(std::move(policy)),
        blocks_(trace.distinct) {
    for (size_t number = 0; number < trace.distinct; ++number) blocks_[number].id = (number + 1) * kSpread;
  }

  bool Has(uint32_t number) const { return blocks_[number].here; }
  bool full() const { return used_ + ladder_->bytes[0] > bytes_; }
  uint64_t bytes() const { return bytes_; }
  SimulatedBlock& block(uint32_t number) { return blocks_[number]; }

  /// A sequence begins with the block, or names one that was here all the while.
  void Find(uint32_t number) {
    SimulatedBlock& block = blocks_[number];
    Hold(&block);
    policy_->Found(&run_, &block);
  }
  /// Takes room for one block. evicted(block): told of each that has gone for it. False: not enough could.
  template <typename Evicted>
  bool Take(uint64_t bytes, const Evicted& evicted) {
    while (used_ + bytes > bytes_) {
      if (LowerOne()) continue;
      SimulatedBlock* const victim = static_cast<SimulatedBlock*>(policy_->Victim(/*payer=*/0));
      if (victim == nullptr) return false;
      policy_->Evicted(*victim);
      Hold(victim);
      victim->here = false;
      used_ -= victim->bytes;
      ++result.evicted_blocks;
      evicted(*victim);
    }
    used_ += bytes;
    return true;
  }
  void GiveBack(uint64_t bytes) { used_ -= bytes; }
  /// Names a block for which there is room; it is in use. of_sequence: else nobody knows what for.
  void Name(uint32_t number, uint32_t index, uint64_t tokens, size_t rung, bool of_sequence) {
    SimulatedBlock& block = blocks_[number];
    block.index = index;
    block.tokens = static_cast<uint32_t>(tokens);
    SetRung(&block, rung);
    block.kept = false;
    block.here = true;
    block.notes = {};
    policy_->Named(of_sequence ? &run_ : nullptr, &block);
  }
  /// The use has ended.
  void Release(uint32_t number, bool of_sequence) {
    SimulatedBlock& block = blocks_[number];
    policy_->Touch(&block, of_sequence ? &run_ : nullptr);
    Offer(&block);
  }
  void SetKept(uint32_t number, bool kept) {
    SimulatedBlock& block = blocks_[number];
    const bool evictable = block.evictable;
    Hold(&block);
    block.kept = kept;
    if (evictable) Offer(&block);
  }
  void EndRun() { run_ = {}; }
  static uint32_t NumberOf(const SimulatedBlock& block) { return static_cast<uint32_t>(block.id * kBack - 1); }

  const double read_bytes_per_s;
  ReplayResult::Tier result;

 private:
  void Hold(SimulatedBlock* block) {
    if (!block->evictable) return;
    policy_->Remove(block);
    evictable_bytes_ -= block->bytes;
    if (block->can_lower) lowerable_bytes_ -= block->bytes;
  }
  void Offer(SimulatedBlock* block) {
    if (block->evictable) return;
    policy_->Add(block);
    evictable_bytes_ += block->bytes;
    if (block->can_lower) lowerable_bytes_ += block->bytes;
  }
  void SetRung(SimulatedBlock* block, size_t rung) {
    block->rung = static_cast<uint8_t>(rung);
    block->bytes = ladder_->bytes[rung];
    block->can_lower = lowers_ && rung + 1 < ladder_->bytes.size();
  }
  // False: none is to be lowered, or can be.
  bool LowerOne() {
    if (!LowersMore(lowerable_bytes_, evictable_bytes_, ladder_->lowerable_share)) return false;
    SimulatedBlock* const block = static_cast<SimulatedBlock*>(policy_->LowerableVictim(/*payer=*/0));
    if (block == nullptr) return false;
    Hold(block);
    used_ -= block->bytes;
    SetRung(block, block->rung + 1u);
    used_ += block->bytes;
    Offer(block);
    ++ladder_->results[block->rung].lowered_blocks;
    return true;
  }

  const uint64_t bytes_;
  Ladder* const ladder_;
  const bool lowers_;
  const std::unique_ptr<EvictionPolicy> policy_;
  std::vector<SimulatedBlock> blocks_;  // by number
  uint64_t used_ = 0, evictable_bytes_ = 0, lowerable_bytes_ = 0;
  EvictionRun run_;  // of the request
};

class Replayer {
 public:
  Replayer(const Trace& trace, const ReplayOptions& options) : trace_(trace), options_(options) {}

  absl::Status Init() {
    KV_RETURN_IF_ERROR(CheckReplay(options_));
    ladder_.bytes = {options_.block_bytes};
    ladder_.bytes.insert(ladder_.bytes.end(), options_.lower_rung_bytes.begin(), options_.lower_rung_bytes.end());
    ladder_.lowerable_share = options_.lowerable_share;
    ladder_.results.resize(ladder_.bytes.size());
    if (options_.policy == "optimum") {
      next_uses_ = NextUses(trace_);
      next_use_.assign(trace_.distinct, SIZE_MAX);
    }
    for (const TierOptions& tier : options_.tiers) {
      std::unique_ptr<EvictionPolicy> policy;
      if (tiers_.empty() && options_.least_chance > 0) {
        auto learns = MakeCostEviction();
        learns_ = learns.get();
        policy = std::move(learns);
      } else {
        KV_ASSIGN_OR_RETURN(policy, MakePolicy());
      }
      const bool lowers = tiers_.empty();
      tiers_.emplace_back(tier, &ladder_, lowers, std::move(policy), trace_);
    }
    return absl::OkStatus();
  }

  ReplayResult Run() {
    ReplayResult result;
    const size_t requests = trace_.requests.size();
    const size_t slices = std::min<size_t>(ReplayOptions::kSlices, requests);
    result.slices.resize(slices);
    std::vector<double> ttft_s;
    ttft_s.reserve(requests);
    for (size_t i = 0; i < requests; ++i) {
      const TraceRequest& request = trace_.requests[i];
      double copy_s = 0;
      const size_t hits = RunOne(request, &copy_s);
      for (ReplayResult::Part* part :
           {&result.all, &result.halves[2 * i >= requests], &result.slices[i * slices / requests]}) {
        part->blocks += request.blocks;
        part->hit_blocks += hits;
      }
      const uint64_t cached = std::min(request.input_tokens, hits * options_.block_tokens);
      const double computed = static_cast<double>(std::max<uint64_t>(request.input_tokens - cached, 1));
      ttft_s.push_back(copy_s + computed / options_.prefill_tokens_per_s);
      result.ttft_mean_s += ttft_s.back() / static_cast<double>(requests);
      if (options_.progress) options_.progress(i + 1);
    }
    std::sort(ttft_s.begin(), ttft_s.end());
    const auto quantile = [&](double q) { return ttft_s[static_cast<size_t>(q * static_cast<double>(requests - 1))]; };
    result.ttft_p50_s = quantile(0.5);
    result.ttft_p95_s = quantile(0.95);
    result.ttft_p99_s = quantile(0.99);
    for (const SimulatedTier& tier : tiers_) result.tiers.push_back(tier.result);
    result.rungs = ladder_.results;
    result.refused_requests = refused_;
    return result;
  }

 private:
  absl::StatusOr<std::unique_ptr<EvictionPolicy>> MakePolicy() {
    if (options_.policy == "arc") return MakeArcEviction();
    if (options_.policy == "optimum") {
      return MakeOptimum([this](uint64_t id) { return next_use_[id * kBack - 1]; });
    }
    KV_ASSIGN_OR_RETURN(const EvictionKind kind, ParseEvictionKind("--policy", options_.policy));
    return MakeEviction(kind);
  }

  // Blocks that hit. copy_s: how long lower tiers are read.
  size_t RunOne(const TraceRequest& request, double* copy_s) {
    const auto numbers = trace_.BlocksOf(request);
    for (size_t i = 0; i < numbers.size() && !next_uses_.empty(); ++i)
      next_use_[numbers[i]] = next_uses_[request.first + i];
    from_.clear();
    SimulatedTier& top = tiers_[0];
    for (const uint32_t number : numbers) {
      size_t tier = 0;
      while (tier < tiers_.size() && !tiers_[tier].Has(number)) ++tier;
      if (tier == tiers_.size()) break;
      tiers_[tier].Find(number);
      ++tiers_[tier].result.hit_blocks;
      const SimulatedBlock& block = tiers_[tier].block(number);
      ++ladder_.results[block.rung].hit_blocks;
      from_.push_back({tier, block.rung});
      if (tier == 0) continue;
      ++tiers_[tier].result.fetched_blocks;
      tiers_[tier].result.fetched_bytes += block.bytes;
      if (tiers_[tier].read_bytes_per_s > 0) {
        *copy_s += static_cast<double>(block.bytes) / tiers_[tier].read_bytes_per_s;
      }
    }
    const size_t hits = from_.size();
    // Room for all that the highest tier lacks. A block that is there behind a gap has its room twice meanwhile.
    const auto lacks = [&](size_t i) { return i >= hits || from_[i].tier > 0; };
    const auto rung_of = [&](size_t i) { return i < hits ? from_[i].rung : size_t{0}; };
    uint64_t wanted = 0, taken = 0;
    for (size_t i = 0; i < numbers.size(); ++i) wanted += lacks(i) ? ladder_.bytes[rung_of(i)] : 0;
    bool stored = wanted <= top.bytes();
    for (size_t i = 0; i < numbers.size() && stored; ++i) {
      if (!lacks(i)) continue;
      const uint64_t bytes = ladder_.bytes[rung_of(i)];
      stored = top.Take(bytes, [&](const SimulatedBlock& victim) { Demote(0, victim); });
      if (stored) taken += bytes;
    }
    if (!stored) {
      ++refused_;
      top.GiveBack(taken);
    }
    const size_t kept = stored ? numbers.size() : 0;
    for (size_t i = 0; i < kept; ++i) {
      if (!lacks(i)) continue;
      if (top.Has(numbers[i])) {
        top.Find(numbers[i]);
        top.GiveBack(ladder_.bytes[rung_of(i)]);
        continue;
      }
      top.Name(numbers[i], static_cast<uint32_t>(i), options_.block_tokens, rung_of(i), /*of_sequence=*/true);
      if (i < hits) top.SetKept(numbers[i], from_[i].tier == 1);
    }
    for (size_t i = numbers.size(); i-- > 0;) {
      if (i < kept || !lacks(i)) top.Release(numbers[i], /*of_sequence=*/true);
      if (i < hits && from_[i].tier > 0) tiers_[from_[i].tier].Release(numbers[i], /*of_sequence=*/true);
    }
    for (SimulatedTier& tier : tiers_) tier.EndRun();
    if (options_.writes_named && tiers_.size() > 1) {
      for (size_t i = 0; i < kept; ++i) WriteNamed(numbers[i]);
    }
    return hits;
  }

  // The second tier gets a copy of what the first one has.
  void WriteNamed(uint32_t number) {
    if (!tiers_[0].Has(number) || tiers_[1].Has(number)) return;
    Demote(0, tiers_[0].block(number));
    if (tiers_[1].Has(number)) tiers_[0].SetKept(number, true);
  }

  // Whether a block of the first tier is likely enough to be used before it would go from the second. That is full: as
  // many uses as it took to write as much as it has.
  bool IsWorthIt(const SimulatedBlock& block) {
    if (learns_ == nullptr || !tiers_[1].full()) return true;
    const double written = static_cast<double>(std::max(tiers_[0].result.demoted_bytes, options_.block_bytes));
    const double stays = static_cast<double>(tiers_[1].bytes()) * static_cast<double>(learns_->uses()) / written;
    return learns_->ChanceOf(block, static_cast<uint64_t>(stays)) >= options_.least_chance;
  }

  // `victim` has left a tier: the next lower one gets it.
  void Demote(size_t from, const SimulatedBlock& victim) {
    if (from + 1 == tiers_.size()) return;
    SimulatedTier& lower = tiers_[from + 1];
    const uint32_t number = SimulatedTier::NumberOf(victim);
    if (lower.Has(number)) {
      if (lower.block(number).evictable) lower.Release(number, /*of_sequence=*/false);
      return;
    }
    if (from == 0 && !IsWorthIt(victim)) {
      ++tiers_[0].result.refused_blocks;
      return;
    }
    const bool room = lower.Take(victim.bytes, [&](const SimulatedBlock& next) {
      const uint32_t gone = SimulatedTier::NumberOf(next);
      if (tiers_[from].Has(gone)) tiers_[from].SetKept(gone, false);
      Demote(from + 1, next);
    });
    if (!room) return;
    ++tiers_[from].result.demoted_blocks;
    tiers_[from].result.demoted_bytes += victim.bytes;
    lower.Name(number, victim.index, victim.tokens, victim.rung, /*of_sequence=*/false);
    lower.block(number).CopyUse(victim);
    lower.Release(number, /*of_sequence=*/false);
  }

  struct Hit {
    size_t tier, rung;
  };

  const Trace& trace_;
  const ReplayOptions& options_;
  Ladder ladder_;
  std::deque<SimulatedTier> tiers_;             // the highest first; they stay where they are
  std::vector<size_t> next_uses_;               // of the optimum: [places in the trace]
  std::vector<size_t> next_use_;                // of it, by number, from now on
  const CostEvictionPolicy* learns_ = nullptr;  // the first tier's, with least_chance
  std::vector<Hit> from_;                       // of a request: where each was that hit
  uint64_t refused_ = 0;
};

}  // namespace

absl::Status CheckReplay(const ReplayOptions& options) {
  constexpr char kSecondTier[] = "given with a second --tier, such as --tier disk=1TiB: without one nothing is written";
  if (options.tiers.empty() || options.tiers.size() > ReplayOptions::kTiersMax) {
    return InvalidField("--tier", absl::StrCat("given ", options.tiers.size(), " times"),
                        absl::StrCat("given 1..", ReplayOptions::kTiersMax, " times"));
  }
  for (const TierOptions& tier : options.tiers) {
    if (tier.bytes >= options.block_bytes) continue;
    return InvalidField(absl::StrCat("--tier ", tier.name), absl::StrCat(tier.bytes, " bytes"),
                        absl::StrCat("at least a block, ", options.block_bytes));
  }
  if (std::find(std::begin(kPolicies), std::end(kPolicies), options.policy) == std::end(kPolicies)) {
    return InvalidField("--policy", options.policy, "lru, s3fifo, cost, arc or optimum");
  }
  if (!(options.prefill_tokens_per_s > 0 && std::isfinite(options.prefill_tokens_per_s))) {
    return InvalidField("--prefill-rate", options.prefill_tokens_per_s, "tokens a second, more than 0");
  }
  if (options.writes_named && options.tiers.size() < 2) {
    return InvalidField("--write-named", "given with one tier", kSecondTier);
  }
  if (!(options.least_chance >= 0 && options.least_chance <= 1)) {
    return InvalidField("--least-chance", options.least_chance, "0..1");
  }
  if (options.least_chance > 0 && options.policy != "cost") {
    return InvalidField("--least-chance", options.least_chance,
                        absl::StrCat("0 with --policy ", options.policy, ": cost alone learns chances"));
  }
  if (options.least_chance > 0 && options.tiers.size() < 2) {
    return InvalidField("--least-chance", absl::StrCat(options.least_chance, " with one tier"), kSecondTier);
  }
  if (options.lower_rung_bytes.size() >= ReplayOptions::kRungsMax) {
    return InvalidField("--rung-bytes", absl::StrCat(options.lower_rung_bytes.size() + 1, " rungs"),
                        absl::StrCat("at most ", ReplayOptions::kRungsMax));
  }
  if (!(options.lowerable_share >= 0 && options.lowerable_share <= 1)) {
    return InvalidField("--lowerable-share", options.lowerable_share, "0..1");
  }
  if (!options.lower_rung_bytes.empty() && options.policy == "optimum") {
    return InvalidField("--policy", "optimum", "another one with a ladder: its blocks have one size");
  }
  uint64_t above = options.block_bytes;
  for (const uint64_t bytes : options.lower_rung_bytes) {
    if (bytes == 0 || bytes >= above) {
      return InvalidField("--rung-bytes", bytes, absl::StrCat("1.., and less than the rung above, ", above));
    }
    above = bytes;
  }
  return absl::OkStatus();
}

absl::StatusOr<ReplayResult> Replay(const Trace& trace, const ReplayOptions& options) {
  Replayer replayer(trace, options);
  KV_RETURN_IF_ERROR(replayer.Init());
  return replayer.Run();
}

ReplayResult::Part UnlimitedHits(const Trace& trace) {
  ReplayResult::Part part;
  std::vector<bool> seen(trace.distinct);
  for (const TraceRequest& request : trace.requests) {
    const auto numbers = trace.BlocksOf(request);
    part.blocks += numbers.size();
    size_t hits = 0;
    while (hits < numbers.size() && seen[numbers[hits]]) ++hits;
    part.hit_blocks += hits;
    for (const uint32_t number : numbers) seen[number] = true;
  }
  return part;
}

}  // namespace kvmanager::simulator
