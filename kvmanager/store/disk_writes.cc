#include "kvmanager/store/disk_writes.h"

#include <algorithm>
#include <string>
#include <utility>

#include "kvmanager/base/status.h"
#include "kvmanager/store/memory_backend.h"
#include "kvmanager/store/payer_name.h"

namespace kvmanager {
namespace {

constexpr int kBlocksAtOnce = 8;

// The disk has blocks as they were encoded first, not those that are lowered, or are about to be.
bool IsLowered(const Block& block) { return block.is_lowering || block.rung() > 0; }

uint64_t StayingBytes(const Block& block) {
  uint64_t bytes = 0;
  for (uint32_t layer = 0; layer < block.pages().size(); ++layer) {
    bytes += block.pages()[layer].declined ? block.cache->layout(layer).raw_bytes() : block.cache->page_bytes(layer);
  }
  return bytes;
}

// Whether the disk has the block: then it is kept there.
bool IsOnDisk(const DiskWrites::Parts& parts, Block* block) {
  const DiskBlock* const there = parts.disk->Find(block->cache->digest, block->name.key);
  if (there == nullptr) return false;
  if (!there->retention.is_of_policy()) parts.host->eviction().Retain(block, there->retention);
  parts.host->SetKept(block, true);
  return true;
}

GoneReason ReasonOf(DiskLoss loss) {
  switch (loss) {
    case DiskLoss::kEvicted:
      return GoneReason::kEvicted;
    case DiskLoss::kErased:
      return GoneReason::kPurged;
    case DiskLoss::kWrong:
      return GoneReason::kDiskRecord;
    case DiskLoss::kChecksum:
      return GoneReason::kChecksum;
  }
  return GoneReason::kDiskRecord;
}

}  // namespace

class DiskWrites::Waiting final : public EncodeWaiter {
 public:
  Waiting(DiskWrites* writes, Block* block)
      : EncodeWaiter(writes->parts_.encodes, writes->parts_.alive), writes_(writes), block_(block) {
    writes_->parts_.blocks->NoteHolder(block_);
    writes_->parts_.blocks->Hold(block_);
    std::vector<PageRef> pages;
    for (uint32_t layer = 0; layer < block->pages().size(); ++layer) {
      if (block->pages()[layer].awaits_encoding()) pages.push_back({block, layer});
    }
    WaitFor(std::move(pages));
  }
  ~Waiting() override {
    if (store_has_gone()) return;
    writes_->parts_.blocks->ForgetHolder(block_);
    writes_->parts_.blocks->Release(block_);
  }

 private:
  void Resolve() override {}

