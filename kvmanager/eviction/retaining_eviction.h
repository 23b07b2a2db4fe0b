// What clients want of blocks, around what a policy would do with them: blocks that are to be kept longer, or to go
// first, are chosen here, and all others by the policy.
//
// Of what a payer pays for goes first what has a priority below Retention::kOfPolicy, then what the policy names, at
// last what has one above: the lowest priority first, of one priority what ends first, then the least recently used,
// so that of a chain that is retained in one call children go before their parents. Nothing is kept for good: a payer
// whose blocks are all retained gives the least of them.
//
// A retention that has ended is the policy's again. That is noticed of some blocks in each call, few enough that a
// request which evicts hundreds stays short; until then a block that would stay goes by its last use, beside what the
// policy names.
//
// Invariants (CheckInvariants):
//  1. An evictable block is here exactly while its retention is not the policy's; else the policy has it.
//  2. Those here that end are in the order of their ends, too, and next_ends_ has the first one of each payer.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/eviction/evictable_queue.h"
#include "kvmanager/eviction/eviction_policy.h"

namespace kvmanager {

class RetainingEviction final : public EvictionPolicy {
 public:
  static constexpr int kEndsAtOnce = 2;     // that Add and the three of victims notice: some 10 us
  static constexpr int kEndsInATurn = 512;  // that EndSome notices: 1 ms

  /// clock: outlives it; Retention::until_ns is of it.
  RetainingEviction(std::unique_ptr<EvictionPolicy> policy, const Clock* clock, int ends_at_once = kEndsAtOnce)
      : policy_(std::move(policy)), clock_(clock), ends_at_once_(ends_at_once) {}

  void Found(EvictionRun* run, Evictable* block) override { policy_->Found(run, block); }
  void Named(EvictionRun* run, Evictable* block) override { policy_->Named(run, block); }
  void Touch(Evictable* block, const EvictionRun* run) override;
  void Add(Evictable* block) override;
  void Remove(Evictable* block) override;
  void Evicted(const Evictable& block) override { policy_->Evicted(block); }
  Evictable* Victim(uint32_t payer) override { return Next(payer, Of::kAll); }
  Evictable* KeptVictim(uint32_t payer) override { return Next(payer, Of::kKept); }
  Evictable* UnkeptVictim(uint32_t payer) override { return Next(payer, Of::kUnkept); }
  /// What a client wants to be kept longer, or to go first, is not lowered.
  Evictable* LowerableVictim(uint32_t payer) override;

  /// Of a block that is evictable or not: from now on, whatever it was before. O(log n). REQUIRES: a priority of at
  /// most Retention::kPriorityMax.
  void Retain(Evictable* block, Retention retention);
  /// Notices some retentions that have ended. For now and then: nothing depends on it.
  void EndSome() { EndSome(kEndsInATurn); }

  struct Use {
    uint64_t blocks = 0, bytes = 0;
  };
  /// Evictable blocks that are kept longer than the policy would. Those that have ended and were not noticed count.
  const Use& kept_longer() const { return kept_longer_; }
  void CheckInvariants() const;

 private:
  using Of = EvictablesOf;
  using Rank = std::tuple<uint8_t, int64_t, uint64_t>;  // priority, end (INT64_MAX: none), last use
  using End = std::pair<int64_t, uint64_t>;             // end, last use
  struct Payer {
    OrderedEvictables<Rank> ranks;
    OrderedEvictables<End> ends;
    int64_t next_end = 0;  // 0: none ends
  };

  void Put(Evictable* block);  // where its retention says
  void Take(Evictable* block);
  void NoteNextEnd(uint32_t id, Payer* payer);
  void EndSome(int blocks_max);
  void EndSome(uint32_t first_payer, int blocks_max);
  void EndFirst(uint32_t payer);
  Evictable* Next(uint32_t payer, Of which);
  void Count(const Evictable& block, bool more);

  const std::unique_ptr<EvictionPolicy> policy_;
  const Clock* const clock_;
  const int ends_at_once_;
  absl::flat_hash_map<uint32_t, Payer> payers_;       // who have some here
  std::set<std::pair<int64_t, uint32_t>> next_ends_;  // and payer
  Use kept_longer_;
};

/// What a tier and a disk have.
std::unique_ptr<RetainingEviction> MakeRetainingEviction(EvictionKind kind, const Clock* clock);

}  // namespace kvmanager
