// Blocks and slots: every transition of a page, holders, pins, names and eviction.
#include <algorithm>

#include "absl/container/inlined_vector.h"
#include "kvmanager/base/checksum.h"
#include "kvmanager/base/tenant_label.h"
#include "kvmanager/store/page_store_impl.h"

namespace kvmanager {
namespace {

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

}  // namespace

Reservation::~Reservation() {
  const auto give_back = [this](const Slots& slots) {
    for (size_t i = slots.taken; i < slots.ids.size(); ++i) pool_->Free(slots.ids[i]);
  };
  give_back(raw);
  give_back(activations);
  for (const Slots& slots : encoded) give_back(slots);
}

Block* PageStoreImpl::NewBlock(const std::shared_ptr<Cache>& cache, uint32_t index) {
  auto owned = std::make_unique<Block>();
  Block* block = owned.get();
  block->cache = cache;
  block->index = index;
  block->pages.resize(cache->layers());
  if (cache->keeps_activations()) block->activations.resize(cache->layers());
  block->holders = 1;
  blocks_.emplace(block, std::move(owned));
  return block;
}

void PageStoreImpl::Apply(PageRef ref, PageEvent event, const PageChange& after) {
  Block& block = *ref.block;
  Cache& cache = *block.cache;
  Page& page = ref.page();
  const PageId old_raw = page.raw, old_encoded = page.encoded;
  const bool was_live = page.state != PageState::kFree;
  const bool activations = ref.kind == PageKind::kActivations;
  const FormBytes slot_bytes = cache.slot_bytes(ref.layer, ref.kind);
  uint64_t& raw_bytes = activations ? cache.activation_bytes : cache.raw_bytes;
  uint64_t& encoded_bytes = activations ? cache.activation_bytes : cache.encoded_bytes;
  block.bytes -= slot_bytes.Of(page.raw, page.encoded);
  if (page.raw.valid()) raw_bytes -= slot_bytes.raw;
  if (page.encoded.valid()) encoded_bytes -= slot_bytes.encoded;
  ApplyTransition(page, event, after, slot_bytes, activations ? *cache.activation_gauges : *cache.gauges);
  block.bytes += slot_bytes.Of(page.raw, page.encoded);
  if (page.raw.valid()) raw_bytes += slot_bytes.raw;
  if (page.encoded.valid()) encoded_bytes += slot_bytes.encoded;
  block.live_pages += (page.state != PageState::kFree) - was_live;
  // Slots that the page named and names no more, in either form, go back.
  for (const PageId& slot : {old_raw, old_encoded}) {
    if (slot.valid() && slot != page.raw && slot != page.encoded) FreeSlot(*cache.tier, slot);
  }
  metrics_->pool_used_bytes.Set(static_cast<double>(tiers_[0]->pool->used_bytes()));
}

void PageStoreImpl::FreeSlot(Tier& tier, PageId slot) {
  if (tier.epochs == nullptr) {
    tier.pool->Free(slot);
    return NoteRoom(tier);
  }
  tier.epochs->Retire(slot);
  ++tier.retired;
}

void PageStoreImpl::NoteRoom(const Tier& tier) {
  if (on_room_ == nullptr || &tier != tiers_[0].get()) return;
  absl::AnyInvocable<void()> fn = std::move(on_room_);
  on_room_ = nullptr;
  fn();
}

void PageStoreImpl::Collect(Tier& tier) {
  if (tier.epochs == nullptr) return;
  tier.reusable.clear();
  tier.epochs->Collect(&tier.reusable);
  for (const PageId slot : tier.reusable) tier.pool->Free(slot);
}

bool PageStoreImpl::AwaitsRelease(int device) const {
  for (const auto& tier : tiers_) {
    if (tier->device == device) return AwaitsRelease(*tier);
  }
  return false;
}

bool PageStoreImpl::AwaitsRelease(const Tier& tier) {
  return tier.epochs != nullptr && (tier.epochs->retired_slots() > 0 || tier.demoting_bytes > 0);
}

const uint8_t* PageStoreImpl::RawData(const Cache& cache, const Page& page) {
  if (page.raw.valid()) return Data(cache, page.raw);
  return cache.identity() && page.encoded.valid() ? Data(cache, page.encoded) : nullptr;
}

void PageStoreImpl::CopyOpen(const Cache& cache, uint32_t layer, const Page& from, PageId to, int tokens,
                             std::vector<OpenCopy>* copies) {
  if (cache.on_device()) {
    copies->push_back({layer, from.raw.valid() ? from.raw : from.encoded, to, tokens});
  } else {
    CopyRawPrefix(cache.layout(), RawData(cache, from), Data(cache, to), tokens);
  }
}

absl::Status PageStoreImpl::Exhausted(const Cache& cache, const SlotCounts& counts) const {
  if (!AwaitsRelease(*cache.tier)) metrics_->exhausted.Increment();  // else whoever asks may ask again
  std::string wanted;
  const auto add = [&wanted](size_t count, uint64_t bytes) {
    if (count > 0) absl::StrAppend(&wanted, wanted.empty() ? "" : " and ", count, " slots of ", bytes);
  };
  add(counts.raw, cache.raw_slot_bytes);
  for (size_t i = 0; i < cache.encoded_slots.bytes.size(); ++i) add(counts.encoded[i], cache.encoded_slots.bytes[i]);
  add(counts.activations, cache.activation_slot_bytes);
  std::string holders;
  for (const HolderInfo& holder : LargestHolders(kHoldersNamed, cache.tier)) {
    absl::StrAppend(&holders, holders.empty() ? "" : ", ", holder.what, " ", holder.bytes);
  }
  const SlotPool& pool = *cache.tier->pool;
  const uint64_t retired = cache.tier->epochs == nullptr ? 0 : cache.tier->epochs->retired_slots();
  return FieldError(
      absl::StatusCode::kResourceExhausted, pool.limit(),
      absl::StrCat(pool.used_bytes(), " used, and ", wanted, " wanted by tenant ", TenantLabel(cache.config.tenant)),
      absl::StrCat(
          "at most ", pool.capacity_bytes(), " in slabs of ", pool.slab_bytes(), ", ", pool.free_slabs(),
          " of them free, each of one tenant and slot size; ", cache.tier->evictable_bytes,
          " could be evicted, but would not make room",
          retired == 0 ? "" : absl::StrCat(" before kernels have done with ", retired, " slots that were given up"),
          "; largest holders: ", holders.empty() ? "none" : holders));
}

bool PageStoreImpl::CanReserve(const Cache& cache, const SlotCounts& counts) {
  return cache.tier->pool->CanAllocate(cache.tenant, WantedSlots(cache, counts), /*reclaim=*/true);
}

absl::Status PageStoreImpl::Reserve(const Cache& cache, const SlotCounts& counts, Reservation* out) {
  if (counts.none()) return absl::OkStatus();
  const auto wanted = WantedSlots(cache, counts);
  Tier& tier = *cache.tier;
  SlotPool& pool = *tier.pool;
  if (!pool.CanAllocate(cache.tenant, wanted)) {
    Collect(tier);
    // A request that is refused evicts nothing, unless kernels may still read what it evicted. Then that is waited for,
    // rather than all else evicted meanwhile: what was asked for and a slab, since slots may have to be of a new one.
    uint64_t waiting_bytes_max = pool.slab_bytes();
    for (const SlotPool::SlotsWanted& of : wanted) waiting_bytes_max = std::max(waiting_bytes_max, of.bytes * of.count);
    while (!pool.CanAllocate(cache.tenant, wanted)) {
      if (tier.evicted_waiting_bytes() >= waiting_bytes_max ||
          !pool.CanAllocate(cache.tenant, wanted, /*reclaim=*/true)) {
        return Exhausted(cache, counts);
      }
      Block* const victim = tier.eviction->Victim();
      KV_CHECK(victim != nullptr);
      // What the host has, too, goes at once; the rest goes there first, and that is waited for likewise.
      if (!victim->kept && tier.demoting_bytes >= waiting_bytes_max) return Exhausted(cache, counts);
      if (!Demote(victim)) Evict(victim);
      Collect(tier);
    }
  }
  const auto allocate = [&](const SlotPool::SlotsWanted& of, Reservation::Slots* slots) -> absl::Status {
    slots->ids.reserve(of.count);
    for (uint64_t i = 0; i < of.count; ++i) {
      KV_ASSIGN_OR_RETURN(const PageId slot, pool.Allocate(cache.tenant, of.bytes));
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
  DemoteAhead(tier);
  return absl::OkStatus();
}

void PageStoreImpl::Hold(Block* block) {
  ++block->holders;
  MakeUnevictable(block);
}

void PageStoreImpl::Release(Block* block) {
  KV_CHECK(block->holders > 0);
  if (--block->holders > 0) return;
  if (!block->published) return Dispose(block);
  block->cache->tier->eviction->Touch(block);
  block->last_use_ns = clock_->NowNs();
  MakeEvictableIfUnused(block);
}

void PageStoreImpl::Attach(Sequence& sequence, Block* block) {
  const uint32_t index = static_cast<uint32_t>(sequence.blocks.size());
  KV_CHECK(block->index == index);
  MakeUnevictable(block);
  sequence.blocks.push_back(block);
  for (uint32_t layer = 0; layer < block->pages.size(); ++layer) {
    if (sequence.HoldsRaw(index, layer)) ++block->pages[layer].raw_holds;
    if (block->pages[layer].state != PageState::kFree) NoteChange(sequence, layer, index);
  }
}

void PageStoreImpl::DetachLast(Sequence& sequence) {
  Block* block = sequence.blocks.back();
  for (uint32_t layer = 0; layer < block->pages.size(); ++layer) {
    if (sequence.HoldsRaw(block->index, layer)) DropRawHold({block, layer});
  }
  sequence.blocks.pop_back();
  Release(block);
}

void PageStoreImpl::DropRawHold(PageRef ref) {
  KV_CHECK(ref.page().raw_holds > 0);
  --ref.page().raw_holds;
  ReleaseRawIfUnused(ref);
}

void PageStoreImpl::DropOpenActivations(PageRef keys_values) {
  const PageRef ref{keys_values.block, keys_values.layer, PageKind::kActivations};
  if (!ref.block->activations.empty() && ref.page().state == PageState::kFilling) Apply(ref, PageEvent::kFree, {});
}

void PageStoreImpl::Age(Sequence& sequence, uint32_t layer, uint64_t position) {
  const Cache& cache = *sequence.cache;
  const uint32_t aged = AgedPages(position, cache.page_tokens(), cache.config.lag_pages);
  while (sequence.aged[layer] < aged) {
    Block* block = sequence.blocks[sequence.aged[layer]];
    ++sequence.aged[layer];
    DropRawHold({block, layer});
  }
}

void PageStoreImpl::ReleaseRawIfUnused(PageRef ref) {
  const Page& page = ref.page();
  if (page.state != PageState::kResident || page.declined || !page.raw.valid()) return;
  if (page.raw_holds > 0 || page.pins > page.encoded_pins) return;
  Apply(ref, PageEvent::kReleaseRaw, {PageId(), page.encoded, false, page.checksum});
}

void PageStoreImpl::Pin(PageRef ref) {
  ++ref.page().pins;
  ++ref.block->pins;
  MakeUnevictable(ref.block);
}

void PageStoreImpl::Unpin(PageRef ref) {
  Block* block = ref.block;
  Page& page = ref.page();
  KV_CHECK(page.pins > 0);
  --page.pins;
  --block->pins;
  if (page.state == PageState::kQuarantined) {
    if (page.pins == 0 && !page.busy) FreePage(ref);
    return;
  }
  ReleaseRawIfUnused(ref);
  MakeEvictableIfUnused(block);
}

void PageStoreImpl::PinEncoded(PageRef ref) {
  ++ref.page().encoded_pins;
  Pin(ref);
}

void PageStoreImpl::UnpinEncoded(PageRef ref) {
  KV_CHECK(ref.page().encoded_pins > 0);
  --ref.page().encoded_pins;
  Unpin(ref);
}

void PageStoreImpl::MakeEvictableIfUnused(Block* block) {
  if (block->evictable || !block->published || block->holders > 0 || block->pins > 0 || block->jobs > 0) return;
  Tier& tier = *block->cache->tier;
  tier.eviction->Add(block);
  tier.evictable_bytes += block->bytes;
  if (block->kept) tier.kept_bytes += block->bytes;
  SetReclaimable(*block, true);
  metrics_->evictable_bytes.Set(static_cast<double>(tiers_[0]->evictable_bytes));
  NoteRoom(tier);
}

void PageStoreImpl::MakeUnevictable(Block* block) {
  if (!block->evictable) return;
  Tier& tier = *block->cache->tier;
  tier.eviction->Remove(block);
  tier.evictable_bytes -= block->bytes;
  if (block->kept) tier.kept_bytes -= block->bytes;
  SetReclaimable(*block, false);
  metrics_->evictable_bytes.Set(static_cast<double>(tiers_[0]->evictable_bytes));
}

void PageStoreImpl::SetReclaimable(const Block& block, bool reclaimable) {
  for (const auto* pages : {&block.pages, &block.activations}) {
    for (const Page& page : *pages) {
      for (const PageId slot : {page.raw, page.encoded}) {
        if (slot.valid()) block.cache->tier->pool->SetReclaimable(slot, reclaimable);
      }
    }
  }
}

void PageStoreImpl::Evict(Block* block) {
  metrics_->evicted_blocks.Increment();
  metrics_->evicted_bytes.Increment(static_cast<double>(block->bytes));
  metrics_->evicted_idle_seconds.Observe(static_cast<double>(clock_->NowNs() - block->last_use_ns) * 1e-9);
  Tier& tier = *block->cache->tier;
  tier.evicted_bytes = tier.evicted_waiting_bytes() + block->bytes;
  Unname(block);
  tier.evicted_until = tier.retired;
}

void PageStoreImpl::Unname(Block* block) {
  MakeUnevictable(block);
  block->cache->table.Erase(block);
  metrics_->published_blocks.Decrement();
  if (!block->cache->on_device()) NotKept(*block);
  if (block->holders == 0) Dispose(block);
}

void PageStoreImpl::Dispose(Block* block) {
  // Freeing the last page deletes the block, so count down from what is live now.
  const std::shared_ptr<Cache> cache = block->cache;
  uint32_t live = block->live_pages;
  if (live == 0) return DeleteIfEmpty(block);
  const uint32_t layers = cache->layers();
  for (uint32_t at = 0; live > 0; ++at) {
    const PageRef ref{block, at % layers, at < layers ? PageKind::kKeysValues : PageKind::kActivations};
    const Page& page = ref.page();
    if (page.state == PageState::kFree) continue;
    --live;
    if (page.pins > 0 || page.busy) {
      Apply(ref, PageEvent::kQuarantine, {page.raw, page.encoded, page.declined, page.checksum});
    } else {
      FreePage(ref);
    }
  }
}

void PageStoreImpl::FreePage(PageRef ref) {
  Apply(ref, PageEvent::kFree, {});
  DeleteIfEmpty(ref.block);
}

void PageStoreImpl::DeleteIfEmpty(Block* block) {
  if (block->live_pages > 0 || block->holders > 0 || block->published) return;
  KV_CHECK(block->pins == 0 && block->jobs == 0 && block->bytes == 0 && !block->evictable);
  blocks_.erase(block);
}

uint64_t PageStoreImpl::ChecksumOf(const Cache& cache, uint32_t layer, const Page& page) const {
  if (cache.on_device()) return 0;  // made when the page leaves
  if (page.encoded.valid()) return Checksum(Data(cache, page.encoded), cache.page_bytes(layer));
  return Checksum(Data(cache, page.raw), cache.layout().raw_bytes());
}

bool PageStoreImpl::VerifyChecksums(const Block& block) const {
  if (block.cache->on_device()) return true;  // verified when it leaves
  for (uint32_t layer = 0; layer < block.pages.size(); ++layer) {
    const Page& page = block.pages[layer];
    // A page still to be encoded has nothing to compare with yet.
    if (page.state == PageState::kResident && ChecksumOf(*block.cache, layer, page) != page.checksum) return false;
  }
  return true;
}

Block* PageStoreImpl::FindVerified(Cache& cache, const BlockName& name, uint32_t index, MissReason* reason) {
  Block* block = cache.table.FindAndPin(name, index, reason);
  if (block == nullptr) return nullptr;
  MakeUnevictable(block);
  if (!VerifyChecksums(*block)) {
    *reason = MissReason::kChecksum;
    metrics_->checksum_failures.Increment();
    block->corrupt = true;
    Unname(block);
  }
  if (*reason == MissReason::kNone) return block;
  Release(block);
  return nullptr;
}

}  // namespace kvmanager
