// Retentions around each policy, against a model that is as simple as can be.
#include "kvmanager/eviction/retaining_eviction.h"

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"

namespace kvmanager {
namespace {

constexpr int64_t kSecond = 1000000000;

class RetainingEvictionTest : public ::testing::TestWithParam<EvictionKind> {
 protected:
  // Named and touched, with a payer.
  Evictable* New(uint32_t payer = 1, bool kept = false) {
    blocks_.push_back(std::make_unique<Evictable>());
    Evictable* const block = blocks_.back().get();
    block->id = blocks_.size();
    block->bytes = 100;
    block->tokens = 64;
    block->payer = payer;
    block->kept = kept;
    policy_->Named(nullptr, block);
    policy_->Touch(block, nullptr);
    return block;
  }
  Evictable* NewEvictable(uint32_t payer = 1, bool kept = false) {
    Evictable* const block = New(payer, kept);
    policy_->Add(block);
    return block;
  }
  // Evicts all of a payer.
  std::vector<const Evictable*> EvictAll(uint32_t payer = 1) {
    std::vector<const Evictable*> order;
    while (Evictable* const victim = policy_->Victim(payer)) {
      policy_->CheckInvariants();
      policy_->Evicted(*victim);
      policy_->Remove(victim);
      order.push_back(victim);
    }
    return order;
  }

