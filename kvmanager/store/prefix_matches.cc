#include "kvmanager/store/prefix_matches.h"

#include <algorithm>
#include <utility>

#include "absl/container/inlined_vector.h"

namespace kvmanager {
namespace {

constexpr size_t kNamesOfPiece = 128;  // that are looked for: some 0.05 ms
constexpr size_t kBlocksOfPiece = 32;  // that are used, with 32 pages each: some 0.1 ms

// First it walks along the names; then it uses what was found, from the last block on.
class PrefixMatchImpl final : public PrefixMatch {
 public:
  PrefixMatchImpl(PrefixMatchParts parts, CacheId cache, std::vector<BlockName> names)
      : parts_(std::move(parts)), id_(cache), names_(std::move(names)) {}

  bool DoPiece() override {
    if (parts_.alive.expired()) {
      status_ = absl::UnavailableError("the daemon is stopping");
      return false;
    }
    auto found = parts_.caches->Find(id_);
    if (status_ = found.status(); !status_.ok()) return false;
    cache_ = found->get();
    // Of the next lower tier pages move up by themselves; the disk's come by way of the host.
    const bool moves = cache_->tier->can_move();
    const std::shared_ptr<Cache> lower = moves ? parts_.caches->FindIn(cache_->digest, cache_->tier->lower()) : nullptr;
    lower_ = lower.get();
    arrives_ = moves || parts_.disk != nullptr;
    return walked_ ? UseSome() : Walk();
  }
  absl::StatusOr<MatchResult> result() const override {
    if (!status_.ok()) return status_;
    return result_;
  }

 private:
  bool Walk() {
    for (size_t looked = 0; looked < kNamesOfPiece; ++looked) {
      const size_t at = static_cast<size_t>(result_.hit_blocks);
      if (at == names_.size() || !IsThere(names_[at], static_cast<uint32_t>(at), &result_.reason)) {
        walked_ = true;
        unused_ = at;
        if (result_.reason != MissReason::kNone) {
          parts_.metrics->prefix_misses[static_cast<size_t>(result_.reason)]->Increment();
        }
        return unused_ > 0;
      }
      ++result_.hit_blocks;
    }
    return true;
  }
  bool IsThere(const BlockName& name, uint32_t index, MissReason* reason) const {
    if (cache_->table.Find(name, index, reason) != nullptr) return true;
    if (*reason != MissReason::kNotFound) return false;
    if (arrives_) {
      const auto arriving = cache_->arriving.find(name.key);
      if (arriving != cache_->arriving.end() && Is(*arriving->second, name, index)) return Hit(reason);
    }
    if (lower_ != nullptr && lower_->table.Find(name, index, reason) != nullptr) return true;
    if (*reason != MissReason::kNotFound || parts_.disk == nullptr) return false;
    const DiskBlock* const there = parts_.disk->Find(cache_->digest, name.key);
    if (there == nullptr) return false;
    if (there->index == index && there->tokens == name.tokens) return Hit(reason);
    *reason = MissReason::kTokenMismatch;
    return false;
  }
  static bool Is(const Block& block, const BlockName& name, uint32_t index) {
    return block.index == index && block.name.tokens == name.tokens;
  }
  static bool Hit(MissReason* reason) {
    *reason = MissReason::kNone;
    return true;
  }

  // Of a chain, children first (EvictionPolicy): also of those of one piece.
  bool UseSome() {
    const size_t first = unused_ - std::min(unused_, kBlocksOfPiece);
    for (; unused_ > first; --unused_) {
      const BlockName& name = names_[unused_ - 1];
      const uint32_t index = static_cast<uint32_t>(unused_ - 1);
      MissReason reason = MissReason::kNone;
      Block* block = parts_.blocks->Find(*cache_, name, index, BlockIndex::Bytes::kTrust, &reason);
      if (block == nullptr && lower_ != nullptr) {
        block = parts_.blocks->Find(*lower_, name, index, BlockIndex::Bytes::kTrust, &reason);
      }
      if (block != nullptr) parts_.blocks->Release(block);
    }
    return unused_ > 0;
  }

  const PrefixMatchParts parts_;
  const CacheId id_;
  const std::vector<BlockName> names_;
  // In a piece alone.
  Cache* cache_ = nullptr;
  Cache* lower_ = nullptr;  // its counterpart, from which pages move up
  bool arrives_ = false;    // blocks may be on their way to its memory
  bool walked_ = false;
  size_t unused_ = 0;  // of the hits
  MatchResult result_;
  absl::Status status_;
};

}  // namespace

std::unique_ptr<PrefixMatch> MakePrefixMatch(PrefixMatchParts parts, CacheId cache, std::vector<BlockName> names) {
  return std::make_unique<PrefixMatchImpl>(std::move(parts), cache, std::move(names));
}

}  // namespace kvmanager
