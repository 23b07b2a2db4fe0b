#include "kvmanager/disk/disk_index.h"

#include <algorithm>

#include "kvmanager/base/status.h"

namespace kvmanager {

uint32_t DiskIndex::SharedTexts::Use(absl::string_view text) {
  const auto found = numbers_.find(text);
  if (found != numbers_.end()) {
    ++texts_[found->second].users;
    return found->second;
  }
  uint32_t number = static_cast<uint32_t>(texts_.size());
  if (unused_.empty()) {
    texts_.emplace_back();
  } else {
    number = unused_.back();
    unused_.pop_back();
  }
  texts_[number] = {std::string(text), 1, 0};
  numbers_.emplace(text, number);
  return number;
}

bool DiskIndex::SharedTexts::Leave(uint32_t number) {
  Shared& shared = texts_[number];
  if (--shared.users > 0) return false;
  numbers_.erase(shared.text);
  shared = {};
  unused_.push_back(number);
  return true;
}

DiskIndex::DiskIndex(EvictionKind eviction, const Clock* clock)
    : eviction_(MakeRetainingEviction(eviction, clock)), shards_(kShards) {}

DiskEntry* DiskIndex::Find(const CacheDigest& cache, const BlockKey& key) const {
  const auto of = cache_numbers_.find(cache);
  if (of == cache_numbers_.end()) return nullptr;
  const Key wanted(of->second, key);
  const Entries& entries = shards_[ShardOf(wanted.id)];
  const auto found = entries.find(wanted);
  return found == entries.end() ? nullptr : *found;
}

const DiskBlock* DiskIndex::Describe(const DiskEntry& entry) const {
  const std::string& shape = shapes_[entry.shape].text;
  described_.tokens = entry.token_digest;
  described_.index = entry.index;
  described_.retention = entry.retention;
  described_.layers = static_cast<uint8_t>(shape[0]) | static_cast<uint32_t>(static_cast<uint8_t>(shape[1])) << 8;
  described_.raw.assign(shape.begin() + 2, shape.end());
  return &described_;
}

DiskEntry* DiskIndex::Allocate() {
  if (!free_.empty() && !loading_) {
    DiskEntry* const entry = free_.back();
    free_.pop_back();
    *entry = {};
    return entry;
  }
  if (allocated_ == slabs_.size() * kSlabEntries) slabs_.push_back(std::make_unique<DiskEntry[]>(kSlabEntries));
  return At(allocated_++);
}

uint32_t DiskIndex::UseCache(const CacheDigest& digest) {
  const auto [found, is_new] = cache_numbers_.try_emplace(digest, static_cast<uint32_t>(caches_.size()));
  if (is_new) {
    if (unused_caches_.empty()) {
      caches_.emplace_back();
    } else {
      found->second = unused_caches_.back();
      unused_caches_.pop_back();
    }
    caches_[found->second].digest = digest;
  }
  ++caches_[found->second].users;
  return found->second;
}

void DiskIndex::LeaveCache(uint32_t number) {
  if (--caches_[number].users > 0) return;
  cache_numbers_.erase(caches_[number].digest);
  unused_caches_.push_back(number);
}

void DiskIndex::Count(uint32_t payer, uint64_t bytes, bool more) {
  uint64_t& of = payers_[payer].bytes;
  if (of > 0) by_bytes_.erase({of, payer});
  of = more ? of + bytes : of - bytes;
  if (of > 0) by_bytes_.emplace(of, payer);
  bytes_ = more ? bytes_ + bytes : bytes_ - bytes;
  blocks_ = more ? blocks_ + 1 : blocks_ - 1;
}

DiskEntry* DiskIndex::Insert(const IndexRecord& record) {
  DiskEntry* const entry = Allocate();
  entry->cache = UseCache(record.cache);
  const Key key(entry->cache, record.key);
  entry->id = key.id;
  entry->key_rest = key.rest;
  entry->token_digest = record.tokens_digest;
  entry->bytes = record.place.bytes;
  entry->index = record.index;
  entry->tokens = record.tokens;
  entry->segment = record.place.segment;
  entry->at = static_cast<uint32_t>(record.place.offset / kRecordAlign);
  entry->header_check = static_cast<uint32_t>(record.header_checksum);
  std::string shape = {static_cast<char>(record.layers & 0xff), static_cast<char>(record.layers >> 8)};
  shape += record.raw;
  entry->shape = shapes_.Use(shape);
  entry->payer = payers_.Use(record.payer);
  KV_CHECK(shards_[ShardOf(entry->id)].insert(entry).second);
  Count(entry->payer, entry->bytes, /*more=*/true);
  return entry;
}

void DiskIndex::MakeEvictable(DiskEntry* entry) {
  if (!entry->learned || entry->evictable || entry->gone || entry->readers > 0) return;
  eviction_->Add(entry);
  evictable_bytes_ += entry->bytes;
}

void DiskIndex::MakeUnevictable(DiskEntry* entry) {
  if (!entry->evictable) return;
  eviction_->Remove(entry);
  evictable_bytes_ -= entry->bytes;
}

void DiskIndex::Learn(DiskEntry* entry) {
  if (entry->learned || entry->gone) return;
  eviction_->Named(nullptr, entry);
  if (entry->last_use == 0) eviction_->Touch(entry, nullptr);
  entry->learned = true;
  MakeEvictable(entry);
}

void DiskIndex::NoteUse(const CacheDigest& cache, absl::Span<const BlockName> names) {
  EvictionRun run;
  std::vector<DiskEntry*> used;
  used.reserve(names.size());
  for (const BlockName& name : names) {
    DiskEntry* const entry = Find(cache, name.key);
    if (entry == nullptr || entry->token_digest != name.tokens || !entry->learned) continue;
    eviction_->Found(&run, entry);
    used.push_back(entry);
  }
  for (auto entry = used.rbegin(); entry != used.rend(); ++entry) eviction_->Touch(*entry, &run);
}

uint64_t DiskIndex::Retain(const CacheDigest& cache, const BlockKey& key, const Retention& retention) {
  DiskEntry* const entry = Find(cache, key);
  if (entry == nullptr) return 0;
  eviction_->Retain(entry, retention);
  return entry->bytes;
}

RetainingEviction::Use DiskIndex::EndRetentions() {
  eviction_->EndSome();
  return eviction_->kept_longer();
}

void DiskIndex::BeginRead(DiskEntry* entry) {
  KV_CHECK(entry->readers < UINT16_MAX && !entry->gone);
  ++entry->readers;
  MakeUnevictable(entry);
}

bool DiskIndex::EndRead(DiskEntry* entry) {
  KV_CHECK(entry->readers > 0);
  --entry->readers;
  MakeEvictable(entry);
  return !entry->gone || entry->readers > 0;
}

DiskEntry* DiskIndex::Victim() {
  for (auto payer = by_bytes_.rbegin(); payer != by_bytes_.rend(); ++payer) {
    if (Evictable* const victim = eviction_->Victim(payer->second)) return static_cast<DiskEntry*>(victim);
  }
  return nullptr;
}

void DiskIndex::Remove(DiskEntry* entry, bool evicted) {
  KV_CHECK(!entry->gone);
  if (evicted) eviction_->Evicted(*entry);
  MakeUnevictable(entry);
  entry->gone = true;
  KV_CHECK(shards_[ShardOf(entry->id)].erase(entry) == 1);
  Count(entry->payer, entry->bytes, /*more=*/false);
}

void DiskIndex::Free(DiskEntry* entry) {
  KV_CHECK(entry->gone && entry->readers == 0 && !entry->evictable);
  LeaveCache(entry->cache);
  shapes_.Leave(entry->shape);
  payers_.Leave(entry->payer);
  free_.push_back(entry);
}

void DiskIndex::ForEach(const CacheDigest& cache, absl::FunctionRef<void(DiskEntry*)> fn) {
  const auto of = cache_numbers_.find(cache);
  if (of == cache_numbers_.end()) return;
  ForEach([&, number = of->second](DiskEntry* entry) {
    if (entry->cache == number) fn(entry);
  });
}

void DiskIndex::ForEach(absl::FunctionRef<void(DiskEntry*)> fn) {
  std::vector<DiskEntry*> all;
  for (const Entries& entries : shards_) {
    all.assign(entries.begin(), entries.end());
    for (DiskEntry* const entry : all) fn(entry);
  }
}

void DiskIndex::SetLoading(bool loading) {
  KV_CHECK(!loading || allocated_ == 0);
  loading_ = loading;
}

void DiskIndex::CheckInvariants() const {
  uint64_t blocks = 0, bytes = 0, evictable = 0, kept_longer = 0;
  absl::flat_hash_map<uint32_t, uint64_t> of_payer;
  absl::flat_hash_map<uint32_t, uint64_t> of_cache;
  for (const Entries& entries : shards_) {
    for (const DiskEntry* const entry : entries) {
      KV_CHECK(!entry->gone && entry->evictable == (entry->learned && entry->readers == 0));
      ++blocks;
      bytes += entry->bytes;
      of_payer[entry->payer] += entry->bytes;
      ++of_cache[entry->cache];
      if (entry->evictable) evictable += entry->bytes;
      if (entry->evictable && entry->retention.priority() > Retention::kOfPolicy) kept_longer += entry->bytes;
    }
  }
  for (const auto& [digest, number] : cache_numbers_) {
    KV_CHECK(caches_[number].digest == digest && caches_[number].users >= std::max<uint64_t>(of_cache[number], 1));
  }
  KV_CHECK(blocks == blocks_ && bytes == bytes_ && evictable == evictable_bytes_);
  KV_CHECK(kept_longer == eviction_->kept_longer().bytes);
  eviction_->CheckInvariants();
  KV_CHECK(by_bytes_.size() == of_payer.size());
  for (const auto& [payer, sum] : of_payer) {
    KV_CHECK(payers_[payer].bytes == sum && by_bytes_.count({sum, payer}) == 1);
  }
}

}  // namespace kvmanager
