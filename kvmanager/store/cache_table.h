// Open caches by number and by digest; the owner of tiers. Caches of equal digest are one cache in several memories:
// counterparts. On the store's thread.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/owner_counts.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/store/block_index.h"
#include "kvmanager/store/cache.h"
#include "kvmanager/store/cache_directory.h"
#include "kvmanager/store/lease_pages.h"
#include "kvmanager/store/store_metrics.h"
#include "kvmanager/store/tenants.h"
#include "kvmanager/store/tier.h"

namespace kvmanager {

class CacheTable final : public CacheDirectory {
 public:
  /// Everything outlives it.
  struct Parts {
    const CodecRegistry* registry = nullptr;
    StoreMetrics* metrics = nullptr;
    const std::vector<std::unique_ptr<Tier>>* tiers = nullptr;
    BlockIndex* blocks = nullptr;
    Tenants* tenants = nullptr;
    LeasePages* mapped_pages = nullptr;
    BlockDisk* disk = nullptr;  // nullptr: there is none
    const Clock* clock = nullptr;
    std::function<uint64_t(const CacheDigest*)> before_purge;  // of one cache, or of all: what goes besides
    std::function<void(const std::shared_ptr<Cache>&)> after_open;
    std::weak_ptr<const bool> alive;
  };

  explicit CacheTable(Parts parts) : parts_(std::move(parts)) {}

  using CacheDirectory::Open;
  absl::StatusOr<CacheId> Open(const CacheConfig& config, std::shared_ptr<const Codec> codec) override;
  absl::StatusOr<CacheInfo> Describe(CacheId cache) const override;
  std::vector<CacheInfo> List() const override;
  void ForEachUse(absl::FunctionRef<void(const CacheUse&)> visit) const override;
  std::optional<CacheId> FindOpen(const CacheDigest& digest, int device) const override {
    const auto found = by_digest_.find({digest, device});
    return found == by_digest_.end() ? std::nullopt : std::make_optional(found->second);
  }
  std::shared_ptr<const Codec> codec(CacheId cache) const override;
  const PageAttention* raw_attention(CacheId cache) const override;
  absl::StatusOr<std::unique_ptr<PrefixMatch>> BeginMatch(CacheId cache, std::vector<BlockName> names) override;
  absl::StatusOr<std::unique_ptr<Retaining>> BeginRetain(CacheId cache, std::vector<BlockName> names, uint32_t priority,
                                                         uint64_t ttl_ms) override;
  absl::StatusOr<std::unique_ptr<BlockCheck>> Check(CacheId cache, absl::Span<const BlockName> names) override;
  absl::StatusOr<std::unique_ptr<BlockReads>> ReadBlocks(CacheId cache, uint32_t first,
                                                         absl::Span<const BlockName> names,
                                                         const ReadRoom& room) override;
  absl::StatusOr<std::unique_ptr<BlockWrites>> WriteBlocks(CacheId cache, uint32_t first,
                                                           absl::Span<const BlockName> names,
                                                           absl::Span<const uint8_t> raw) override;
  absl::StatusOr<uint64_t> Purge(CacheId cache) override;
  uint64_t PurgeAll() override;

  // For the store's other parts.
  absl::StatusOr<std::shared_ptr<Cache>> Find(CacheId id) const;
  /// codec: may be nullptr. codec_version: the one the caller's bytes have; nullptr for any.
  absl::StatusOr<std::shared_ptr<Cache>> FindOrOpen(const CacheConfig& config, std::shared_ptr<const Codec> codec,
                                                    const uint32_t* codec_version);
  void CloseIfUnused(const std::shared_ptr<Cache>& cache);
  Tier* TierOf(int device) const;  // nullptr: there is none
  /// The cache of this digest in a tier; nullptr: it is not open there, or there is no such tier (nullptr).
  std::shared_ptr<Cache> FindIn(const CacheDigest& digest, const Tier* tier) const;
  /// The cache of equal digest in another tier, opened where it is not.
  absl::StatusOr<std::shared_ptr<Cache>> OpenCounterpart(const Cache& cache, const Tier& tier);
  /// BlockIndex::FindPrefix, also in the next lower tier where pages move.
  std::vector<Block*> FindPrefix(Cache& cache, absl::Span<const BlockName> names, BlockIndex::Bytes bytes,
                                 MatchResult* match) const;
  /// Errors: INVALID_ARGUMENT beyond kNamesMax.
  static absl::Status CheckNames(absl::Span<const BlockName> names);
  const std::map<CacheId, std::shared_ptr<Cache>>& all() const { return caches_; }
  const OwnerCounts<PayerId>& of_payers() const { return of_payer_; }  // how many of them
  void CheckInvariants() const;

 private:
  // For whom it is a CacheDirectory alone.
  absl::StatusOr<std::unique_ptr<SlabBinding>> BeginBind(CacheId cache, uint64_t bytes) override;
  absl::StatusOr<ShownSlab> ShowSlab(CacheId cache, uint32_t slab) override;
  void WhenPurged(absl::AnyInvocable<void(absl::Status)> done) override {
    if (parts_.disk == nullptr) return done(absl::OkStatus());
    parts_.disk->WhenErased(std::move(done));
  }

  /// Room for one more cache of a payer. Errors: RESOURCE_EXHAUSTED.
  absl::Status MakePlace(PayerId payer);
  /// Of the unused ones, and of a payer where one is given; false: there is none.
  bool CloseLeastRecentlyOpened(const PayerId* payer);
  static CacheInfo InfoOf(const Cache& cache);
  uint64_t PurgeOne(Cache& cache);
  /// The cache, if it is in host memory and so many blocks from `first` on can be one transfer.
  absl::StatusOr<std::shared_ptr<Cache>> FindForTransfer(CacheId id) const;
  absl::StatusOr<std::shared_ptr<Cache>> FindForTransfer(CacheId id, uint32_t first, size_t blocks) const;

  const Parts parts_;
  CacheId next_cache_ = 1;
  uint64_t opens_ = 0;
  std::map<CacheId, std::shared_ptr<Cache>> caches_;
  absl::flat_hash_map<std::pair<CacheDigest, int>, CacheId> by_digest_;  // and device
  OwnerCounts<PayerId> of_payer_;                                        // how many
  absl::btree_map<uint64_t, Cache*> by_opened_;                          // the least recently opened first
};

}  // namespace kvmanager
