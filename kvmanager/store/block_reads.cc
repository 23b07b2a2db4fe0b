#include "kvmanager/store/block_reads.h"

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/shown_slabs.h"
#include "kvmanager/store/page_bytes.h"

namespace kvmanager {
namespace {

class BlockReadsImpl final : public BlockReads {
 public:
  BlockReadsImpl(const BlockReadParts& parts, std::shared_ptr<Cache> cache)
      : index_(parts.blocks),
        lease_pages_(parts.pages),
        metrics_(parts.metrics),
        cache_(std::move(cache)),
        alive_(parts.alive) {
    ++cache_->leases;
  }
  ~BlockReadsImpl() override {
    if (alive_.expired()) return;
    lease_pages_->Remove(cache_->payer, counted_);
    // Of a chain, children first (EvictionPolicy).
    for (; !found_.empty(); found_.pop_back()) {
      index_->ForgetHolder(found_.back());
      index_->Release(found_.back(), &run_);
    }
    --cache_->leases;
  }

  void Find(uint32_t first, absl::Span<const BlockName> names, const ReadRoom& room) {
    if (room.mapped) shown_ = cache_->tier->pool()->shown();
    uint64_t bytes_max = room.bytes_max;
    MatchResult match;
    HitTierCounts tiers{};
    for (const BlockName& name : names) {
      if (pages_.size() + cache_->layers() > kTransferPagesMax) break;
      const uint32_t place = first + static_cast<uint32_t>(found_.size());
      Block* const block = index_->Find(*cache_, name, place, BlockIndex::Bytes::kTrust, &match.reason);
      if (block == nullptr) break;
      const size_t before = pages_.size();
      const bool whole = List(*block, &match.reason);
      uint64_t bytes = 0;
      for (size_t i = before; i < pages_.size(); ++i) {
        if (!pages_[i].place.has_value()) bytes += (pages_[i].bytes + room.align - 1) / room.align * room.align;
      }
      if (!whole || bytes > bytes_max) {
        pages_.resize(before);
        index_->Release(block);
        break;
      }
      bytes_max -= bytes;
      index_->NoteHolder(block);
      cache_->tier->eviction().Found(&run_, block);
      found_.push_back(block);
      ++tiers[static_cast<size_t>(TakeHit(block))];
      verified_.push_back(!index_->IsUnverified(*block));
    }
    match.hit_blocks = static_cast<int>(found_.size());
    reason_ = match.reason;
    checksums_.reserve(pages_.size());
    for (const Block* block : found_) {
      for (const Page page : block->pages()) checksums_.push_back(page.checksum);
    }
    // What no more fits is asked for again.
    metrics_->prefix_asked_blocks.Increment(
        static_cast<double>(match.reason == MissReason::kNone ? found_.size() : names.size()));
    index_->CountHits(match, tiers);
  }

  absl::Status CountPages() {
    KV_RETURN_IF_ERROR(lease_pages_->Check(cache_->payer, pages_.size()));
    counted_ = pages_.size();
    lease_pages_->Add(cache_->payer, counted_);
    return absl::OkStatus();
  }

  size_t blocks() const override { return found_.size(); }
  MissReason reason() const override { return reason_; }
  absl::Span<const StoredPage> pages() const override { return pages_; }
  bool Verify(size_t page) const override { return verified_[page / cache_->layers()] || Compare(page); }
  bool Compare(size_t page) const override {
    const StoredPage& stored = pages_[page];
    return cache_->tier->memory().Checksum(stored.data, stored.bytes) == checksums_[page];
  }
  void NoteVerified(size_t intact, bool corrupt) override {
    if (alive_.expired()) return;
    for (size_t i = 0; i < intact; ++i) {
      const auto pages = absl::MakeConstSpan(pages_).subspan(i * cache_->layers(), cache_->layers());
      const bool all =
          std::none_of(pages.begin(), pages.end(), [](const auto& page) { return page.place.has_value(); });
      if (!verified_[i] && all) index_->NoteCompared(found_[i], /*intact=*/true);
    }
    if (corrupt) index_->NoteCompared(found_[intact], /*intact=*/false);
  }
  void NoteCompared(size_t block, bool intact) override {
    if (!alive_.expired()) index_->NoteCompared(found_[block], intact);
  }
  uint64_t checksum(size_t page) const override { return checksums_[page]; }
  absl::StatusOr<ShownSlab> ShowSlab(uint32_t slab) override {
    if (closed()) return absl::UnavailableError("the daemon ends");
    if (std::none_of(pages_.begin(), pages_.end(),
                     [&](const auto& page) { return page.place.has_value() && page.place->slab == slab; })) {
      return InvalidField("slab", slab, "one of those where pages of this lease are");
    }
    SlotPool& pool = *cache_->tier->pool();
    KV_ASSIGN_OR_RETURN(const int fd, pool.shown()->Show(slab));
    return ShownSlab{fd, pool.slab_bytes()};
  }
  std::vector<uint32_t> Recalled() const override {
    return closed() || shown_ == nullptr ? std::vector<uint32_t>() : shown_->Recalled(cache_->tenant);
  }
  bool closed() const override { return alive_.expired(); }

 private:
  // Adds the block's pages. False: one is still to be encoded.
  bool List(const Block& block, MissReason* reason) {
    for (uint32_t layer = 0; layer < block.pages().size(); ++layer) {
      const Page page = block.pages()[layer];
      if (page.state != PageState::kResident) {
        *reason = MissReason::kIncomplete;
        return false;
      }
      const bool encoded = page.encoded.valid();
      const size_t bytes = encoded ? cache_->page_bytes(layer) : cache_->layout(layer).raw_bytes();
      const PageId slot = encoded ? page.encoded : page.raw;
      pages_.push_back({PageData(*cache_, slot), static_cast<uint32_t>(bytes), layer, /*raw=*/!encoded,
                        shown_ == nullptr ? std::nullopt : shown_->Showable(slot)});
    }
    return true;
  }

  BlockIndex* const index_;
  LeasePages* const lease_pages_;
  StoreMetrics* const metrics_;
  const std::shared_ptr<Cache> cache_;  // shared: see Block
  const std::weak_ptr<const bool> alive_;
  ShownSlabs* shown_ = nullptr;  // if places were asked for, and there are some
  uint64_t counted_ = 0;         // of pages_, as those of a lease
  std::vector<Block*> found_;    // held: their pages keep these forms
  std::vector<bool> verified_;   // [blocks] lately
  std::vector<StoredPage> pages_;
  std::vector<uint64_t> checksums_;  // [pages]
  MissReason reason_ = MissReason::kNone;
  EvictionRun run_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<BlockReads>> MakeBlockReads(const BlockReadParts& parts,
                                                           const std::shared_ptr<Cache>& cache, uint32_t first,
                                                           absl::Span<const BlockName> names, const ReadRoom& room) {
  auto reads = std::make_unique<BlockReadsImpl>(parts, cache);
  reads->Find(first, names, room);
  if (room.mapped) KV_RETURN_IF_ERROR(reads->CountPages());
  return reads;
}

}  // namespace kvmanager
