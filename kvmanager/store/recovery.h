// Published blocks of host memory over a restart: each is recorded in a manifest beside the memory while it can be
// found by its name, and a later process that is given both finds it again. On the store's thread.
//
// A recorded block is encoded, and nothing of it changes; it is taken out before it does. At a start the slots of all
// recorded blocks are taken before anything else is. A block is unclaimed until its cache is opened; then it becomes a
// block of that cache once somebody looks for it, and all of them a few in each turn. Its bytes are compared with their
// checksums before anybody reads them.
// Unclaimed blocks go before others of the same payer where room is short: last in memory first, so that slabs become
// free.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/node_hash_map.h"
#include "kvmanager/keep/kept_manifest.h"
#include "kvmanager/memory/page_pool.h"
#include "kvmanager/store/block_index.h"
#include "kvmanager/store/cache_table.h"
#include "kvmanager/store/tier.h"

namespace kvmanager {

class Recovery {
 public:
  /// Everything outlives it. manifest: nullptr: nothing is recorded.
  struct Parts {
    KeptManifest* manifest = nullptr;
    PagePool* pool = nullptr;  // the host's
    Tier* host = nullptr;
    StoreMetrics* metrics = nullptr;
    Tenants* tenants = nullptr;
    CacheTable* caches = nullptr;
    BlockIndex* blocks = nullptr;
  };

  explicit Recovery(const Parts& parts) : parts_(parts) {}
  Recovery(const Recovery&) = delete;
  Recovery& operator=(const Recovery&) = delete;

  /// Takes the slots of what an earlier process recorded. Once, before anything is allocated.
  void Recover();

  /// A block may have become one that can be recorded: it was named, or a page of it has its last form.
  void Record(Block* block);
  /// The block is found no more.
  void Forget(Block* block);

  /// A cache was opened: its blocks are claimed by name, and in turns.
  void NoteOpened(const std::shared_ptr<Cache>& cache);
  void OnLeftovers(std::function<void()> fn) { on_leftovers_ = std::move(fn); }
  /// LongCalls'. Claims some more: 0.2 ms. False: that was all.
  bool ClaimSome();

  /// TierOwner's, of the host: whether a payer has unclaimed blocks, and gives one up.
  bool HasUnclaimed(PayerId payer) const { return unclaimed_.contains(payer); }
  bool GiveUpUnclaimed(PayerId payer);

  /// Before blocks of a cache are dropped; nullptr: of all. Returns how many unclaimed ones there were.
  uint64_t Purge(const CacheDigest* digest);

  /// Blocks that no cache has taken so far.
  uint64_t unclaimed() const { return unclaimed_blocks_; }
  void CheckInvariants() const;

 private:
  struct Unclaimed {
    uint64_t entry = 0;  // of the manifest
    CacheDigest cache;
  };
  using ByPlace = absl::btree_map<uint32_t, Unclaimed>;  // number of the first page's slot
  /// Unclaimed blocks of one cache.
  struct OfCache {
    std::string tenant;  // held
    TenantId tenant_id = 0;
    PayerId payer = 0;
    uint64_t blocks = 0;
    uint64_t recorded = 0;  // that the manifest had
    // Places, also of blocks that are unclaimed no more: by the index in a sequence, the last first, and by the first
    // bytes of the key.
    std::map<uint32_t, std::vector<uint32_t>, std::greater<>> by_index;
    absl::flat_hash_map<uint64_t, uint32_t> by_key;
  };

  bool CanBeOf(const Cache& cache, const KeptBlock& block) const;
  /// The block at a place, if it is unclaimed and of this cache: held, and one of its blocks. nullptr: it is not.
  Block* Claim(const std::shared_ptr<Cache>& cache, uint32_t place);
  Block* Make(const std::shared_ptr<Cache>& cache, uint64_t entry, const KeptBlock& kept);
  /// PageTable's filler of `cache`.
  bool Fill(const std::shared_ptr<Cache>& cache, const BlockKey& key);
  void ReleaseHeld(size_t blocks_max);
  /// It is unclaimed no more; its slots are the caller's.
  KeptBlock TakeOut(PayerId payer, ByPlace::iterator unclaimed);
  void GiveUp(uint64_t entry, const KeptBlock& block);
  /// A block of this cache was taken out, and its slots are somebody's, or free.
  void Leave(const CacheDigest& cache);
  void ShowUnclaimed();

  const Parts parts_;
  absl::flat_hash_map<PayerId, ByPlace> unclaimed_;  // none empty
  absl::node_hash_map<CacheDigest, OfCache> caches_;
  uint64_t unclaimed_blocks_ = 0;
  std::deque<std::shared_ptr<Cache>> claiming_;  // each has a lease
  // Claimed by name, and held until the next turn: giving them up may do anything, which no lookup expects.
  std::vector<Block*> held_;
  std::function<void()> on_leftovers_ = [] {};
};

}  // namespace kvmanager
