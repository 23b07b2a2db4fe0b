#include "kvmanager/store/block_index.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kvmanager/base/status.h"
#include "kvmanager/store/memory_backend.h"
#include "kvmanager/store/prefix_walk.h"

namespace kvmanager {

BlockIndex::~BlockIndex() {
  for (const Block* block : All()) delete block;
}

std::vector<const Block*> BlockIndex::All() const {
  std::vector<const Block*> blocks(unnamed_.all().begin(), unnamed_.all().end());
  for (const auto& [key, cache] : caches_) {
    for (const Block& block : cache->table) blocks.push_back(&block);
  }
  return blocks;
}

Block* BlockIndex::New(const std::shared_ptr<Cache>& cache, uint32_t index) {
  auto owned = std::make_unique<Block>();
  Block* block = owned.get();
  block->cache = cache.get();
  block->index = index;
  block->tokens = static_cast<uint32_t>(cache->page_tokens());
  block->payer = cache->payer;
  block->all_pages = BlockPages(cache->layers(), cache->keeps_activations());
  block->holders = 1;
  if (cache->blocks++ == 0) caches_.emplace(cache.get(), cache);
  unnamed_.Insert(owned.release());
  return block;
}

Page& BlockIndex::Wake(const PageRef& ref) {
  BlockPages& pages = ref.block->all_pages;
  return ref.kind == PageKind::kKeysValues ? pages.WakeKeysValues(ref.layer) : pages.WakeActivations(ref.layer);
}

void BlockIndex::Apply(PageRef ref, PageEvent event, const PageChange& after) {
  Block& block = *ref.block;
  Cache& cache = *block.cache;
  Page& page = Wake(ref);
  const Page before = page;
  const bool activations = ref.kind == PageKind::kActivations;
  const FormBytes slot_bytes = cache.slot_bytes(ref.layer, ref.kind, before.rung);
  const FormBytes bytes_after = cache.slot_bytes(ref.layer, ref.kind, RungAfter(before, event, after));
  uint64_t& raw_bytes = activations ? cache.activation_bytes : cache.raw_bytes;
  uint64_t& encoded_bytes = activations ? cache.activation_bytes : cache.encoded_bytes;
  block.bytes -= slot_bytes.Of(before.raw, before.encoded);
  const int rung_before = before.encoded.valid() ? before.rung : kNoRung;
  if (before.raw.valid()) raw_bytes -= slot_bytes.raw;
  if (before.encoded.valid()) encoded_bytes -= slot_bytes.encoded;
  ApplyTransition(page, event, after, slot_bytes, bytes_after, activations ? *cache.activation_gauges : *cache.gauges);
  const Page now = page;  // freed slots may let others go on
  block.bytes += bytes_after.Of(now.raw, now.encoded);
  if (now.raw.valid()) raw_bytes += bytes_after.raw;
  if (now.encoded.valid()) encoded_bytes += bytes_after.encoded;
  if (cache.rungs() > 1 && !activations) NoteRungs(rung_before, slot_bytes.encoded, now, bytes_after.encoded);
  block.all_pages.NoteChange(before, now);
  // Slots that the page named and names no more, in either form, go back.
  for (const PageId& slot : {before.raw, before.encoded}) {
    if (slot.valid() && slot != now.raw && slot != now.encoded) cache.tier->Free(slot);
  }
  parts_.metrics->pool_used_bytes.Set(static_cast<double>(parts_.host->pool()->used_bytes()));
  if (block.published && before.state != PageState::kResident && now.state == PageState::kResident)
    parts_.after_resident(&block);
}

void BlockIndex::NoteRungs(int rung_before, uint64_t bytes_before, const Page& page, uint64_t bytes_after) {
  if (rung_before != kNoRung) {
    parts_.metrics->Rung(rung_before).pages->Decrement();
    parts_.metrics->Rung(rung_before).bytes->Decrement(static_cast<double>(bytes_before));
  }
  if (page.encoded.valid()) {
    parts_.metrics->Rung(page.rung).pages->Increment();
    parts_.metrics->Rung(page.rung).bytes->Increment(static_cast<double>(bytes_after));
  }
}

void BlockIndex::Hold(Block* block) {
  ++block->holders;
  MakeUnevictable(block);
}

void BlockIndex::Release(Block* block, const EvictionRun* run) {
  KV_CHECK(block->holders > 0);
  if (--block->holders > 0) return;
  if (!block->published) return Dispose(block);
  block->cache->tier->eviction().Touch(block, run);
  block->last_use = CoarseTime(parts_.clock->NowNs());
  MakeEvictableIfUnused(block);
}

void BlockIndex::NoteUse(Block* block) {
  if (block->holders > 0) return;
  block->cache->tier->eviction().Touch(block, nullptr);
  block->last_use = CoarseTime(parts_.clock->NowNs());
}

void BlockIndex::DropRawHold(PageRef ref) {
  Page& page = Wake(ref);
  KV_CHECK(page.raw_holds > 0);
  --page.raw_holds;
  ReleaseRawIfUnused(ref);
}

void BlockIndex::ReleaseRawIfUnused(PageRef ref) {
  const Page page = ref.page();
  if (page.state != PageState::kResident || page.declined || !page.raw.valid()) return;
  if (page.raw_holds > 0 || page.pins > page.encoded_pins) return;
  Apply(ref, PageEvent::kReleaseRaw, {PageId(), page.encoded, false, page.checksum});
}

void BlockIndex::Pin(PageRef ref) {
  ++Wake(ref).pins;
  ++ref.block->pins;
  MakeUnevictable(ref.block);
}

void BlockIndex::Unpin(PageRef ref) {
  Block* block = ref.block;
  Page& page = Wake(ref);
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

void BlockIndex::PinEncoded(PageRef ref) {
  ++Wake(ref).encoded_pins;
  Pin(ref);
}

void BlockIndex::UnpinEncoded(PageRef ref) {
  Page& page = Wake(ref);
  KV_CHECK(page.encoded_pins > 0);
  --page.encoded_pins;
  Unpin(ref);
}

void BlockIndex::MakeEvictableIfUnused(Block* block) {
  if (block->evictable || !block->published || block->holders > 0 || block->pins > 0 || block->jobs() > 0) return;
  block->all_pages.Rest();
  block->cache->tier->AddEvictable(block);
  ShowHostUse(*parts_.host, parts_.metrics);
}

void BlockIndex::MakeUnevictable(Block* block) {
  if (!block->evictable) return;
  block->cache->tier->RemoveEvictable(block);
  ShowHostUse(*parts_.host, parts_.metrics);
}

void BlockIndex::Evict(Block* block, const Cache& taker) {
  parts_.metrics->evicted_blocks.Increment();
  parts_.metrics->evicted_bytes.Increment(static_cast<double>(block->bytes));
  const int64_t idle_ns = parts_.clock->NowNs() - block->last_use.ns();
  parts_.metrics->evicted_idle_seconds.Observe(static_cast<double>(idle_ns) * 1e-9);
  Tier& tier = *block->cache->tier;
  tier.EvictBy(block, [&] { Unname(block, GoneReason::kEvicted, &taker); });
}

void BlockIndex::Unname(Block* block, GoneReason reason, const Cache* taker) {
  MakeUnevictable(block);
  const Cache& cache = *block->cache;
  parts_.gone->Add(block->name.key, {.reason = reason,
                                     .tier = cache.config.device,
                                     .cache = cache.id,
                                     .owner = cache.tenant_label,
                                     .taker = taker == nullptr ? "" : absl::string_view(taker->tenant_label)});
  parts_.before_unname(block);
  block->cache->table.Erase(block);
  unnamed_.Insert(block);
  parts_.metrics->published_blocks.Decrement();
  if (block->holders == 0) Dispose(block);
}

void BlockIndex::Dispose(Block* block) {
  // Freeing the last page deletes the block, so count down from what is live now.
  const uint32_t layers = block->cache->layers();
  uint32_t live = block->all_pages.live();
  if (live == 0) return DeleteIfEmpty(block);
  // From the last layer on: a pool hands out first what was freed last, so the pages of the next block lie in the order
  // of their layers, and a GPU copies them as one piece.
  for (uint32_t at = 0; live > 0; ++at) {
    const PageRef ref{block, layers - 1 - at % layers, at < layers ? PageKind::kKeysValues : PageKind::kActivations};
    const Page page = ref.page();
    if (page.state == PageState::kFree) continue;
    --live;
    if (page.pins > 0 || page.busy) {
      Apply(ref, PageEvent::kQuarantine, {page.raw, page.encoded, page.declined, page.checksum});
    } else {
      FreePage(ref);
    }
  }
}

void BlockIndex::FreePage(PageRef ref) {
  Apply(ref, PageEvent::kFree, {});
  DeleteIfEmpty(ref.block);
}

void BlockIndex::DeleteIfEmpty(Block* block) {
  if (block->all_pages.live() > 0 || block->holders > 0 || block->published) return;
  KV_CHECK(block->pins == 0 && block->jobs() == 0 && block->bytes == 0 && !block->evictable);
  unnamed_.Erase(block);
  Cache& cache = *block->cache;
  if (block->never_arrives) cache.failed_arrivals.erase(block);
  delete block;
  if (--cache.blocks == 0) caches_.erase(&cache);
}

bool BlockIndex::VerifyChecksums(const Block& block) {
  for (uint32_t layer = 0; layer < block.pages().size(); ++layer) {
    const Page page = block.pages()[layer];
    // A page still to be encoded has nothing to compare with yet.
    if (page.state != PageState::kResident) continue;
    const uint64_t checksum = PageChecksum(*block.cache, layer, page);
    if (checksum != 0 && checksum != page.checksum) return false;  // 0: verified when it leaves
  }
  return true;
}

Block* BlockIndex::Find(Cache& cache, const BlockName& name, uint32_t index, Bytes bytes, MissReason* reason) {
  Block* const block = cache.table.Find(name, index, reason);
  return block == nullptr ? nullptr : Take(block, bytes, reason);
}

Block* BlockIndex::Take(Block* block, Bytes bytes, MissReason* reason) {
  Hold(block);
  if (bytes == Bytes::kVerify && IsUnverified(*block)) {
    const bool intact = VerifyChecksums(*block);
    if (!intact) *reason = MissReason::kChecksum;
    NoteCompared(block, intact);
  }
  if (*reason == MissReason::kNone) return block;
  Release(block);
  return nullptr;
}

void BlockIndex::NoteCompared(Block* block, bool intact) {
  if (intact) {
    if (!block->is_resident()) return;  // some is still to be encoded, and was not compared
    block->verified = CoarseTime(parts_.clock->NowNs());
    return;
  }
  if (block->corrupt) return;
  parts_.metrics->checksum_failures.Increment();
  block->corrupt = true;
  if (block->published) Unname(block, GoneReason::kChecksum);
}

bool BlockIndex::EndJobIfQuarantined(PageRef ref, bool declined) {
  const Page page = ref.page();
  if (page.state != PageState::kQuarantined) return false;
  Apply(ref, PageEvent::kJobEnded, {page.raw, page.encoded, declined, 0});
  if (page.pins == 0) FreePage(ref);
  return true;
}

void BlockIndex::Name(Block* block, const BlockName& name, EvictionRun* run) {
  block->name = name;
  std::memcpy(&block->id, name.key.bytes.data(), sizeof(block->id));
  block->cache->tier->eviction().Named(run, block);
  block->cache->table.Insert(block);
  unnamed_.Erase(block);
  parts_.metrics->published_blocks.Increment();
  parts_.after_name(block);
}

std::vector<Block*> BlockIndex::FindPrefix(Cache& cache, absl::Span<const BlockName> names, Bytes bytes, bool lower_too,
                                           Cache* lower, MatchResult* match) {
  const PrefixPlaces places{{&cache, /*arriving=*/lower_too}, {lower_too ? lower : nullptr}};
  std::vector<Block*> found;
  for (const BlockName& name : names) {
    const NextBlock next = FindNextBlock(places, name, static_cast<uint32_t>(found.size()));
    match->reason = next.reason;
    if (next.block == nullptr) break;
    // What is on its way has no bytes to compare yet.
    const Bytes looked_at = next.place == BlockPlace::kArriving ? Bytes::kTrust : bytes;
    Block* const block = Take(next.block, looked_at, &match->reason);
    if (block == nullptr) break;
    found.push_back(block);
  }
  match->hit_blocks = static_cast<int>(found.size());
  return found;
}

HitTier TakeHit(Block* block) {
  if (block->from_disk) {
    block->from_disk = false;
    return HitTier::kDisk;
  }
  return block->cache->tier->lower() == nullptr ? HitTier::kHost : HitTier::kDevice;
}

void BlockIndex::CountHits(const MatchResult& match, const HitTierCounts& tiers) {
  if (match.reason != MissReason::kNone) {
    parts_.metrics->prefix_misses[static_cast<size_t>(match.reason)]->Increment();
  }
  parts_.metrics->prefix_hit_blocks.Increment(static_cast<double>(match.hit_blocks));
  for (size_t i = 0; i < tiers.size(); ++i) parts_.metrics->prefix_hit_tiers[i]->Increment(tiers[i]);
}

}  // namespace kvmanager
