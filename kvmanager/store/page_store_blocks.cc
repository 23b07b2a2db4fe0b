// Blocks and slots: every transition of a page, holders, pins, names and eviction.
#include <algorithm>

#include "kvmanager/base/tenant_label.h"
#include "kvmanager/store/page_store_impl.h"

namespace kvmanager {

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
    if (slot.valid() && slot != page.raw && slot != page.encoded) cache.tier->Free(slot);
  }
  metrics_->pool_used_bytes.Set(static_cast<double>(tiers_[0]->pool()->used_bytes()));
}

void PageStoreImpl::OnRoomIn(const Tier& tier) {
  if (&tier != tiers_[0].get()) return;
  metrics_->evictable_bytes.Set(static_cast<double>(tier.evictable_bytes()));
  if (on_room_ == nullptr) return;
  absl::AnyInvocable<void()> fn = std::move(on_room_);
  on_room_ = nullptr;
  fn();
}

bool PageStoreImpl::AwaitsRelease(int device) const {
  for (const auto& tier : tiers_) {
    if (tier->device() == device) return tier->awaits_release();
  }
  return false;
}

const uint8_t* PageStoreImpl::RawData(const Cache& cache, const Page& page) {
  if (page.raw.valid()) return Data(cache, page.raw);
  return cache.identity() && page.encoded.valid() ? Data(cache, page.encoded) : nullptr;
}

absl::Status PageStoreImpl::Exhausted(const Cache& cache, const SlotCounts& counts) const {
  if (!cache.tier->awaits_release()) metrics_->exhausted.Increment();  // else whoever asks may ask again
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
  const SlotPool& pool = *cache.tier->pool();
  const uint64_t retired = cache.tier->retired_slots();
  return FieldError(
      absl::StatusCode::kResourceExhausted, pool.limit(),
      absl::StrCat(pool.used_bytes(), " used, and ", wanted, " wanted by tenant ", TenantLabel(cache.config.tenant)),
      absl::StrCat(
          "at most ", pool.capacity_bytes(), " in slabs of ", pool.slab_bytes(), ", ", pool.free_slabs(),
          " of them free, each of one tenant and slot size; ", cache.tier->evictable_bytes(),
          " could be evicted, but would not make room",
          retired == 0 ? "" : absl::StrCat(" before kernels have done with ", retired, " slots that were given up"),
          "; largest holders: ", holders.empty() ? "none" : holders));
}

void PageStoreImpl::Hold(Block* block) {
  ++block->holders;
  MakeUnevictable(block);
}

void PageStoreImpl::Release(Block* block) {
  KV_CHECK(block->holders > 0);
  if (--block->holders > 0) return;
  if (!block->published) return Dispose(block);
  block->cache->tier->Touch(block);
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
  const uint32_t aged = cache.reading().AgedPages(position);
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
  block->cache->tier->AddEvictable(block);
}

void PageStoreImpl::MakeUnevictable(Block* block) {
  if (!block->evictable) return;
  block->cache->tier->RemoveEvictable(block);
  metrics_->evictable_bytes.Set(static_cast<double>(tiers_[0]->evictable_bytes()));
}

void PageStoreImpl::Evict(Block* block) {
  metrics_->evicted_blocks.Increment();
  metrics_->evicted_bytes.Increment(static_cast<double>(block->bytes));
  metrics_->evicted_idle_seconds.Observe(static_cast<double>(clock_->NowNs() - block->last_use_ns) * 1e-9);
  Tier& tier = *block->cache->tier;
  tier.BeginEviction(block->bytes);
  Unname(block);
  tier.EndEviction();
}

void PageStoreImpl::Unname(Block* block) {
  MakeUnevictable(block);
  block->cache->table.Erase(block);
  metrics_->published_blocks.Decrement();
  NotKept(*block);
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
  const MemoryBackend& memory = cache.tier->memory();
  if (page.encoded.valid()) return memory.Checksum(Data(cache, page.encoded), cache.page_bytes(layer));
  return memory.Checksum(Data(cache, page.raw), cache.layout().raw_bytes());
}

bool PageStoreImpl::VerifyChecksums(const Block& block) const {
  for (uint32_t layer = 0; layer < block.pages.size(); ++layer) {
    const Page& page = block.pages[layer];
    // A page still to be encoded has nothing to compare with yet.
    if (page.state != PageState::kResident) continue;
    const uint64_t checksum = ChecksumOf(*block.cache, layer, page);
    if (checksum != 0 && checksum != page.checksum) return false;  // 0: verified when it leaves
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
