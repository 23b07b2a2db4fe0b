// Each policy against a reference that is as simple as can be, over random sequences that come, go, and are evicted.
#include "kvmanager/eviction/eviction_policy.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"
#include "kvmanager/eviction/cost_eviction.h"
#include "kvmanager/eviction/evictable_queue.h"
#include "kvmanager/eviction/ladder_share.h"
#include "kvmanager/eviction/return_model.h"
#include "kvmanager/eviction/s3_fifo_eviction.h"

namespace kvmanager {
namespace {

using Of = EvictablesOf;

// What a policy is told, and asked: a list of blocks, looked at from end to end.
class Reference {
 public:
  virtual ~Reference() = default;
  virtual void Found(EvictionRun* run, Evictable* block) {}
  virtual void Named(EvictionRun* run, Evictable* block) {}
  virtual void Touch(Evictable* block, const EvictionRun* run) {}
  virtual void Evicted(Evictable* block) {}
  /// of_payer: the evictable ones of a payer that `which` says.
  virtual Evictable* Next(const std::vector<Evictable*>& of_payer, Of which) = 0;
};

class LruReference final : public Reference {
 public:
  void Touch(Evictable* block, const EvictionRun* run) override { uses_.push_back(block); }
  Evictable* Next(const std::vector<Evictable*>& of_payer, Of which) override {
    // Whose last use is furthest back.
    Evictable* next = nullptr;
    size_t least = SIZE_MAX;
    for (Evictable* const block : of_payer) {
      const size_t use = std::find(uses_.rbegin(), uses_.rend(), block).base() - uses_.begin();
      if (use < least) std::tie(next, least) = std::pair(block, use);
    }
    return next;
  }

 private:
  std::vector<Evictable*> uses_;
};

class S3FifoReference final : public Reference {
 public:
  void Found(EvictionRun* run, Evictable* block) override { frequency_[block] = std::min(frequency_[block] + 1, 3); }
  void Named(EvictionRun* run, Evictable* block) override {
    const auto ghost = std::find(ghosts_.begin(), ghosts_.end(), block->id);
    // The policy remembers as many as there are evictable blocks.
    goes_to_main_[block] = ghost != ghosts_.end() && ghosts_.end() - ghost - 1 <= *evictable_;
    if (ghost != ghosts_.end()) *ghost = 0;
    frequency_[block] = 0;
  }
  void Touch(Evictable* block, const EvictionRun* run) override {
    auto& queue = goes_to_main_[block] ? main_ : small_;
    const bool queued = std::find(small_.begin(), small_.end(), block) != small_.end() ||
                        std::find(main_.begin(), main_.end(), block) != main_.end();
    if (!queued) queue.push_back(block);
  }
  void Evicted(Evictable* block) override {
    const bool from_small = std::find(small_.begin(), small_.end(), block) != small_.end();
    // What leaves the main queue is not remembered, but is counted.
    ghosts_.push_back(from_small ? block->id : 0);
    std::erase(small_, block);
    std::erase(main_, block);
  }
  Evictable* Next(const std::vector<Evictable*>& of_payer, Of which) override {
    const auto first = [&](const std::vector<Evictable*>& queue) -> Evictable* {
      for (Evictable* const block : queue) {
        if (std::find(of_payer.begin(), of_payer.end(), block) != of_payer.end()) return block;
      }
      return nullptr;
    };
    if (of_payer.empty()) return nullptr;
    for (;;) {
      uint64_t bytes = 0, small_bytes = 0;
      for (const Evictable* const block : of_payer) {
        bytes += block->bytes;
        if (std::find(small_.begin(), small_.end(), block) != small_.end()) small_bytes += block->bytes;
      }
      bool small = small_bytes * 10 >= bytes;
      if (first(small ? small_ : main_) == nullptr) small = !small;
      Evictable* const next = first(small ? small_ : main_);
      if (frequency_[next] <= (small ? 1 : 0)) return next;
      frequency_[next] = small ? 0 : frequency_[next] - 1;
      std::erase(small_, next);
      std::erase(main_, next);
      main_.push_back(next);
    }
  }
  void SetEvictable(const int64_t* evictable) { evictable_ = evictable; }