  DiskWrites* const writes_;
  Block* const block_;
};

DiskWrites::DiskWrites(const Parts& parts) : parts_(parts) {
  if (parts_.disk == nullptr) return;
  parts_.disk->OnGone([this, alive = parts_.alive](const CacheDigest& cache, const BlockKey& key, DiskLoss loss) {
    if (!alive.expired()) OnGone(cache, key, loss);
  });
}

DiskWrites::~DiskWrites() = default;

bool DiskWrites::HasRoom(uint64_t bytes) const {
  return pinned_bytes_ == 0 || pinned_bytes_ + bytes <= parts_.host->pool()->capacity_bytes() / kPinnedShare;
}

bool DiskWrites::MayFit(uint64_t bytes) const {
  return bytes <= std::min(kDiskRecordBytesMax, parts_.disk->use().capacity_bytes) / 2;
}

void DiskWrites::ShowUnwritten() { parts_.metrics->unwritten_blocks.Set(static_cast<double>(unwritten())); }

void DiskWrites::NoteNamed(Block* block) {
  if (parts_.disk == nullptr || block->cache->tier != parts_.host) return;
  if (IsOnDisk(parts_, block)) return;
  const PayerId payer = block->cache->payer;
  if (named_.size() >= kQueuedMax || named_of_.Of(payer) >= kPayerQueuedMax) return;
  named_.push_back({block->cache->id, block->name.key, payer});
  named_of_.Add(payer);
  ShowUnwritten();  // before whoever named it is answered
  Ask();
}

void DiskWrites::PopNamed() {
  named_of_.Remove(named_.front().payer);
  named_.pop_front();
}

void DiskWrites::Ask() {
  if (parts_.disk == nullptr || std::exchange(asked_, true)) return;
  on_leftovers_();
}

bool DiskWrites::WriteSome() {
  if (!std::exchange(asked_, false)) return false;
  asked_ |= WriteNext();
  ShowUnwritten();
  return asked_;
}

bool DiskWrites::WriteNext() {
  for (int i = 0; i < kBlocksAtOnce; ++i) {
    if (waiting_ != nullptr || named_.empty()) return false;
    const Named next = named_.front();
    const auto cache = parts_.caches->Find(next.cache);
    Block* const block = cache.ok() ? (*cache)->table.FindKey(next.key) : nullptr;
    // Written meanwhile, or gone; or found on the disk since, whose index had not been read, or not all of it.
    if (block == nullptr || block->kept || writing_.contains(block) || IsOnDisk(parts_, block) || IsLowered(*block)) {
      PopNamed();
      continue;
    }
    const uint64_t bytes = StayingBytes(*block);
    if (!MayFit(bytes)) {
      PopNamed();
      continue;
    }
    if (!HasRoom(bytes) || !parts_.disk->CanWrite(bytes)) return false;
    if (block->is_resident()) {
      PopNamed();
      Start(block, /*demotes=*/false);
      continue;
    }
    auto waiting = std::make_unique<Waiting>(this, block);
    if (waiting->is_ready()) {
      PopNamed();  // a page of it will never be encoded
      continue;
    }
    waiting_ = std::move(waiting);
    waiting_->CallWhenReady([this] {
      waiting_ = nullptr;
      Ask();
    });
  }
  return true;
}

bool DiskWrites::Demote(Block* block) {
  KV_CHECK(block->evictable);
  if (parts_.disk == nullptr) return false;
  if (parts_.disk->Find(block->cache->digest, block->name.key) != nullptr) {
    parts_.host->SetKept(block, true);
    return false;
  }
  if (IsLowered(*block)) {
    parts_.host->SetKept(block, true);  // cannot be written: nothing waits for that
    return false;
  }
  const uint64_t bytes = StayingBytes(*block);
  if (!block->is_resident() || !MayFit(bytes) || !HasRoom(bytes) || !parts_.disk->CanWrite(bytes)) return false;
  Start(block, /*demotes=*/true);
  return true;
}

void DiskWrites::Start(Block* block, bool demotes) {
  const std::shared_ptr<Cache> cache = block->cache->shared_from_this();
  DiskRecord record;
  record.cache = cache->digest;
  record.name = block->name;
  record.index = block->index;
  record.tokens = block->tokens;
  std::vector<const uint8_t*> sources;
  uint64_t bytes = 0;
  for (uint32_t layer = 0; layer < block->pages().size(); ++layer) {
    const Page page = block->pages()[layer];
    const uint64_t page_bytes = page.declined ? cache->layout(layer).raw_bytes() : cache->page_bytes(layer);
    record.pages.push_back({static_cast<uint32_t>(page_bytes), page.declined, page.checksum});
    sources.push_back(PageData(*cache, page.declined ? page.raw : page.encoded));
    bytes += page_bytes;
    parts_.blocks->PinEncoded({block, layer});
  }
  writing_.emplace(block, false);
  ++cache->leases;
  pinned_bytes_ += bytes;
  if (demotes) {
    demoting_bytes_ += bytes;
    parts_.host->Count(&Tier::Bytes::demoting, static_cast<int64_t>(bytes));
  }
  taker_ = cache.get();
  parts_.disk->Write(std::move(record), PayerName(cache->config.tenant), std::move(sources),
                     [this, alive = parts_.alive, block, key = block->name.key, bytes, demotes](bool durable) {
                       if (!alive.expired()) End(block, key, bytes, demotes, durable);
                     });
  taker_ = nullptr;
}

void DiskWrites::End(Block* block, const BlockKey& key, uint64_t bytes, bool demotes, bool durable) {
  const std::shared_ptr<Cache> cache = block->cache->shared_from_this();
  pinned_bytes_ -= bytes;
  if (demotes) {
    demoting_bytes_ -= bytes;
    parts_.host->Count(&Tier::Bytes::demoting, -static_cast<int64_t>(bytes));
  }
  const auto written = writing_.find(block);
  const bool purged = written->second;
  writing_.erase(written);
  bool again = false;
  if (block->published && block->name.key == key) {
    if (durable) {
      if (!block->retention.is_of_policy()) parts_.disk->Retain(cache->digest, key, block->retention);
      parts_.host->SetKept(block, true);
    } else if (!purged && !IsOnDisk(parts_, block) && !IsLowered(*block)) {
      again = true;
      named_.push_back({cache->id, key, cache->payer});
      named_of_.Add(cache->payer);
    }
  }
  // The last unpinning may delete the block.
  for (uint32_t layer = 0, layers = cache->layers(); layer < layers; ++layer) {
    parts_.blocks->UnpinEncoded({block, layer});
  }
  --cache->leases;
  if (!cache->wanted) parts_.caches->CloseIfUnused(cache);
  ShowUnwritten();
  // Not for what was refused: the disk would refuse it again, and nothing else would be done meanwhile. TryAgain does.
  if (!named_.empty() && !again) Ask();
}

// At once: a block that is published again by the same name must not be taken for what goes.
uint64_t DiskWrites::NotePurge(const CacheDigest* digest) {
  waiting_ = nullptr;
  std::erase_if(named_, [&](const Named& named) {
    const auto cache = parts_.caches->Find(named.cache);
    const bool goes = digest == nullptr || !cache.ok() || (*cache)->digest == *digest;
    if (goes) named_of_.Remove(named.payer);
    return goes;
  });
  ShowUnwritten();
  uint64_t blocks = 0;
  for (auto& [block, purged] : writing_) {
    if (digest != nullptr && block->cache->digest != *digest) continue;
    purged = true;
    if (!block->published || block->holders > 0 || block->pins > block->cache->layers()) continue;
    parts_.blocks->Unname(block, GoneReason::kPurged);  // its slots stay until they were written
    ++blocks;
  }
  parts_.metrics->purged_blocks.Increment(static_cast<double>(blocks));
  return blocks;
}

void DiskWrites::OnGone(const CacheDigest& digest, const BlockKey& key, DiskLoss loss) {
  const std::shared_ptr<Cache> cache = parts_.caches->FindIn(digest, parts_.host);
  GoneBlocks::Note note{.tier = kDiskTier};
  note.reason = ReasonOf(loss);
  if (loss == DiskLoss::kEvicted && taker_ != nullptr) note.taker = taker_->tenant_label;
  if (cache != nullptr) {
    note.cache = cache->id;
    note.owner = cache->tenant_label;
  }
  parts_.gone->Add(key, note);
  if (cache == nullptr) return;
  // A block that was lowered cannot be written again: nothing waits for that.
  Block* const block = cache->table.FindKey(key);
  if (block != nullptr && !IsLowered(*block)) parts_.host->SetKept(block, false);
}

}  // namespace kvmanager
