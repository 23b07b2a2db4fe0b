#include "kvmanager/store/block_reads.h"

#include <utility>
#include <vector>

#include "kvmanager/store/page_bytes.h"

namespace kvmanager {
namespace {

class BlockReadsImpl final : public BlockReads {
 public:
  BlockReadsImpl(BlockIndex* index, std::shared_ptr<Cache> cache, std::weak_ptr<const bool> alive)
      : index_(index), cache_(std::move(cache)), alive_(std::move(alive)) {
    ++cache_->leases;
  }
  ~BlockReadsImpl() override {
    if (alive_.expired()) return;
    // Of a chain, children first (EvictionPolicy).
    for (; !found_.empty(); found_.pop_back()) {
      index_->ForgetHolder(found_.back());
      index_->Release(found_.back(), &run_);
    }
    --cache_->leases;
  }

  void Find(uint32_t first, absl::Span<const BlockName> names, uint64_t bytes_max, uint64_t align) {
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
      for (size_t i = before; i < pages_.size(); ++i) bytes += (pages_[i].bytes + align - 1) / align * align;
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
      for (const Page& page : block->pages) checksums_.push_back(page.checksum);
    }
    index_->CountHits(match, tiers);
  }

  size_t blocks() const override { return found_.size(); }
  MissReason reason() const override { return reason_; }
  absl::Span<const StoredPage> pages() const override { return pages_; }
  bool Verify(size_t page) const override {
    if (verified_[page / cache_->layers()]) return true;
    const StoredPage& stored = pages_[page];
    return cache_->tier->memory().Checksum(stored.data, stored.bytes) == checksums_[page];
  }
  void NoteVerified(size_t intact, bool corrupt) override {
    if (alive_.expired()) return;
    for (size_t i = 0; i < intact; ++i) {
      if (!verified_[i]) index_->NoteCompared(found_[i], /*intact=*/true);
    }
    if (corrupt) index_->NoteCompared(found_[intact], /*intact=*/false);
  }

 private:
  // Adds the block's pages. False: one is still to be encoded.
  bool List(const Block& block, MissReason* reason) {
    for (uint32_t layer = 0; layer < block.pages.size(); ++layer) {
      const Page& page = block.pages[layer];
      if (page.state != PageState::kResident) {
        *reason = MissReason::kIncomplete;
        return false;
      }
      const bool encoded = page.encoded.valid();
      const size_t bytes = encoded ? cache_->page_bytes(layer) : cache_->layout().raw_bytes();
      pages_.push_back({PageData(*cache_, encoded ? page.encoded : page.raw), static_cast<uint32_t>(bytes), layer,
                        /*raw=*/!encoded});
    }
    return true;
  }

  BlockIndex* const index_;
  const std::shared_ptr<Cache> cache_;  // shared: see Block
  const std::weak_ptr<const bool> alive_;
  std::vector<Block*> found_;   // held: their pages keep these forms
  std::vector<bool> verified_;  // [blocks] lately
  std::vector<StoredPage> pages_;
  std::vector<uint64_t> checksums_;  // [pages]
  MissReason reason_ = MissReason::kNone;
  EvictionRun run_;
};

}  // namespace

std::unique_ptr<BlockReads> MakeBlockReads(BlockIndex* blocks, const std::shared_ptr<Cache>& cache, uint32_t first,
                                           absl::Span<const BlockName> names, uint64_t bytes_max, uint64_t align,
                                           std::weak_ptr<const bool> alive) {
  auto reads = std::make_unique<BlockReadsImpl>(blocks, cache, std::move(alive));
  reads->Find(first, names, bytes_max, align);
  return reads;
}

}  // namespace kvmanager