 private:
  std::vector<Evictable*> small_, main_;  // also those in use
  std::vector<uint64_t> ghosts_;
  std::map<Evictable*, int> frequency_;
  std::map<Evictable*, bool> goes_to_main_;
  const int64_t* evictable_ = nullptr;
};

// Of all blocks the one of the least worth, and of these the least recently used. Of one kind and age the least
// recently used stands for all, whatever their bytes. Blocks of one kind and age stand for one another until 64 uses
// later: that choice is kept here, too.
class CostReference final : public Reference {
 public:
  void Found(EvictionRun* run, Evictable* block) override { Seen(run, block, true); }
  void Named(EvictionRun* run, Evictable* block) override { Seen(run, block, notes_.count(block->id) > 0); }
  void Touch(Evictable* block, const EvictionRun* run) override {
    ++uses_;
    Note& note = notes_[block->id];
    int fresh = 0;
    while ((2u << fresh) - 1 <= run->fresh) ++fresh;
    note.kind = block->index == run->last ? 0 : 1 + (run->later ? 8 : 0) + std::min(fresh, 7);
    note.from_end = run->last - block->index;
    note.at = uses_;
    model_.Drop(note.entry);
    note.entry = model_.Use(note.kind, uses_);
    if (uses_ % 64 == 0) model_.Advance(uses_);
    if (uses_ % 1024 == 0) model_.Evaluate();
  }
  Evictable* Next(const std::vector<Evictable*>& of_payer, Of which) override {
    Choice& choice = choices_[{of_payer.empty() ? 0 : of_payer[0]->payer, which}];
    Evictable* next = nullptr;
    if (uses_ < choice.until) {
      for (Evictable* const block : of_payer) {
        const Note& note = notes_[block->id];
        if (note.kind != choice.kind || note.at < choice.least || note.at > choice.most) continue;
        if (next == nullptr || note.at < notes_[next->id].at) next = block;
      }
      if (next != nullptr) return next;
    }
    double least = 0;
    std::vector<uint64_t> worth_least;  // when those were used that are worth `least`
    for (Evictable* const block : of_payer) {
      const Note& note = notes_[block->id];
      if (std::any_of(of_payer.begin(), of_payer.end(), [&](Evictable* other) { return StandsFor(other, note); })) {
        continue;
      }
      const double worth = model_.worth(note.kind, ReturnModel::AgeOf(uses_ - note.at)) *
                           static_cast<double>(block->tokens) / static_cast<double>(block->bytes);
      if (next == nullptr || worth < least) worth_least.clear();
      if (next == nullptr || worth <= least) worth_least.push_back(note.at);
      if (next == nullptr || worth < least || (worth == least && note.at < notes_[next->id].at)) {
        next = block;
        least = worth;
      }
    }
    if (next == nullptr) return nullptr;
    const Note& note = notes_[next->id];
    choice = {note.kind, note.at, uses_ - ReturnModel::LeastOf(ReturnModel::AgeOf(uses_ - note.at)),
              uses_ / 64 * 64 + 64};
    std::sort(worth_least.begin(), worth_least.end());
    if (worth_least.size() > 1) choice.most = std::min(choice.most, worth_least[1] - 1);
    return next;
  }

 private:
  struct Note {
    int kind = 0;
    uint32_t from_end = 0, entry = ReturnModel::kNoEntry;
    uint64_t at = 0;
  };
  struct Choice {
    int kind = 0;
    uint64_t least = 0, most = 0, until = 0;
  };
  bool StandsFor(Evictable* block, const Note& other) {
    const Note& note = notes_[block->id];
    return note.kind == other.kind && note.at < other.at &&
           ReturnModel::AgeOf(uses_ - note.at) == ReturnModel::AgeOf(uses_ - other.at);
  }
  void Seen(EvictionRun* run, Evictable* block, bool known) {
    ++run->blocks;
    run->last = block->index;
    if (known && run->fresh == 0) {
      run->later = block->index > 0 && notes_[block->id].from_end <= 2;
    } else {
      ++run->fresh;
    }
    if (!known) return;
    model_.Return(notes_[block->id].entry, uses_);
    notes_[block->id].entry = ReturnModel::kNoEntry;
  }

  uint64_t uses_ = 0;
  ReturnModel model_;
  std::map<uint64_t, Note> notes_;  // of blocks and of ghosts
  std::map<std::pair<uint32_t, Of>, Choice> choices_;
};

// Runs policy and reference side by side. The policy and the reference see runs of their own.
class Walk {
 public:
  Walk(EvictionKind kind, uint64_t seed) : kind_(kind), random_(seed), policy_(MakeEviction(kind)) {
    if (kind == EvictionKind::kLru) reference_ = std::make_unique<LruReference>();
    if (kind == EvictionKind::kCost) reference_ = std::make_unique<CostReference>();
    if (kind == EvictionKind::kS3Fifo) {
      auto s3 = std::make_unique<S3FifoReference>();
      s3->SetEvictable(&evictable_);
      reference_ = std::move(s3);
    }
  }

