#include "kvmanager/eviction/cost_eviction.h"

#include <algorithm>
#include <array>
#include <bit>

#include "absl/container/node_hash_map.h"
#include "kvmanager/base/status.h"
#include "kvmanager/eviction/evictable_queue.h"
#include "kvmanager/eviction/return_model.h"

namespace kvmanager {
namespace {

// A run goes on where another had ended if it has all but its last blocks, so many at most.
constexpr uint8_t kEndBlocks = 2;
constexpr int kFreshClasses = 8;  // 0, 1, 3, 7, ... fresh blocks or more
constexpr int kKindOfLast = 0;
static_assert(1 + 2 * kFreshClasses == ReturnModel::kKinds);
// A choice of kind and age serves for so many uses.
constexpr uint64_t kChooseEvery = ReturnModel::kAdvanceEvery;
constexpr size_t kIdlePayersMax = 64;

int KindOf(const EvictionRun& run, uint32_t index) {
  if (index == run.last) return kKindOfLast;
  const int fresh = std::min(static_cast<int>(std::bit_width(run.fresh + 1)) - 1, kFreshClasses - 1);
  return 1 + (run.later ? kFreshClasses : 0) + fresh;
}

class CostEviction final : public CostEvictionPolicy {
 public:
  explicit CostEviction(const CostEvictionOptions& options) : options_(options), ghosts_(options.ghosts) {}

  void Found(EvictionRun* run, Evictable* block) override {
    model_.Return(block->notes.entry, uses_);
    block->notes.entry = ReturnModel::kNoEntry;
    if (run != nullptr) Join(run, *block, /*known=*/true, block->notes.from_end);
  }
  void Named(EvictionRun* run, Evictable* block) override {
    Ghost ghost;
    const bool known = ghosts_.Take(block->id, &ghost);
    if (known) model_.Return(ghost.entry, uses_);
    if (run != nullptr) Join(run, *block, known, ghost.from_end);
  }
  void Touch(Evictable* block, const EvictionRun* run) override {
    const bool known = block->evictable;
    if (known) Remove(block);
    block->last_use = ++uses_;
    Evictable::Notes& notes = block->notes;
    if (run != nullptr && (run->blocks == 0 || block->index > run->last)) run = nullptr;
    if (run != nullptr) {
      notes.kind = static_cast<uint8_t>(KindOf(*run, block->index));
      notes.from_end = static_cast<uint8_t>(std::min<uint32_t>(run->last - block->index, UINT8_MAX));
    }
    if (run != nullptr || notes.entry == ReturnModel::kNoEntry) {
      model_.Drop(notes.entry);
      notes.entry = model_.Use(notes.kind, uses_);
    }
    if (known) Add(block);
    if (uses_ % ReturnModel::kAdvanceEvery == 0) model_.Advance(uses_);
    if (uses_ % ReturnModel::kEvaluateEvery == 0) model_.Evaluate();
  }
  void Add(Evictable* block) override {
    KV_CHECK(!block->evictable);
    Payer& payer = payers_[block->payer];
    ++payer.blocks;
    payer.kinds[block->notes.kind].Add(block->last_use, block);
    block->evictable = true;
  }
  void Remove(Evictable* block) override {
    const auto of = payers_.find(block->payer);
    KV_CHECK(block->evictable && of != payers_.end());
    of->second.kinds[block->notes.kind].Remove(block->last_use, block);
    block->evictable = false;
    if (--of->second.blocks == 0 && payers_.size() > kIdlePayersMax) payers_.erase(of);
  }
  void Evicted(const Evictable& block) override {
    if (block.id == 0) return;
    const Ghost lost = ghosts_.Put({.id = block.id, .entry = block.notes.entry, .from_end = block.notes.from_end});
    if (lost.id != 0) model_.Drop(lost.entry);
  }
  Evictable* Victim(uint32_t payer) override { return Next(payer, Of::kAll); }
  Evictable* KeptVictim(uint32_t payer) override { return Next(payer, Of::kKept); }
  Evictable* UnkeptVictim(uint32_t payer) override { return Next(payer, Of::kUnkept); }
  Evictable* LowerableVictim(uint32_t payer) override { return Next(payer, Of::kLowerable); }
  uint64_t uses() const override { return uses_; }
  double ChanceOf(const Evictable& block, uint64_t uses) const override {
    const uint64_t waited = uses_ - block.last_use;
    double stays = 1;
    for (int age = ReturnModel::AgeOf(waited); age + 1 < ReturnModel::kAges; ++age) {
      if (ReturnModel::LeastOf(age) >= waited + uses) break;
      stays *= 1 - model_.hazard(block.notes.kind, age);
    }
    return 1 - stays;
  }

