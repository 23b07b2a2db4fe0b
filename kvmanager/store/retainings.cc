#include "kvmanager/store/retainings.h"

#include <algorithm>
#include <utility>

namespace kvmanager {
namespace {

constexpr size_t kNamesOfPiece = 32;  // each in every memory and on the disk: some 0.2 ms

class RetainingImpl final : public Retaining {
 public:
  RetainingImpl(RetainingParts parts, CacheId cache, std::vector<BlockName> names, const Retention& retention)
      : parts_(std::move(parts)), id_(cache), names_(std::move(names)), retention_(retention) {}

  bool DoPiece() override {
    if (parts_.alive.expired()) {
      status_ = absl::UnavailableError("the daemon is stopping");
      return false;
    }
    const auto found = parts_.caches->Find(id_);
    if (status_ = found.status(); !status_.ok()) return false;
    const CacheDigest digest = (*found)->digest;
    for (const auto& tier : *parts_.tiers) {
      if (const auto cache = parts_.caches->FindIn(digest, tier.get())) copies_.push_back(cache);
    }
    const size_t end = std::min(done_ + kNamesOfPiece, names_.size());
    // What is to go early goes from the end on: no parent before its children, if some of them go between two pieces.
    const bool backwards = retention_.priority() < Retention::kOfPolicy;
    for (; done_ < end; ++done_) RetainOne(digest, names_[backwards ? names_.size() - 1 - done_ : done_]);
    copies_.clear();
    return done_ < names_.size();
  }
  absl::StatusOr<RetainResult> result() const override {
    if (!status_.ok()) return status_;
    return result_;
  }

 private:
  // Tokens that are all zeros are not known.
  static bool IsNamed(const TokenDigest& tokens, const BlockName& name) {
    return name.tokens == TokenDigest() || name.tokens == tokens;
  }
  void RetainOne(const CacheDigest& digest, const BlockName& name) {
    bool found = false;
    for (const std::shared_ptr<Cache>& cache : copies_) {
      Block* const block = cache->table.FindKey(name.key);
      if (block == nullptr || !IsNamed(block->name.tokens, name)) continue;
      cache->tier->eviction().Retain(block, retention_);
      result_.bytes += block->bytes;
      found = true;
    }
    const DiskBlock* const there = parts_.disk == nullptr ? nullptr : parts_.disk->Find(digest, name.key);
    if (there != nullptr && IsNamed(there->tokens, name)) {
      result_.bytes += parts_.disk->Retain(digest, name.key, retention_);
      found = true;
    }
    result_.blocks += found;
  }

  const RetainingParts parts_;
  const CacheId id_;
  const std::vector<BlockName> names_;
  const Retention retention_;
  std::vector<std::shared_ptr<Cache>> copies_;  // in a piece alone: the cache in each memory where it is open
  size_t done_ = 0;
  RetainResult result_;
  absl::Status status_;
};

}  // namespace

std::unique_ptr<Retaining> MakeRetaining(RetainingParts parts, CacheId cache, std::vector<BlockName> names,
                                         const Retention& retention) {
  return std::make_unique<RetainingImpl>(std::move(parts), cache, std::move(names), retention);
}

}  // namespace kvmanager