  void Step() {
    // A chain: one of the conversations, with some of its blocks and one more, now and then.
    const uint32_t chain = static_cast<uint32_t>(Below(kChains));
    auto& blocks = chains_[chain];
    if (blocks.empty() || (Below(2) == 0 && blocks.size() < 12)) {
      auto block = std::make_unique<Evictable>();
      block->id = (random_() << 1) | 1;
      block->index = static_cast<uint32_t>(blocks.size());
      block->payer = chain % kPayers;
      block->tokens = 64;
      blocks.push_back(std::move(block));
      state_[blocks.back().get()] = false;
    }
    const size_t used = 1 + Below(blocks.size());
    EvictionRun run, run_of_reference;
    for (size_t i = 0; i < used; ++i) {
      Evictable* const block = blocks[i].get();
      if (block->evictable) SetEvictable(block, false);
      if (state_[block]) {
        policy_->Found(&run, block);
        reference_->Found(&run_of_reference, block);
      } else {
        block->notes = {};
        block->kept = false;
        block->bytes = kBytes;
        block->can_lower = Below(4) != 0;
        policy_->Named(&run, block);
        reference_->Named(&run_of_reference, block);
        state_[block] = true;
      }
    }
    for (size_t i = used; i-- > 0;) {
      Evictable* const block = blocks[i].get();
      policy_->Touch(block, &run);
      reference_->Touch(block, &run_of_reference);
      SetEvictable(block, true);
    }
    if (Below(4) == 0) Keep(blocks[Below(used)].get());
    while (evictable_ > kMost) Evict();
  }
  int evictions() const { return evictions_; }
  int lowered() const { return lowered_; }

 private:
  static constexpr size_t kChains = 60, kPayers = 3;
  static constexpr uint64_t kBytes = 100, kLoweredBytes = 55;
  static constexpr int64_t kMost = 60;  // of a payer, S3-FIFO moves fewer at once than it may

  uint64_t Below(uint64_t n) { return random_() % n; }
  void SetEvictable(Evictable* block, bool evictable) {
    evictable ? policy_->Add(block) : policy_->Remove(block);
    evictable_ += evictable ? 1 : -1;
    ASSERT_EQ(block->evictable, evictable);
  }
  // As a tier does.
  void Keep(Evictable* block) {
    policy_->Remove(block);
    block->kept = !block->kept;
    policy_->Add(block);
  }
  // It keeps its place.
  void Lower(Evictable* block) {
    policy_->Remove(block);
    block->bytes = kLoweredBytes;
    block->can_lower = false;
    policy_->Add(block);
    ++lowered_;
  }
  std::vector<Evictable*> EvictableOf(uint32_t payer) {
    std::vector<Evictable*> of;
    for (const auto& [chain, blocks] : chains_) {
      for (const auto& block : blocks) {
        if (block->evictable && block->payer == payer) of.push_back(block.get());
      }
    }
    return of;
  }
  void CompareSome(const std::vector<Evictable*>& of, Of which, Evictable* next) {
    std::vector<Evictable*> some;
    std::copy_if(of.begin(), of.end(), std::back_inserter(some), [which](const Evictable* each) {
      return which == Of::kLowerable ? each->can_lower : each->kept == (which == Of::kKept);
    });
    if (kind_ == EvictionKind::kS3Fifo) {  // which one depends on the others, too
      ASSERT_EQ(next == nullptr, some.empty());
      ASSERT_TRUE(next == nullptr || std::count(some.begin(), some.end(), next) == 1);
    } else {
      ASSERT_EQ(next, reference_->Next(some, which));
    }
  }
  void Evict() {
    const uint32_t payer = static_cast<uint32_t>(Below(kPayers));
    const std::vector<Evictable*> of = EvictableOf(payer);
    Evictable* const victim = policy_->Victim(payer);
    ASSERT_EQ(victim, reference_->Next(of, Of::kAll));
    EXPECT_EQ(policy_->Victim(payer), victim);  // it stays until it is removed
    CompareSome(of, Of::kKept, policy_->KeptVictim(payer));
    CompareSome(of, Of::kUnkept, policy_->UnkeptVictim(payer));
    Evictable* const lowerable = policy_->LowerableVictim(payer);
    CompareSome(of, Of::kLowerable, lowerable);
    EXPECT_EQ(policy_->Victim(kPayers), nullptr);
    EXPECT_EQ(policy_->LowerableVictim(kPayers), nullptr);
    if (victim == nullptr) return;
    if (lowerable != nullptr && Below(3) == 0) Lower(lowerable);
    ++evictions_;
    policy_->Evicted(*victim);
    reference_->Evicted(victim);
    SetEvictable(victim, false);
    state_[victim] = false;
  }

