#include "kvmanager/store/recovery.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr uint32_t kPagesOfTurn = 64;  // that are claimed: some 0.2 ms
constexpr size_t kReleasedAtOnce = 64;
constexpr uint32_t kFirstGeneration = 1;  // of a slot of a pool in which nothing was freed

uint64_t FirstBytes(const BlockKey& key) {
  uint64_t first;
  std::memcpy(&first, key.bytes.data(), sizeof first);
  return first;
}

PageId SlotOf(const KeptPage& page) { return {page.place.number, kFirstGeneration}; }

}  // namespace

void Recovery::Recover() {
  if (parts_.manifest == nullptr) return;
  struct Found {
    uint64_t entry = 0;
    std::pair<const CacheDigest, OfCache>* cache = nullptr;
    uint64_t first_bytes = 0;  // of its key
    uint32_t index = 0, place = 0;
    size_t first_slot = 0, slots = 0;
  };
  std::vector<Found> found;
  std::vector<SlabRestore::Slot> slots;
  std::vector<uint64_t> refused;  // entries
  parts_.manifest->Recover([&](uint64_t entry, const KeptBlock& block) {
    const auto [at, is_new] = caches_.try_emplace(block.cache);
    OfCache& of = at->second;
    if (is_new) {
      const Tenants::Tenant tenant = parts_.tenants->Hold(block.tenant);
      of.tenant = block.tenant;
      of.tenant_id = tenant.id;
      of.payer = tenant.payer;
    }
    if (of.tenant != block.tenant || block.index >= kSequenceBlocksMax) return refused.push_back(entry);
    ++of.recorded;
    found.push_back({entry, &*at, FirstBytes(block.name.key), block.index, block.pages[0].place.number, slots.size(),
                     block.pages.size()});
    for (const KeptPage& page : block.pages) slots.push_back({of.tenant_id, page.place});
  });
  for (auto& [digest, of] : caches_) of.by_key.reserve(of.recorded);
  // Slots are restored in the order of their numbers, and blocks listed in that of their first slots.
  std::vector<std::pair<uint32_t, uint32_t>> order(slots.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = {slots[i].place.number, i};
  std::sort(order.begin(), order.end());
  std::vector<SlabRestore::Slot> sorted;
  sorted.reserve(slots.size());
  for (const auto& [number, at] : order) sorted.push_back(slots[at]);
  const std::vector<PageId> restored = parts_.pool->Restore(sorted);
  std::vector<PageId> ids(slots.size());
  for (size_t i = 0; i < order.size(); ++i) ids[order[i].second] = restored[i];
  std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.place < b.place; });
  for (const Found& each : found) {
    const auto of_block = absl::MakeSpan(ids).subspan(each.first_slot, each.slots);
    OfCache& of = each.cache->second;
    const bool whole = std::all_of(of_block.begin(), of_block.end(), [](const PageId& id) { return id.valid(); });
    if (whole) {
      for (const PageId& id : of_block) {
        KV_CHECK(id.generation == kFirstGeneration);
        parts_.pool->SetReclaimable(id, true);
        parts_.host->Count(&Tier::Bytes::unclaimed, static_cast<int64_t>(parts_.pool->SlotBytes(id)));
      }
      ByPlace& of_payer = unclaimed_[of.payer];
      of_payer.emplace_hint(of_payer.end(), each.place, Unclaimed{each.entry, each.cache->first});
      of.by_index[each.index].push_back(each.place);
      of.by_key.try_emplace(each.first_bytes, each.place);
      ++of.blocks;
      ++unclaimed_blocks_;
      continue;
    }
    for (const PageId& id : of_block) {
      if (id.valid()) parts_.pool->Free(id);
    }
    refused.push_back(each.entry);
  }
  for (const uint64_t entry : refused) parts_.manifest->Erase(entry);
  absl::erase_if(caches_, [&](const auto& of) {
    if (of.second.blocks == 0) parts_.tenants->Drop(of.second.tenant);
    return of.second.blocks == 0;
  });
  parts_.metrics->recovered_blocks.Increment(static_cast<double>(unclaimed_blocks_));
  parts_.metrics->unrecovered_blocks.Increment(static_cast<double>(refused.size()));
  ShowUnclaimed();
}

void Recovery::Record(Block* block) {
  if (parts_.manifest == nullptr || block->recorded != 0 || block->cache->tier != parts_.host) return;
  if (!block->is_resident()) return;
  KeptBlock record;
  const Cache& cache = *block->cache;
  record.cache = cache.digest;
  record.name = block->name;
  record.index = block->index;
  record.tokens = block->tokens;
  record.tenant = cache.config.tenant;
  record.pages.reserve(block->pages().size());
  for (const Page page : block->pages()) {
    record.pages.push_back(
        {parts_.pool->SlotPlaceOf(page.declined ? page.raw : page.encoded), page.declined, page.checksum, page.rung});
  }
  block->recorded = parts_.manifest->Write(record);
  if (block->recorded == 0) return parts_.metrics->unrecorded_blocks.Increment();
  parts_.metrics->recorded_blocks.Increment();
}

