#include "kvmanager/store/eviction_policy.h"

#include <set>
#include <utility>

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
    KV_CHECK(!block->evictable && blocks_.emplace(block->last_use, block).second);
    if (!block->kept) unkept_.emplace(block->last_use, block);
    block->evictable = true;
  }
  void Remove(Block* block) override {
    KV_CHECK(block->evictable && blocks_.erase({block->last_use, block}) == 1);
    KV_CHECK(unkept_.erase({block->last_use, block}) == (block->kept ? 0 : 1));
    block->evictable = false;
  }
  Block* Victim() const override { return First(blocks_); }
  Block* UnkeptVictim() const override { return First(unkept_); }

 private:
  using Blocks = std::set<std::pair<uint64_t, Block*>>;
  static Block* First(const Blocks& blocks) { return blocks.empty() ? nullptr : blocks.begin()->second; }

  uint64_t uses_ = 0;
  Blocks blocks_, unkept_;  // evictable ones, by their last use
};

}  // namespace

std::unique_ptr<EvictionPolicy> MakeLruEviction() { return std::make_unique<LruEviction>(); }

}  // namespace kvmanager
