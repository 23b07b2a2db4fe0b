#include "kvmanager/eviction/lru_eviction.h"

#include "absl/container/flat_hash_map.h"
#include "kvmanager/base/status.h"
#include "kvmanager/eviction/evictable_queue.h"

namespace kvmanager {
namespace {

class LruEviction final : public EvictionPolicy {
 public:
  void Found(EvictionRun* run, Evictable* block) override {}
  void Named(EvictionRun* run, Evictable* block) override {}
  void Touch(Evictable* block, const EvictionRun* run) override {
    const bool known = block->evictable;
    if (known) Remove(block);
    block->last_use = ++uses_;
    if (known) Add(block);
  }
  void Add(Evictable* block) override {
    KV_CHECK(!block->evictable);
    payers_[block->payer].Add(block->last_use, block);
    block->evictable = true;
  }
  void Remove(Evictable* block) override {
    const auto of = payers_.find(block->payer);
    KV_CHECK(block->evictable && of != payers_.end());
    of->second.Remove(block->last_use, block);
    block->evictable = false;
    if (of->second.empty()) payers_.erase(of);
  }
  void Evicted(const Evictable& block) override {}
  Evictable* Victim(uint32_t payer) override { return First(payer, Of::kAll); }
  Evictable* KeptVictim(uint32_t payer) override { return First(payer, Of::kKept); }
  Evictable* UnkeptVictim(uint32_t payer) override { return First(payer, Of::kUnkept); }
  Evictable* LowerableVictim(uint32_t payer) override { return First(payer, Of::kLowerable); }

 private:
  using Of = EvictablesOf;
  Evictable* First(uint32_t payer, Of which) const {
    const auto of = payers_.find(payer);
    return of == payers_.end() ? nullptr : of->second.First(which);
  }

  uint64_t uses_ = 0;
  absl::flat_hash_map<uint32_t, EvictableQueue> payers_;  // who have some; by their last use
};

}  // namespace

std::unique_ptr<EvictionPolicy> MakeLruEviction() { return std::make_unique<LruEviction>(); }

}  // namespace kvmanager
