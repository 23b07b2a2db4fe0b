#include "kvmanager/store/eviction_policy.h"

#include <set>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

class LruEviction final : public EvictionPolicy {
 public:
  void Touch(Block* block) override {
    const bool known = block->evictable;
    if (known) Remove(block);
    block->last_use = ++uses_;
    if (known) Add(block);
  }
  void Add(Block* block) override {
    Evictable& of = payers_[block->payer];
    KV_CHECK(!block->evictable && of.blocks.emplace(block->last_use, block).second);
    if (!block->kept) of.unkept.emplace(block->last_use, block);
    block->evictable = true;
  }
  void Remove(Block* block) override {
    const auto of = payers_.find(block->payer);
    KV_CHECK(of != payers_.end());
    KV_CHECK(block->evictable && of->second.blocks.erase({block->last_use, block}) == 1);
    KV_CHECK(of->second.unkept.erase({block->last_use, block}) == (block->kept ? 0 : 1));
    block->evictable = false;
    if (of->second.blocks.empty()) payers_.erase(of);
  }
  Block* Victim(PayerId payer) const override {
    const auto of = payers_.find(payer);
    return of == payers_.end() ? nullptr : First(of->second.blocks);
  }
  Block* UnkeptVictim(PayerId payer) const override {
    const auto of = payers_.find(payer);
    return of == payers_.end() ? nullptr : First(of->second.unkept);
  }

 private:
  using Blocks = std::set<std::pair<uint64_t, Block*>>;
  struct Evictable {
    Blocks blocks, unkept;  // by their last use
  };
  static Block* First(const Blocks& blocks) { return blocks.empty() ? nullptr : blocks.begin()->second; }

  uint64_t uses_ = 0;
  absl::flat_hash_map<PayerId, Evictable> payers_;  // who have some
};

}  // namespace

std::unique_ptr<EvictionPolicy> MakeLruEviction() { return std::make_unique<LruEviction>(); }

}  // namespace kvmanager
