#include "kvmanager/store/prefix_matches.h"

#include <algorithm>
#include <utility>

#include "kvmanager/store/prefix_walk.h"

namespace kvmanager {
namespace {

constexpr size_t kNamesOfPiece = 128;   // that are looked for: some 0.05 ms
constexpr size_t kBlocksOfPiece = 128;  // that are used: likewise

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
    // Of the next lower tier pages move up by themselves; the disk's come by way of the host.
    const bool moves = (*found)->tier->can_move();
    const std::shared_ptr<Cache> lower =
        moves ? parts_.caches->FindIn((*found)->digest, (*found)->tier->lower()) : nullptr;
    if (walked_) return UseSome({{found->get()}, {lower.get()}});
    return Walk({{found->get(), /*arriving=*/moves || parts_.disk != nullptr}, {lower.get()}, parts_.disk});
  }
  absl::StatusOr<MatchResult> result() const override {
    if (!status_.ok()) return status_;
    return result_;
  }
  std::vector<BlockName> TakeHits() override {
    names_.resize(static_cast<size_t>(result_.hit_blocks));
    return std::move(names_);
  }

 private:
  bool Walk(const PrefixPlaces& places) {
    for (size_t looked = 0; looked < kNamesOfPiece; ++looked) {
      const size_t at = static_cast<size_t>(result_.hit_blocks);
      NextBlock next;
      if (at < names_.size()) {
        next = FindNextBlock(places, names_[at], static_cast<uint32_t>(at));
        result_.reason = next.reason;
      }
      if (at == names_.size() || result_.reason != MissReason::kNone) {
        walked_ = true;
        unused_ = at;
        if (result_.reason != MissReason::kNone) {
          parts_.metrics->prefix_misses[static_cast<size_t>(result_.reason)]->Increment();
        }
        return unused_ > 0;
      }
      const bool in_memory = next.place == BlockPlace::kMemory && next.block->cache == places.own.cache;
      if (in_memory && result_.in_memory == result_.hit_blocks) ++result_.in_memory;
      ++result_.hit_blocks;
    }
    return true;
  }

  // Of a chain, children first (EvictionPolicy): also of those of one piece.
  bool UseSome(const PrefixPlaces& memories) {
    const size_t first = unused_ - std::min(unused_, kBlocksOfPiece);
    for (; unused_ > first; --unused_) {
      Block* const block = FindNextBlock(memories, names_[unused_ - 1], static_cast<uint32_t>(unused_ - 1)).block;
      if (block != nullptr) parts_.blocks->NoteUse(block);
    }
    return unused_ > 0;
  }

  const PrefixMatchParts parts_;
  const CacheId id_;
  std::vector<BlockName> names_;
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