void Recovery::Forget(Block* block) {
  if (block->recorded == 0) return;
  parts_.manifest->Erase(std::exchange(block->recorded, 0));
  parts_.metrics->recorded_blocks.Decrement();
}

void Recovery::NoteOpened(const std::shared_ptr<Cache>& cache) {
  const auto of = caches_.find(cache->digest);
  if (of == caches_.end()) return;
  if (cache->tier != parts_.host) {
    // What is found below moves up.
    if (cache->tier->can_move()) (void)parts_.caches->OpenCounterpart(*cache, *parts_.host);
    return;
  }
  cache->table.SetFiller([this, of = std::weak_ptr<Cache>(cache)](const BlockKey& key) {
    const std::shared_ptr<Cache> opened = of.lock();
    return opened != nullptr && Fill(opened, key);
  });
  ++cache->leases;
  claiming_.push_back(cache);
  on_leftovers_();
}

bool Recovery::Fill(const std::shared_ptr<Cache>& cache, const BlockKey& key) {
  const auto of = caches_.find(cache->digest);
  if (of == caches_.end()) return false;
  const auto known = of->second.by_key.find(FirstBytes(key));
  if (known == of->second.by_key.end()) return false;
  Block* const block = Claim(cache, known->second);
  ShowUnclaimed();
  if (block == nullptr) return false;
  parts_.blocks->NoteHolder(block);
  held_.push_back(block);
  return true;
}

// Of a chain, children first (EvictionPolicy).
void Recovery::ReleaseHeld(size_t blocks_max) {
  for (; blocks_max > 0 && !held_.empty(); --blocks_max) {
    Block* const block = held_.back();
    held_.pop_back();
    parts_.blocks->ForgetHolder(block);
    parts_.blocks->Release(block);
  }
}

bool Recovery::ClaimSome() {
  ReleaseHeld(kReleasedAtOnce);
  uint32_t pages = 0;
  while (!claiming_.empty() && pages < kPagesOfTurn) {
    const std::shared_ptr<Cache> cache = claiming_.front();
    const auto of = caches_.find(cache->digest);
    if (of == caches_.end() || of->second.by_index.empty()) {
      claiming_.pop_front();
      cache->table.SetFiller(nullptr);
      --cache->leases;
      if (!cache->wanted) parts_.caches->CloseIfUnused(cache);
      continue;
    }
    // The last blocks of sequences first, so that parents were used later than their children (EvictionPolicy).
    const auto last = of->second.by_index.begin();
    const uint32_t place = last->second.back();
    last->second.pop_back();
    if (last->second.empty()) of->second.by_index.erase(last);
    pages += cache->layers();
    if (Block* const block = Claim(cache, place)) parts_.blocks->Release(block);
  }
  ShowUnclaimed();
  return !claiming_.empty() || !held_.empty();
}

bool Recovery::CanBeOf(const Cache& cache, const KeptBlock& block) const {
  if (block.tenant != cache.config.tenant || block.pages.size() != cache.layers()) return false;
  if (block.tokens != static_cast<uint32_t>(cache.page_tokens())) return false;
  for (uint32_t layer = 0; layer < cache.layers(); ++layer) {
    const KeptPage& page = block.pages[layer];
    if (cache.identity() ? page.raw : cache.keeps_raw(block.index, layer) && !page.raw) return false;
    if (page.rung >= cache.rungs()) return false;
    const FormBytes slot = cache.slot_bytes(layer, PageKind::kKeysValues, page.rung);
    if (page.place.slot_bytes != (page.raw ? slot.raw : slot.encoded)) return false;
  }
  return true;
}

Block* Recovery::Claim(const std::shared_ptr<Cache>& cache, uint32_t place) {
  const PayerId payer = caches_.at(cache->digest).payer;
  const auto of_payer = unclaimed_.find(payer);
  if (of_payer == unclaimed_.end()) return nullptr;
  const auto unclaimed = of_payer->second.find(place);
  if (unclaimed == of_payer->second.end() || unclaimed->second.cache != cache->digest) return nullptr;
  const uint64_t entry = unclaimed->second.entry;
  const KeptBlock kept = TakeOut(payer, unclaimed);
  Block* const block = Make(cache, entry, kept);
  Leave(cache->digest);
  return block;
}

Block* Recovery::Make(const std::shared_ptr<Cache>& cache, uint64_t entry, const KeptBlock& kept) {
  if (!CanBeOf(*cache, kept) || cache->table.FindKey(kept.name.key) != nullptr) {
    GiveUp(entry, kept);
    return nullptr;
  }
  Block* const block = parts_.blocks->New(cache, kept.index);
  for (uint32_t layer = 0; layer < cache->layers(); ++layer) {
    const KeptPage& page = kept.pages[layer];
    PageChange change;
    (page.raw ? change.raw : change.encoded) = SlotOf(page);
    change.rung = page.rung;
    parts_.blocks->Apply({block, layer}, PageEvent::kReserve, change);
    change.declined = page.raw;
    change.checksum = page.checksum;
    parts_.blocks->Apply({block, layer}, PageEvent::kReceivedCopy, change);
  }
  block->recorded = entry;
  parts_.metrics->recorded_blocks.Increment();
  parts_.blocks->Name(block, kept.name);
  return block;
}