  const EvictionKind kind_;
  std::mt19937_64 random_;
  const std::unique_ptr<EvictionPolicy> policy_;
  std::unique_ptr<Reference> reference_;
  std::map<uint32_t, std::vector<std::unique_ptr<Evictable>>> chains_;
  std::map<Evictable*, bool> state_;  // it has its name
  int64_t evictable_ = 0;
  int evictions_ = 0, lowered_ = 0;
};

class EvictionPolicyTest : public ::testing::TestWithParam<EvictionKind> {};

TEST_P(EvictionPolicyTest, IsAsItsReference) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    Walk walk(GetParam(), seed);
    for (int i = 0; i < 1500 && !HasFatalFailure(); ++i) walk.Step();
    EXPECT_GT(walk.evictions(), 500);
    EXPECT_GT(walk.lowered(), 100);
  }
}

// Blocks are lowered in the order in which they would go, and go in that order afterwards.
TEST_P(EvictionPolicyTest, ALoweredBlockKeepsItsPlace) {
  const auto policy = MakeEviction(GetParam());
  std::vector<Evictable> blocks(20);
  for (uint32_t i = 0; i < blocks.size(); ++i) {
    blocks[i].id = i + 1;
    blocks[i].bytes = 100;
    blocks[i].can_lower = i % 4 != 3;
    blocks[i].kept = i % 3 == 0;
    policy->Named(nullptr, &blocks[i]);
    policy->Touch(&blocks[i], nullptr);
    policy->Add(&blocks[i]);
  }
  for (Evictable& block : blocks) {
    if (!block.can_lower) continue;
    ASSERT_EQ(policy->LowerableVictim(0), &block);
    ASSERT_EQ(policy->Victim(0), &blocks[0]);
    policy->Remove(&block);
    block.can_lower = false;
    policy->Add(&block);
  }
  EXPECT_EQ(policy->LowerableVictim(0), nullptr);
  for (Evictable& block : blocks) {
    ASSERT_EQ(policy->Victim(0), &block);
    policy->Evicted(block);
    policy->Remove(&block);
  }
}

TEST(LadderShareTest, LowersWhileMoreThanHalfCanBe) {
  static_assert(LowersMore(51, 100) && !LowersMore(50, 100) && !LowersMore(0, 0));
  static_assert(LowersMore(26, 100, /*share=*/0.25) && !LowersMore(100, 100, /*share=*/1));
}

TEST_P(EvictionPolicyTest, TheEndOfAChainGoesFirst) {
  const auto policy = MakeEviction(GetParam());
  std::vector<Evictable> chain(20);
  EvictionRun run;
  for (uint32_t i = 0; i < chain.size(); ++i) {
    chain[i].id = i + 1;
    chain[i].index = i;
    chain[i].bytes = 10;
    policy->Named(&run, &chain[i]);
  }
  for (size_t i = chain.size(); i-- > 0;) {
    policy->Touch(&chain[i], &run);
    policy->Add(&chain[i]);
  }
  for (size_t i = chain.size(); i-- > 0;) {
    ASSERT_EQ(policy->Victim(0), &chain[i]);
    policy->Evicted(chain[i]);
    policy->Remove(&chain[i]);
  }
  EXPECT_EQ(policy->Victim(0), nullptr);
  EXPECT_EQ(policy->KeptVictim(0), nullptr);
  EXPECT_EQ(policy->UnkeptVictim(0), nullptr);
}

INSTANTIATE_TEST_SUITE_P(All, EvictionPolicyTest,
                         ::testing::Values(EvictionKind::kLru, EvictionKind::kS3Fifo, EvictionKind::kCost),
                         [](const auto& info) { return EvictionKindName(info.param); });

TEST(EvictionKindTest, Names) {
  for (const auto kind : {EvictionKind::kLru, EvictionKind::kS3Fifo, EvictionKind::kCost}) {
    EXPECT_EQ(*ParseEvictionKind("--eviction", EvictionKindName(kind)), kind);
  }
  const absl::Status refused = ParseEvictionKind("--eviction", "fifo").status();
  EXPECT_TRUE(absl::IsInvalidArgument(refused));
  EXPECT_NE(std::string(refused.message()).find("lru, s3fifo or cost"), std::string::npos) << refused;
}

}  // namespace
}  // namespace kvmanager
