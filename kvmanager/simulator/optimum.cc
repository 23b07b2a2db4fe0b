#include "kvmanager/simulator/optimum.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "kvmanager/base/status.h"

namespace kvmanager::simulator {
namespace {

class Optimum final : public EvictionPolicy {
 public:
  explicit Optimum(std::function<size_t(uint64_t)> next_use) : next_use_(std::move(next_use)) {}

  void Found(EvictionRun* run, Evictable* block) override {}
  void Named(EvictionRun* run, Evictable* block) override {}
  void Touch(Evictable* block, const EvictionRun* run) override {
    const bool known = block->evictable;
    if (known) Remove(block);
    block->notes.order = next_use_(block->id);
    if (known) Add(block);
  }
  void Add(Evictable* block) override {
    KV_CHECK(BlocksLike(*block).insert(KeyOf(block)).second);
    block->evictable = true;
  }
  void Remove(Evictable* block) override {
    KV_CHECK(BlocksLike(*block).erase(KeyOf(block)) == 1);
    block->evictable = false;
  }
  void Evicted(const Evictable& block) override {}
  Evictable* Victim(uint32_t payer) override {
    const bool kept = unkept_.empty() || (!kept_.empty() && *unkept_.rbegin() < *kept_.rbegin());
    return Last(kept ? kept_ : unkept_);
  }
  Evictable* KeptVictim(uint32_t payer) override { return Last(kept_); }
  Evictable* UnkeptVictim(uint32_t payer) override { return Last(unkept_); }
  Evictable* LowerableVictim(uint32_t payer) override { return nullptr; }  // its blocks have one size

 private:
  using Key = std::tuple<uint64_t, uint32_t, Evictable*>;
  static Key KeyOf(Evictable* block) { return {block->notes.order, block->index, block}; }
  static Evictable* Last(const std::set<Key>& blocks) {
    return blocks.empty() ? nullptr : std::get<Evictable*>(*blocks.rbegin());
  }

  const std::function<size_t(uint64_t)> next_use_;
  std::set<Key>& BlocksLike(const Evictable& block) { return block.kept ? kept_ : unkept_; }
  std::set<Key> kept_, unkept_;
};

}  // namespace

std::vector<size_t> NextUses(const Trace& trace) {
  std::vector<size_t> next(trace.blocks.size(), SIZE_MAX), seen(trace.distinct, SIZE_MAX);
  for (size_t i = trace.requests.size(); i-- > 0;) {
    const TraceRequest& request = trace.requests[i];
    for (size_t at = request.first; at < request.first + request.blocks; ++at) {
      next[at] = std::exchange(seen[trace.blocks[at]], i);
    }
  }
  return next;
}

std::unique_ptr<EvictionPolicy> MakeOptimum(std::function<size_t(uint64_t id)> next_use) {
  return std::make_unique<Optimum>(std::move(next_use));
}

}  // namespace kvmanager::simulator
