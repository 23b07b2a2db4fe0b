#include "kvmanager/store/tier.h"

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "kvmanager/base/status.h"
#include "kvmanager/eviction/ladder_share.h"
#include "kvmanager/memory/shown_slabs.h"

namespace kvmanager {
namespace {

// Room that can be had at once: free, or of blocks that the lower tier has, too. Below this share of the pool what
// would be evicted next is demoted, a few blocks in each call.
constexpr uint64_t kAheadShare = 8;
constexpr int kDemotionsAtOnce = 16;
constexpr uint64_t kDemotingBytesMax = uint64_t{256} << 20;
// Lowered blocks leave such a share of the slabs free. Slots of blocks that are being lowered take no more than the
// other share of the pool, but for one block. So many are evicted in a call for these slots.
constexpr uint64_t kLowerAheadShare = 32;
constexpr uint64_t kLoweringShare = 128;
constexpr int kLoweringEvictions = 4;
// Blocks that wait for the disk stay until they are there, and others that it has go for them, while they are at most
// such a share of the pool.
constexpr uint64_t kUnkeptShare = 2;

// Raw slots first, then those of each class, then activations if the cache keeps any.
using SlotsOfAll = absl::InlinedVector<SlotPool::SlotsWanted, 2 + kSlotClassesMax>;
SlotsOfAll WantedSlots(const Cache& cache, const SlotCounts& counts) {
  SlotsOfAll wanted = {{cache.raw_slot_bytes, counts.raw}};
  for (size_t i = 0; i < cache.encoded_slots.bytes.size(); ++i) {
    wanted.push_back({cache.encoded_slots.bytes[i], counts.encoded[i]});
  }
  if (cache.keeps_activations()) wanted.push_back({cache.activation_slot_bytes, counts.activations});
  return wanted;
}

// Whole slabs that a payer may still take.
uint64_t FreeBytesFor(const SlotPool& pool, PayerId payer) {
  static const PoolShares::Account kNew;
  const PoolShares::Account* const found = pool.shares().Find(payer);
  const PoolShares::Account& account = found == nullptr ? kNew : *found;
  const uint64_t free_slabs = pool.shares().UsableSlabs(pool.free_slabs(), account, account.charge);
  return std::min(free_slabs * pool.slab_bytes(), account.most_bytes - std::min(account.most_bytes, account.charge));
}

}  // namespace

Reservation::~Reservation() {
  const auto give_back = [this](const Slots& slots) {
    for (size_t i = slots.taken; i < slots.ids.size(); ++i) pool_->Free(slots.ids[i]);
  };
  give_back(raw);
  give_back(activations);
  for (const Slots& slots : encoded) give_back(slots);
}

Tier::Tier(const StoreDevice& device, std::unique_ptr<MemoryBackend> memory, Tier* lower, EvictionKind eviction,
           const Clock* clock, TierOwner* owner)
    : device_(device.ordinal),
      memory_(std::move(memory)),
      lower_(lower),
      pool_(device.pool),
      executor_(device.executor),
      epochs_(device.epochs),
      mover_(device.mover),
      owner_(owner),
      eviction_(MakeRetainingEviction(eviction, clock)) {}

bool Tier::CanReserve(const Cache& cache, const SlotCounts& counts) const {
  return pool_->CanAllocate(cache.tenant, WantedSlots(cache, counts), /*reclaim=*/true);
}

absl::Status Tier::Reserve(const Cache& cache, const SlotCounts& counts, Reservation* out) {
  if (counts.none()) return absl::OkStatus();
  const auto wanted = WantedSlots(cache, counts);
  bool lost_some = false;
  if (!pool_->CanAllocate(cache.tenant, wanted)) {
    while (owner_->GiveBackSome() && !pool_->CanAllocate(cache.tenant, wanted)) {
    }
    Collect();
    while (!pool_->CanAllocate(cache.tenant, wanted) && TakeBackSlab(pool_)) {
    }
    // A request that is refused evicts nothing, unless kernels may still read what it evicted. Then that is waited for,
    // rather than all else evicted meanwhile: what was asked for and a slab, since slots may have to be of a new one.
    uint64_t waiting_bytes_max = pool_->slab_bytes();
    for (const SlotPool::SlotsWanted& of : wanted) waiting_bytes_max = std::max(waiting_bytes_max, of.bytes * of.count);
    while (!pool_->CanAllocate(cache.tenant, wanted)) {
      if (evicted_waiting_bytes() >= waiting_bytes_max || !CanReserve(cache, counts)) {
        return owner_->Exhausted(cache, counts);
      }
      const std::optional<PayerId> payer = pool_->NextToGive(cache.tenant, wanted, [this](PayerId each) {
        return eviction_->Victim(each) != nullptr || owner_->HasUnclaimed(*this, each);
      });
      // Small slabs of others may join to a slab, and then serve otherwise than was counted.
      if (!payer.has_value()) return owner_->Exhausted(cache, counts);
      if (owner_->GiveUpUnclaimed(*this, *payer)) continue;
      Block* victim = NextToEvict(*payer, cache, counts);
      // What the lower tier has, too, goes at once; the rest goes there first, and that is waited for likewise. A disk
      // is not waited for: what it has not taken by now is lost.
      if (can_move()) {
        if (!victim->kept && bytes_.demoting >= waiting_bytes_max) return owner_->Exhausted(cache, counts);
        if (owner_->Demote(victim)) victim = nullptr;
      }
      if (victim != nullptr) {
        lost_some |= !victim->kept;
        owner_->Evict(victim, cache);
      }
      Collect();
    }
  }
  KV_RETURN_IF_ERROR(Take(cache, counts, out));
  DemoteAhead(lost_some);
  LowerAhead(cache);
  return absl::OkStatus();
}

bool Tier::ReserveFree(const Cache& cache, const SlotCounts& counts, Reservation* out) {
  // Raw pages need slabs, too: to empty one, much would be evicted.
  const bool raw_lacks = pool_->free_slots(cache.tenant, cache.raw_slot_bytes) == 0;
  const uint64_t kept_slabs = std::max<uint64_t>(pool_->slabs() / kLowerAheadShare, raw_lacks ? 1 : 0);
  if (LacksEncoded(cache, counts) && pool_->free_slabs() <= kept_slabs) return false;
  return pool_->CanAllocate(cache.tenant, WantedSlots(cache, counts)) && Take(cache, counts, out).ok();
}

absl::Status Tier::Take(const Cache& cache, const SlotCounts& counts, Reservation* out) {
  const auto wanted = WantedSlots(cache, counts);
  const auto allocate = [&](const SlotPool::SlotsWanted& of, Reservation::Slots* slots) -> absl::Status {
    slots->ids.reserve(of.count);
    for (uint64_t i = 0; i < of.count; ++i) {
      KV_ASSIGN_OR_RETURN(const PageId slot, pool_->Allocate(cache.tenant, of.bytes, out->uncleaned()));
      slots->ids.push_back(slot);
    }
    return absl::OkStatus();
  };
  // Fails only where a GPU's slab cannot be cleaned; what was taken goes back with `out`.
  KV_RETURN_IF_ERROR(allocate(wanted[0], &out->raw));
  for (size_t i = 0; i < cache.encoded_slots.bytes.size(); ++i) {
    KV_RETURN_IF_ERROR(allocate(wanted[1 + i], &out->encoded[i]));
  }
  if (counts.activations > 0) KV_RETURN_IF_ERROR(allocate(wanted.back(), &out->activations));
  return absl::OkStatus();
}

void Tier::Free(PageId slot) {
  if (epochs_ != nullptr) {
    epochs_->Retire(slot);
    ++retired_;
    return;
  }
  pool_->Free(slot);
  owner_->OnRoomIn(*this);
}

void Tier::Collect() {
  if (epochs_ == nullptr) return;
  reusable_.clear();
  epochs_->Collect(&reusable_);
  for (const PageId slot : reusable_) pool_->Free(slot);
}

void Tier::AddEvictable(Block* block) {
  block->can_lower = owner_->CanLower(*block);
  eviction_->Add(block);
  bytes_.evictable += block->bytes;
  if (block->kept) bytes_.kept += block->bytes;
  if (block->HasRungs()) {
    LadderBytes& ladder = bytes_.ladders[block->payer];
    ladder.all += block->bytes;
    if (block->can_lower) ladder.lowerable += block->bytes;
  }
  SetReclaimable(*block, true);
  owner_->OnRoomIn(*this);
}

void Tier::RemoveEvictable(Block* block) {
  eviction_->Remove(block);
  bytes_.evictable -= block->bytes;
  if (block->kept) bytes_.kept -= block->bytes;
  if (block->HasRungs()) {
    const auto of = bytes_.ladders.find(block->payer);
    of->second.all -= block->bytes;
    if (block->can_lower) of->second.lowerable -= block->bytes;
    if (of->second.all == 0) bytes_.ladders.erase(of);
  }
  SetReclaimable(*block, false);
}

void Tier::SetKept(Block* block, bool kept) {
  if (block->kept == kept) return;
  const bool evictable = block->evictable;
  if (evictable) RemoveEvictable(block);
  block->kept = kept;
  if (evictable) AddEvictable(block);
}

void Tier::SetReclaimable(const Block& block, bool reclaimable) {
  for (const Page page : block.all_pages.all()) {
    for (const PageId slot : {page.raw, page.encoded}) {
      if (slot.valid()) pool_->SetReclaimable(slot, reclaimable);
    }
  }
}

// Whether encoded pages lack slots.
bool Tier::LacksEncoded(const Cache& cache, const SlotCounts& wanted) const {
  for (size_t i = 0; i < cache.encoded_slots.bytes.size(); ++i) {
    if (wanted.encoded[i] > pool_->free_slots(cache.tenant, cache.encoded_slots.bytes[i])) return true;
  }
  return false;
}

// What the disk has, too, can be read again; what it has not yet would be lost: others go for it, but for what a client
// wants to be kept longer. What is to go early goes, written or not.
Block* Tier::NextToEvict(PayerId payer, const Cache& taker, const SlotCounts& wanted) const {
  Evictable* next = eviction_->Victim(payer);
  // Where lowering has not kept up: what was lowered has slots of another size.
  if (next != nullptr && taker.rungs() > 1 && static_cast<Block*>(next)->rung() > 0 && LacksEncoded(taker, wanted)) {
    Evictable* const upper = eviction_->LowerableVictim(payer);
    if (upper != nullptr && static_cast<Block*>(upper)->cache == &taker) next = upper;
  }
  const auto waits_for_disk = [&] {
    return !next->kept && static_cast<Block*>(next)->rung() == 0 &&
           next->retention.priority() >= Retention::kOfPolicy && owner_->WritesSoon(*this) &&
           bytes_.evictable - bytes_.kept <= pool_->capacity_bytes() / kUnkeptShare;
  };
  if (next == nullptr || !waits_for_disk()) return static_cast<Block*>(next);
  Evictable* const kept = eviction_->KeptVictim(payer);
  const bool goes_for_it = kept != nullptr && kept->retention.priority() <= Retention::kOfPolicy;
  return static_cast<Block*>(goes_for_it ? kept : next);
}

// Of whoever has most beyond its guarantee: who would give next, whoever asks.
Block* Tier::NextToDemote() const {
  const PoolShares::ByExcess& payers = pool_->shares().by_excess();
  for (auto each = payers.rbegin(); each != payers.rend(); ++each) {
    if (Evictable* const next = eviction_->UnkeptVictim(each->second->payer)) return static_cast<Block*>(next);
  }
  return nullptr;
}

Block* Tier::NextToLower(const Cache& taker, bool of_others) const {
  const auto of = [this](PayerId payer) -> Block* {
    const auto ladder = bytes_.ladders.find(payer);
    if (ladder == bytes_.ladders.end()) return nullptr;
    // Of what ladders have and may still have. In a full pool it would be too late: lowering blocks here and there
    // frees slots of the first rung, and no slab for the next.
    const uint64_t bytes = ladder->second.all + FreeBytesFor(*pool_, payer);
    return LowersMore(ladder->second.lowerable, bytes) ? static_cast<Block*>(eviction_->LowerableVictim(payer))
                                                       : nullptr;
  };
  if (Block* const own = of(taker.payer)) return own;
  const PoolShares::Account* const account = pool_->shares().Find(taker.payer);
  if (!of_others || account == nullptr || account->charge >= account->most_bytes) return nullptr;
  // Of those who have more beyond their guarantees, as NextToGive has it.
  const PoolShares::ByExcess& payers = pool_->shares().by_excess();
  for (auto each = payers.rbegin(); each != payers.rend() && each->first > account->excess(); ++each) {
    if (Block* const next = of(each->second->payer)) return next;
  }
  return nullptr;
}

void Tier::LowerAhead(const Cache& taker) {
  if (bytes_.ladders.empty()) return;
  const uint64_t capacity = pool_->capacity_bytes();
  const uint64_t least = std::max(capacity / kLowerAheadShare, 2 * pool_->slab_bytes());
  int evictions = kLoweringEvictions;
  while (bytes_.lowering <= capacity / kLoweringShare) {
    const bool of_others = pool_->free_slabs() * pool_->slab_bytes() < least;
    Block* const next = NextToLower(taker, of_others);
    if (next == nullptr) return;
    if (owner_->Lower(next)) continue;
    if (evictions-- == 0) return;
    // What is colder was lowered before, and has the slots that it needs. If nothing was, since the pool became full
    // of pages in use, some of the first rung goes until there is a slab for the next.
    Block* const victim = NextToEvict(next->payer, *next->cache, {});
    if (victim == nullptr || victim->cache != next->cache || (victim->can_lower && bytes_.lowering > 0)) return;
    owner_->Evict(victim, taker);
  }
}

void Tier::DemoteAhead(bool is_late) {
  if (!owner_->CanDemote(*this)) return;
  const uint64_t capacity = pool_->capacity_bytes();
  for (int i = 0; i < kDemotionsAtOnce && bytes_.demoting < kDemotingBytesMax; ++i) {
    const uint64_t soon = capacity - pool_->slot_bytes_used() + bytes_.kept + bytes_.demoting;
    if (!is_late && soon >= capacity / kAheadShare) return;
    Block* const next = NextToDemote();
    if (next == nullptr || (!owner_->Demote(next) && !next->kept)) return;
  }
}

void ShowHostUse(const Tier& host, StoreMetrics* metrics) {
  metrics->pool_used_bytes.Set(static_cast<double>(host.pool()->used_bytes()));
  metrics->evictable_bytes.Set(static_cast<double>(host.bytes().evictable + host.bytes().unclaimed));
}

}  // namespace kvmanager