 private:
  using Of = EvictablesOf;
  // A kind, and the last uses of an age: until it is chosen anew.
  struct Choice {
    uint64_t least_use = 0, most_use = 0;
    uint64_t until = 0;  // uses; 0: nothing is chosen
    int kind = 0;
  };
  struct Payer {
    std::array<EvictableQueue, ReturnModel::kKinds> kinds;
    std::array<Choice, kEvictablesOf> choices;
    size_t blocks = 0;
  };

  // The run has one more block; known: the policy had it, from_end blocks before the end of that run.
  static void Join(EvictionRun* run, const Evictable& block, bool known, uint8_t from_end) {
    ++run->blocks;
    run->last = std::max(run->last, block.index);
    if (!known || run->fresh > 0) {
      ++run->fresh;
    } else {
      // The first block alone says nothing: many sequences share it.
      run->later = block.index > 0 && from_end <= kEndBlocks;
    }
  }
  double WorthOf(const Evictable& block, int age) const {
    const double position = static_cast<double>(block.index) * block.tokens;
    const double cost = (1 + position / options_.equal_cost_tokens) * std::max(block.tokens, 1u);
    return model_.worth(block.notes.kind, age) * cost / static_cast<double>(std::max<uint64_t>(block.bytes, 1));
  }
  Evictable* Next(uint32_t id, Of which) {
    const auto of = payers_.find(id);
    if (of == payers_.end() || of->second.blocks == 0) return nullptr;
    Choice& choice = of->second.choices[static_cast<size_t>(which)];
    if (uses_ < choice.until) {
      Evictable* const next = of->second.kinds[choice.kind].First(which, choice.least_use);
      if (next != nullptr && next->last_use <= choice.most_use) return next;
    }
    return Choose(of->second, which, &choice);
  }
  // Of each kind and age that has some, the first stands for all. Of those that are worth the same the one used longest
  // ago goes first, so a choice serves until the next of them has been waiting for longer.
  Evictable* Choose(const Payer& payer, Of which, Choice* choice) const {
    Evictable* best = nullptr;
    double least_worth = 0;
    uint64_t rival = UINT64_MAX;  // the last use of the next that is worth the same
    for (int kind = 0; kind < ReturnModel::kKinds; ++kind) {
      Evictable* block = payer.kinds[kind].First(which);
      while (block != nullptr) {
        const int age = ReturnModel::AgeOf(uses_ - block->last_use);
        const uint64_t most_use = uses_ - ReturnModel::LeastOf(age);
        const double worth = WorthOf(*block, age);
        const bool ties = best != nullptr && worth == least_worth;
        if (best == nullptr || worth < least_worth || (ties && block->last_use < best->last_use)) {
          rival = ties ? best->last_use : UINT64_MAX;
          best = block;
          least_worth = worth;
          *choice = {block->last_use, most_use, uses_ / kChooseEvery * kChooseEvery + kChooseEvery, kind};
        } else if (ties) {
          rival = std::min(rival, block->last_use);
        }
        block = payer.kinds[kind].First(which, most_use + 1);
      }
    }
    choice->most_use = std::min(choice->most_use, rival - 1);
    return best;
  }

  const CostEvictionOptions options_;
  uint64_t uses_ = 0;
  ReturnModel model_;
  GhostTable ghosts_;
  absl::node_hash_map<uint32_t, Payer> payers_;  // who have some, and few others
};

}  // namespace

std::unique_ptr<CostEvictionPolicy> MakeCostEviction(const CostEvictionOptions& options) {
  return std::make_unique<CostEviction>(options);
}

}  // namespace kvmanager
