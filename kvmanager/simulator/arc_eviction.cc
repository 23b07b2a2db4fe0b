#include "kvmanager/simulator/arc_eviction.h"

#include <algorithm>
#include <list>

#include "absl/container/flat_hash_map.h"
#include "kvmanager/base/status.h"
#include "kvmanager/eviction/evictable_queue.h"

namespace kvmanager::simulator {
namespace {

enum List : uint8_t { kOnce = 0, kOften = 1 };

class ArcEviction final : public EvictionPolicy {
 public:
  void Found(EvictionRun* run, Evictable* block) override { Move(block, kOften); }
  void Named(EvictionRun* run, Evictable* block) override {
    ++live_[kOnce];
    block->notes.queue = kOnce;
    const auto found = where_.find(block->id);
    if (found == where_.end()) return;
    const List list = found->second.list;
    const double once = static_cast<double>(ghosts_[kOnce].size()), often = static_cast<double>(ghosts_[kOften].size());
    const double resident = static_cast<double>(live_[kOnce] + live_[kOften]);
    if (list == kOnce) {
      once_target_ = std::min(once_target_ + std::max(1.0, often / once), resident);
    } else {
      once_target_ = std::max(once_target_ - std::max(1.0, once / often), 0.0);
    }
    ghosts_[list].erase(found->second.place);
    where_.erase(found);
    Move(block, kOften);
  }
  void Touch(Evictable* block, const EvictionRun* run) override {
    const bool known = block->evictable;
    if (known) Remove(block);
    block->last_use = ++uses_;
    if (known) Add(block);
  }
  void Add(Evictable* block) override {
    lists_[block->notes.queue].Add(block->last_use, block);
    block->evictable = true;
  }
  void Remove(Evictable* block) override {
    KV_CHECK(block->evictable);
    lists_[block->notes.queue].Remove(block->last_use, block);
    block->evictable = false;
  }
  void Evicted(const Evictable& block) override {
    const List list = static_cast<List>(block.notes.queue);
    const uint64_t resident = live_[kOnce] + live_[kOften];
    --live_[list];
    ghosts_[list].push_back(block.id);
    where_[block.id] = {list, std::prev(ghosts_[list].end())};
    // All of what was used once, and all together.
    while (!ghosts_[kOnce].empty() && live_[kOnce] + ghosts_[kOnce].size() > resident) Forget(kOnce);
    while (!ghosts_[kOften].empty() && ghosts_[kOnce].size() + ghosts_[kOften].size() > resident) Forget(kOften);
  }
  Evictable* Victim(uint32_t payer) override { return Next(Of::kAll); }
  Evictable* KeptVictim(uint32_t payer) override { return Next(Of::kKept); }
  Evictable* UnkeptVictim(uint32_t payer) override { return Next(Of::kUnkept); }
  Evictable* LowerableVictim(uint32_t payer) override { return Next(Of::kLowerable); }

 private:
  using Of = EvictablesOf;
  struct Ghost {
    List list = kOnce;
    std::list<uint64_t>::iterator place;
  };
  void Move(Evictable* block, List list) {
    KV_CHECK(!block->evictable);
    --live_[block->notes.queue];
    ++live_[list];
    block->notes.queue = list;
  }
  void Forget(List list) {
    where_.erase(ghosts_[list].front());
    ghosts_[list].pop_front();
  }
  Evictable* Next(Of which) const {
    const bool once = live_[kOnce] > 0 && static_cast<double>(live_[kOnce]) > once_target_;
    Evictable* const next = lists_[once ? kOnce : kOften].First(which);
    return next != nullptr ? next : lists_[once ? kOften : kOnce].First(which);
  }

  uint64_t uses_ = 0;
  EvictableQueue lists_[2];        // by their last use
  uint64_t live_[2] = {};          // evictable or in use
  double once_target_ = 0;         // of live_[kOnce]; the paper's p
  std::list<uint64_t> ghosts_[2];  // the oldest first
  absl::flat_hash_map<uint64_t, Ghost> where_;
};

}  // namespace

std::unique_ptr<EvictionPolicy> MakeArcEviction() { return std::make_unique<ArcEviction>(); }

}  // namespace kvmanager::simulator
