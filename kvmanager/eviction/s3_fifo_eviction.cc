#include "kvmanager/eviction/s3_fifo_eviction.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "kvmanager/base/status.h"
#include "kvmanager/eviction/evictable_queue.h"
#include "kvmanager/eviction/ghost_table.h"

namespace kvmanager {
namespace {

class S3FifoEviction final : public EvictionPolicy, private S3Fifo {
 public:
  void Found(EvictionRun* run, Evictable* block) override {
    block->notes.frequency = std::min<uint8_t>(block->notes.frequency + 1, kFrequencyMax);
  }
  // The queue says that it is to enter the main queue: Touch gives it a place.
  void Named(EvictionRun* run, Evictable* block) override {
    Ghost ghost;
    // Ghosts are as many as evictable blocks: what left before that many others is forgotten.
    const bool known = ghosts_.Take(block->id, &ghost) && evicted_ - ghost.entry <= blocks_;
    block->notes.queue = known ? kMain : kSmall;
    block->notes.frequency = 0;
    block->notes.order = 0;
  }
  void Touch(Evictable* block, const EvictionRun* run) override {
    block->last_use = ++uses_;
    if (block->notes.order != 0) return;
    if (block->notes.queue == kNone) block->notes.queue = kSmall;
    const bool known = block->evictable;
    if (known) Remove(block);
    block->notes.order = ++orders_;
    if (known) Add(block);
  }
  void Add(Evictable* block) override {
    KV_CHECK(!block->evictable && block->notes.order != 0);
    Payer& payer = payers_[block->payer];
    payer.QueueOf(*block).Add(block->notes.order, block);
    payer.bytes += block->bytes;
    if (block->notes.queue == kSmall) payer.small_bytes += block->bytes;
    ++blocks_;
    block->evictable = true;
  }
  void Remove(Evictable* block) override {
    const auto of = payers_.find(block->payer);
    KV_CHECK(block->evictable && of != payers_.end());
    Payer& payer = of->second;
    payer.QueueOf(*block).Remove(block->notes.order, block);
    payer.bytes -= block->bytes;
    if (block->notes.queue == kSmall) payer.small_bytes -= block->bytes;
    --blocks_;
    block->evictable = false;
    if (payer.small.empty() && payer.main.empty()) payers_.erase(of);
  }
  void Evicted(const Evictable& block) override {
    ++evicted_;
    if (block.notes.queue == kSmall && block.id != 0) ghosts_.Put({.id = block.id, .entry = evicted_});
  }
  Evictable* Victim(uint32_t id) override {
    const auto of = payers_.find(id);
    if (of == payers_.end()) return nullptr;
    Payer& payer = of->second;
    for (int moves = 0;; ++moves) {
      Evictable* const front = payer.Front(Of::kAll);
      Evictable::Notes& notes = front->notes;
      const bool from_small = notes.queue == kSmall;
      if (moves == kMovesMax || (from_small ? notes.frequency <= 1 : notes.frequency == 0)) return front;
      payer.QueueOf(*front).Remove(notes.order, front);
      if (from_small) payer.small_bytes -= front->bytes;
      notes.frequency = from_small ? 0 : notes.frequency - 1;
      notes.queue = kMain;
      notes.order = ++orders_;
      payer.main.Add(notes.order, front);
    }
  }
  Evictable* KeptVictim(uint32_t payer) override { return Front(payer, Of::kKept); }
  Evictable* UnkeptVictim(uint32_t payer) override { return Front(payer, Of::kUnkept); }
  Evictable* LowerableVictim(uint32_t payer) override { return Front(payer, Of::kLowerable); }

 private:
  using Of = EvictablesOf;
  struct Payer {
    EvictableQueue small, main;
    uint64_t bytes = 0, small_bytes = 0;  // of both, of the first

    EvictableQueue& QueueOf(const Evictable& block) { return block.notes.queue == kSmall ? small : main; }
    Evictable* Front(Of of) const {
      const bool small_first = small_bytes * 100 >= bytes * kSmallPercent;
      Evictable* const front = (small_first ? small : main).First(of);
      return front != nullptr ? front : (small_first ? main : small).First(of);
    }
  };
  Evictable* Front(uint32_t payer, Of which) const {
    const auto of = payers_.find(payer);
    return of == payers_.end() ? nullptr : of->second.Front(which);
  }

  uint64_t uses_ = 0, orders_ = 0;
  uint32_t evicted_ = 0;  // wraps
  uint64_t blocks_ = 0;   // evictable
  GhostTable ghosts_;
  absl::flat_hash_map<uint32_t, Payer> payers_;  // who have some
};

}  // namespace

std::unique_ptr<EvictionPolicy> MakeS3FifoEviction() { return std::make_unique<S3FifoEviction>(); }

}  // namespace kvmanager
