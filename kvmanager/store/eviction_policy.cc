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
    if (known) KV_CHECK(blocks_.erase({block->last_use, block}) == 1);
    block->last_use = ++uses_;
    if (known) blocks_.emplace(block->last_use, block);
  }
  void Add(Block* block) override {
    KV_CHECK(!block->evictable && blocks_.emplace(block->last_use, block).second);
    block->evictable = true;
  }
  void Remove(Block* block) override {
    KV_CHECK(block->evictable && blocks_.erase({block->last_use, block}) == 1);
    block->evictable = false;
  }
  Block* Victim() const override { return blocks_.empty() ? nullptr : blocks_.begin()->second; }

 private:
  uint64_t uses_ = 0;
  std::set<std::pair<uint64_t, Block*>> blocks_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> MakeLruEviction() { return std::make_unique<LruEviction>(); }

}  // namespace kvmanager