  ManualClock clock_;
  std::unique_ptr<RetainingEviction> policy_ = MakeRetainingEviction(GetParam(), &clock_);
  std::vector<std::unique_ptr<Evictable>> blocks_;
};

TEST_P(RetainingEvictionTest, LowGoesFirstAndHighLast) {
  Evictable* const pinned = NewEvictable();
  Evictable* const high = NewEvictable();
  Evictable* const higher = NewEvictable();
  Evictable* const usual = NewEvictable();
  Evictable* const low = NewEvictable();
  Evictable* const lowest = NewEvictable();
  policy_->Retain(pinned, {100, 0});
  policy_->Retain(high, {51, 0});
  policy_->Retain(higher, {80, 0});
  policy_->Retain(low, {49, 0});
  policy_->Retain(lowest, {0, 0});
  EXPECT_EQ(policy_->kept_longer().blocks, 3u);
  EXPECT_EQ(policy_->kept_longer().bytes, 300u);
  EXPECT_EQ(EvictAll(), (std::vector<const Evictable*>{lowest, low, usual, high, higher, pinned}));
  EXPECT_EQ(policy_->kept_longer().blocks, 0u);
}

TEST_P(RetainingEvictionTest, OfOnePriorityWhatEndsFirstThenTheLeastRecentlyUsed) {
  std::vector<Evictable*> chain;
  for (int i = 0; i < 4; ++i) chain.push_back(New());
  for (int i = 3; i >= 0; --i) {
    policy_->Touch(chain[i], nullptr);
    policy_->Add(chain[i]);
  }
  Evictable* const never = NewEvictable();
  Evictable* const later = NewEvictable();
  policy_->Retain(never, {70, 0});
  policy_->Retain(later, {70, 9 * kSecond});
  for (Evictable* const block : chain) policy_->Retain(block, {70, 5 * kSecond});
  EXPECT_EQ(EvictAll(), (std::vector<const Evictable*>{chain[3], chain[2], chain[1], chain[0], later, never}));
}

TEST_P(RetainingEvictionTest, UseMovesWithinAPriority) {
  Evictable* const a = NewEvictable();
  Evictable* const b = NewEvictable();
  policy_->Retain(a, {70, 0});
  policy_->Retain(b, {70, 0});
  EXPECT_EQ(policy_->Victim(1), a);
  EvictionRun run;
  policy_->Found(&run, a);
  policy_->Touch(a, &run);
  EXPECT_TRUE(a->evictable);
  EXPECT_EQ(policy_->Victim(1), b);
  // Publishing and using it again change nothing.
  EXPECT_EQ(a->retention, (Retention{70, 0}));
  policy_->Retain(a, {Retention::kOfPolicy, 5});
  EXPECT_EQ(a->retention, Retention());
  EXPECT_EQ(policy_->Victim(1), a);
}

TEST_P(RetainingEvictionTest, OfABlockInUseItCountsOnceItIsEvictable) {
  Evictable* const a = New();
  policy_->Retain(a, {70, 0});
  EXPECT_EQ(policy_->Victim(1), nullptr);
  Evictable* const b = NewEvictable();
  policy_->Add(a);
  EXPECT_EQ(policy_->Victim(1), b);
  policy_->Remove(a);
  policy_->Retain(a, {10, 0});
  policy_->Add(a);
  EXPECT_EQ(policy_->Victim(1), a);
  policy_->Retain(a, {90, 0});
  EXPECT_EQ(policy_->Victim(1), b);
}

TEST_P(RetainingEvictionTest, EndsAndIsThePolicysAgain) {
  Evictable* const retained = NewEvictable();
  Evictable* const low = NewEvictable();
  Evictable* const usual = NewEvictable();
  policy_->Retain(retained, {100, 5 * kSecond});
  policy_->Retain(low, {0, 5 * kSecond});
  EXPECT_EQ(policy_->Victim(1), low);
  clock_.AdvanceNs(5 * kSecond - 1);
  EXPECT_EQ(policy_->Victim(1), low);
  clock_.AdvanceNs(1);
  EXPECT_EQ(policy_->Victim(1), retained);
  EXPECT_EQ(retained->retention, Retention());
  EXPECT_EQ(policy_->kept_longer().blocks, 0u);
  EXPECT_EQ(EvictAll(), (std::vector<const Evictable*>{retained, low, usual}));
  // Of a block in use, too.
  Evictable* const used = New();
  policy_->Retain(used, {100, 6 * kSecond});
  clock_.AdvanceNs(2 * kSecond);
  policy_->Add(used);
  EXPECT_EQ(used->retention, Retention());
}

TEST_P(RetainingEvictionTest, ThousandsThatEndAtOnceAreNotPreferred) {
  constexpr int kBlocks = 2000;
  std::vector<Evictable*> retained;
  for (int i = 0; i < kBlocks; ++i) retained.push_back(NewEvictable());
  Evictable* const newer = NewEvictable();
  Evictable* const pinned = NewEvictable();
  for (Evictable* const block : retained) policy_->Retain(block, {90, kSecond});
  policy_->Retain(pinned, {60, 0});
  EXPECT_EQ(policy_->Victim(1), newer);
  clock_.AdvanceNs(kSecond);
  // The longest unused go, whether it was noticed that they have ended or not; what is retained and what is newer stay.
  const std::vector<const Evictable*> order = EvictAll();
  ASSERT_EQ(order.size(), kBlocks + 2u);
  EXPECT_EQ(order.back(), pinned);
  if (GetParam() == EvictionKind::kLru) {
    EXPECT_EQ(std::vector<const Evictable*>(order.begin(), order.end() - 2),
              std::vector<const Evictable*>(retained.begin(), retained.end()));
  }
}

TEST_P(RetainingEvictionTest, EachPayerGivesOfItsOwn) {
  Evictable* const a = NewEvictable(1);
  Evictable* const b = NewEvictable(2);
  policy_->Retain(a, {100, 0});
  policy_->Retain(b, {0, 0});
  EXPECT_EQ(policy_->Victim(1), a);
  EXPECT_EQ(policy_->Victim(2), b);
  EXPECT_EQ(policy_->Victim(3), nullptr);
}

TEST_P(RetainingEvictionTest, OfThoseThatAreNotKept) {
  Evictable* const kept = NewEvictable(1, /*kept=*/true);
  Evictable* const usual = NewEvictable(1);
  Evictable* const low = NewEvictable(1);
  Evictable* const usual_kept = NewEvictable(1, /*kept=*/true);
  policy_->Retain(kept, {0, 0});
  policy_->Retain(low, {20, 0});
  EXPECT_EQ(policy_->Victim(1), kept);
  EXPECT_EQ(policy_->KeptVictim(1), kept);
  EXPECT_EQ(policy_->UnkeptVictim(1), low);
  policy_->Retain(low, {80, 0});
  EXPECT_EQ(policy_->UnkeptVictim(1), usual);
  policy_->Remove(usual);
  EXPECT_EQ(policy_->UnkeptVictim(1), low);
  policy_->Remove(low);
  EXPECT_EQ(policy_->UnkeptVictim(1), nullptr);
  policy_->Remove(kept);
  EXPECT_EQ(policy_->Victim(1), usual_kept);
  EXPECT_EQ(policy_->KeptVictim(1), usual_kept);
}

TEST_P(RetainingEvictionTest, WhatAClientSteersIsNotLowered) {
  Evictable* const low = New();
  Evictable* const high = New();
  Evictable* const usual = New();
  for (Evictable* const block : {low, high, usual}) {
    block->can_lower = true;
    policy_->Add(block);
  }
  policy_->Retain(low, {20, 0});
  policy_->Retain(high, {80, 5 * kSecond});
  EXPECT_EQ(policy_->LowerableVictim(1), usual);
  EXPECT_EQ(policy_->LowerableVictim(2), nullptr);
  policy_->Remove(usual);
  EXPECT_EQ(policy_->LowerableVictim(1), nullptr);
  clock_.AdvanceNs(5 * kSecond);
  EXPECT_EQ(policy_->LowerableVictim(1), high);
  EXPECT_EQ(high->retention, Retention());
  policy_->Remove(high);
  policy_->Retain(low, {});
  EXPECT_EQ(policy_->LowerableVictim(1), low);
}

using Of = EvictablesOf;

Evictable* VictimOf(EvictionPolicy& policy, uint32_t payer, Of which) {
  if (which == Of::kAll) return policy.Victim(payer);
  if (which == Of::kLowerable) return policy.LowerableVictim(payer);
  return which == Of::kKept ? policy.KeptVictim(payer) : policy.UnkeptVictim(payer);
}

// The policy itself, on copies of the blocks, and what a list of them says.
class Model {
 public:
  Model(EvictionKind kind, const Clock* clock) : policy_(MakeEviction(kind)), clock_(clock) {}