KeptBlock Recovery::TakeOut(PayerId payer, ByPlace::iterator unclaimed) {
  KeptBlock block = parts_.manifest->Read(unclaimed->second.entry);
  const auto of_payer = unclaimed_.find(payer);
  of_payer->second.erase(unclaimed);
  if (of_payer->second.empty()) unclaimed_.erase(of_payer);
  for (const KeptPage& page : block.pages) {
    parts_.pool->SetReclaimable(SlotOf(page), false);
    parts_.host->Count(&Tier::Bytes::unclaimed, -static_cast<int64_t>(page.place.slot_bytes));
  }
  return block;
}

void Recovery::GiveUp(uint64_t entry, const KeptBlock& block) {
  parts_.manifest->Erase(entry);
  for (const KeptPage& page : block.pages) parts_.host->Free(SlotOf(page));
  parts_.metrics->unclaimed_lost_blocks.Increment();
}

void Recovery::Leave(const CacheDigest& digest) {
  const auto of = caches_.find(digest);
  --unclaimed_blocks_;
  if (--of->second.blocks > 0) return;
  parts_.tenants->Drop(of->second.tenant);
  caches_.erase(of);
}

bool Recovery::GiveUpUnclaimed(PayerId payer) {
  const auto of_payer = unclaimed_.find(payer);
  if (of_payer == unclaimed_.end()) return false;
  const auto last = std::prev(of_payer->second.end());
  const Unclaimed unclaimed = last->second;
  GiveUp(unclaimed.entry, TakeOut(payer, last));
  Leave(unclaimed.cache);
  ShowUnclaimed();
  return true;
}

uint64_t Recovery::Purge(const CacheDigest* digest) {
  ReleaseHeld(SIZE_MAX);
  const uint64_t before = unclaimed_blocks_;
  std::vector<std::pair<PayerId, uint32_t>> places;
  for (const auto& [payer, of_payer] : unclaimed_) {
    for (const auto& [place, unclaimed] : of_payer) {
      if (digest == nullptr || unclaimed.cache == *digest) places.emplace_back(payer, place);
    }
  }
  for (const auto& [payer, place] : places) {
    const auto unclaimed = unclaimed_.at(payer).find(place);
    const Unclaimed gone = unclaimed->second;
    GiveUp(gone.entry, TakeOut(payer, unclaimed));
    Leave(gone.cache);
  }
  ShowUnclaimed();
  return before - unclaimed_blocks_;
}

void Recovery::ShowUnclaimed() {
  parts_.metrics->unclaimed_blocks.Set(static_cast<double>(unclaimed_blocks_));
  ShowHostUse(*parts_.host, parts_.metrics);
}

void Recovery::CheckInvariants() const {
  uint64_t bytes = 0, blocks = 0;
  absl::flat_hash_map<CacheDigest, uint64_t> of_cache;
  for (const auto& [payer, of_payer] : unclaimed_) {
    KV_CHECK(!of_payer.empty());
    for (const auto& [place, unclaimed] : of_payer) {
      const KeptBlock block = parts_.manifest->Read(unclaimed.entry);
      const OfCache& of = caches_.at(unclaimed.cache);
      KV_CHECK(block.cache == unclaimed.cache && block.pages[0].place.number == place);
      KV_CHECK(of.payer == payer && of.tenant == block.tenant && parts_.tenants->at(of.tenant).id == of.tenant_id);
      for (const KeptPage& page : block.pages) {
        KV_CHECK(parts_.pool->SlotPlaceOf(SlotOf(page)) == page.place);
        bytes += page.place.slot_bytes;
      }
      ++of_cache[unclaimed.cache];
      ++blocks;
    }
  }
  for (const auto& [digest, of] : caches_) KV_CHECK(of_cache[digest] == of.blocks && of.blocks > 0);
  KV_CHECK(blocks == unclaimed_blocks_ && bytes == parts_.host->bytes().unclaimed);
  for (const Block* each : parts_.blocks->All()) {
    const Block& block = *each;
    if (block.recorded == 0) continue;
    const KeptBlock record = parts_.manifest->Read(block.recorded);
    KV_CHECK(block.published && block.cache->tier == parts_.host && record.cache == block.cache->digest);
    KV_CHECK(record.name.key == block.name.key && record.name.tokens == block.name.tokens);
    KV_CHECK(record.index == block.index && record.pages.size() == block.pages().size());
    for (size_t layer = 0; layer < block.pages().size(); ++layer) {
      const Page page = block.pages()[layer];
      const KeptPage& kept = record.pages[layer];
      KV_CHECK(kept.raw == page.declined && kept.checksum == page.checksum && kept.rung == page.rung);
      KV_CHECK(kept.place == parts_.pool->SlotPlaceOf(page.declined ? page.raw : page.encoded));
    }
  }
}

}  // namespace kvmanager