  struct Known {
    Evictable copy;  // the policy's
    Retention retention;
    bool evictable = false;
  };

  void Touch(Known* known, const EvictionRun* run) {
    policy_->Touch(&known->copy, run);
    if (known->evictable) Place(known);
  }
  void Add(Known* known) {
    EndThose();
    known->evictable = true;
    Place(known);
  }
  void Remove(Known* known) {
    if (known->copy.evictable) policy_->Remove(&known->copy);
    known->evictable = false;
  }
  void Retain(Known* known, Retention retention) {
    if (retention.is_of_policy()) retention = {};
    known->retention = retention;
    if (known->evictable) Place(known);
  }
  Known* Next(uint32_t payer, Of which) {
    EndThose();
    Known* first = nullptr;
    for (Known& known : blocks) {
      if (which == Of::kLowerable) break;  // of those that the policy has alone
      if (!known.evictable || known.retention.is_of_policy() || known.copy.payer != payer) continue;
      if (which != Of::kAll && known.copy.kept != (which == Of::kKept)) continue;
      if (first == nullptr || Rank(known) < Rank(*first)) first = &known;
    }
    if (first != nullptr && first->retention.priority() < Retention::kOfPolicy) return first;
    Evictable* const next = VictimOf(*policy_, payer, which);
    if (next == nullptr) return first;
    return &*std::find_if(blocks.begin(), blocks.end(), [&](const Known& known) { return &known.copy == next; });
  }
  EvictionPolicy& policy() { return *policy_; }

  std::vector<Known> blocks;

 private:
  static std::tuple<int, int64_t, uint64_t> Rank(const Known& known) {
    const int64_t end = known.retention.until_ns();
    return {known.retention.priority(), end == 0 ? std::numeric_limits<int64_t>::max() : end, known.copy.last_use};
  }
  bool Ended(const Known& known) const {
    return known.retention.until_ns() != 0 && known.retention.until_ns() <= clock_->NowNs();
  }
  // The policy has it exactly if it is the policy's.
  void Place(Known* known) {
    if (Ended(*known)) known->retention = {};
    const bool is_of_policy = known->retention.is_of_policy();
    if (is_of_policy == known->copy.evictable) return;
    if (is_of_policy) {
      policy_->Add(&known->copy);
    } else {
      policy_->Remove(&known->copy);
    }
  }
  void EndThose() {
    for (Known& known : blocks) {
      if (known.evictable && Ended(known)) Place(&known);
    }
  }

  const std::unique_ptr<EvictionPolicy> policy_;
  const Clock* const clock_;
};

TEST_P(RetainingEvictionTest, RandomOperationsAgainstTheModel) {
  constexpr size_t kBlocks = 60;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const auto pick = [&](uint64_t below) { return random() % below; };
    ManualClock clock;
    // As many are noticed at once as may end.
    const auto policy =
        std::make_unique<RetainingEviction>(MakeEviction(GetParam()), &clock, static_cast<int>(kBlocks));
    Model model(GetParam(), &clock);
    model.blocks.resize(kBlocks);
    std::vector<Evictable> blocks(kBlocks);
    for (size_t i = 0; i < kBlocks; ++i) {
      Evictable& block = blocks[i];
      block.id = i + 1;
      block.bytes = 100 + pick(3) * 50;
      block.tokens = 64;
      block.index = static_cast<uint32_t>(pick(5));
      block.payer = static_cast<uint32_t>(pick(3));
      block.kept = pick(3) == 0;
      block.can_lower = pick(2) == 0;
      model.blocks[i].copy = block;
      for (EvictionPolicy* const each : {static_cast<EvictionPolicy*>(policy.get()), &model.policy()}) {
        Evictable* const of = each == policy.get() ? &block : &model.blocks[i].copy;
        each->Named(nullptr, of);
        each->Touch(of, nullptr);
      }
    }
    for (int step = 0; step < 4000; ++step) {
      const size_t i = pick(kBlocks);
      Evictable& block = blocks[i];
      Model::Known& known = model.blocks[i];
      switch (pick(9)) {
        case 0:
        case 1:
          if (block.evictable) break;
          policy->Add(&block);
          model.Add(&known);
          break;
        case 2:
          if (!block.evictable) break;
          policy->Remove(&block);
          model.Remove(&known);
          block.kept = known.copy.kept = pick(3) == 0;
          block.can_lower = known.copy.can_lower = pick(2) == 0;
          block.bytes = known.copy.bytes = 100 + pick(3) * 50;
          break;
        case 3: {
          EvictionRun run, copy;
          policy->Found(&run, &block);
          model.policy().Found(&copy, &known.copy);
          policy->Touch(&block, &run);
          model.Touch(&known, &copy);
          break;
        }
        case 4:
        case 5: {
          constexpr int kPriorities[] = {0, 20, 49, 50, 51, 80, 100};
          const auto priority = static_cast<uint8_t>(kPriorities[pick(7)]);
          const bool ends = pick(2) == 0;
          const Retention retention(priority, ends ? clock.NowNs() + static_cast<int64_t>(pick(20)) * 1000 : 0);
          policy->Retain(&block, retention);
          model.Retain(&known, retention);
          break;
        }
        case 6:
          clock.AdvanceNs(static_cast<int64_t>(pick(4)) * 1000);
          break;
        case 7:
        case 8: {
          const uint32_t payer = static_cast<uint32_t>(pick(4));
          const Of which = std::array{Of::kAll, Of::kAll, Of::kKept, Of::kUnkept, Of::kLowerable}[pick(5)];
          Evictable* const next = VictimOf(*policy, payer, which);
          Model::Known* const expected = model.Next(payer, which);
          const size_t at = next == nullptr ? kBlocks : static_cast<size_t>(next - blocks.data());
          ASSERT_EQ(at, expected == nullptr ? kBlocks : static_cast<size_t>(expected - model.blocks.data()))
              << "step " << step;
          if (next != nullptr && which == Of::kLowerable) {
            policy->Remove(next);
            model.Remove(expected);
            next->bytes = expected->copy.bytes -= 30;
            next->can_lower = expected->copy.can_lower = false;
            policy->Add(next);
            model.Add(expected);
          }
          if (next == nullptr || which != Of::kAll) break;
          policy->Evicted(*next);
          model.policy().Evicted(expected->copy);
          policy->Remove(next);
          model.Remove(expected);
          break;
        }
      }
      policy->CheckInvariants();
      uint64_t kept_longer = 0;
      for (size_t each = 0; each < kBlocks; ++each) {
        ASSERT_EQ(blocks[each].evictable, model.blocks[each].evictable);
        if (blocks[each].evictable && blocks[each].retention.priority() > Retention::kOfPolicy) {
          kept_longer += blocks[each].bytes;
        }
      }
      ASSERT_EQ(policy->kept_longer().bytes, kept_longer);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, RetainingEvictionTest,
                         ::testing::Values(EvictionKind::kLru, EvictionKind::kS3Fifo, EvictionKind::kCost),
                         [](const auto& info) { return std::string(EvictionKindName(info.param)); });

}  // namespace
}  // namespace kvmanager
