// Published blocks of host memory that are copied to the disk: each soon after it was named, so that a restart finds
// it, and at the latest when room is short. On the store's thread.
//
// A block is written in the form that stays, once all of its pages are encoded; its pages are pinned meanwhile. Once it
// is durable the host's tier may evict it and loses nothing (Evictable::kept). What the disk does not take now is
// written later, or evicted without having been written: room in memory does not wait for the disk.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kvmanager/base/owner_counts.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/store/block_index.h"
#include "kvmanager/store/cache_table.h"
#include "kvmanager/store/encode_jobs.h"
#include "kvmanager/store/tier.h"

namespace kvmanager {

class DiskWrites {
 public:
  // Blocks that wait, of all and of one payer; what is named beyond that is written when room is short, if ever.
  static constexpr size_t kQueuedMax = 1 << 17, kPayerQueuedMax = kQueuedMax / 2;
  /// Of host memory that is pinned for being written: one part in so many, or one block.
  static constexpr uint64_t kPinnedShare = 16;

  /// Everything outlives it. disk: nullptr: there is none, and nothing is written.
  struct Parts {
    BlockDisk* disk = nullptr;
    StoreMetrics* metrics = nullptr;
    Tier* host = nullptr;
    CacheTable* caches = nullptr;
    BlockIndex* blocks = nullptr;
    EncodeJobs* encodes = nullptr;
    GoneBlocks* gone = nullptr;  // is told of each that the disk lets go
    std::weak_ptr<const bool> alive;
  };

  explicit DiskWrites(const Parts& parts);
  ~DiskWrites();
  DiskWrites(const DiskWrites&) = delete;
  DiskWrites& operator=(const DiskWrites&) = delete;

  /// A block was named: it is written behind those named before, unless the disk has it.
  void NoteNamed(Block* block);
  /// `fn` is called when there is something for WriteSome.
  void OnLeftovers(std::function<void()> fn) {
    on_leftovers_ = std::move(fn);
    if (asked_) on_leftovers_();
  }
  /// Starts to write what is next, a few blocks: 0.1 ms. False: no more can be begun now.
  bool WriteSome();
  /// LongCalls': the disk may take blocks again.
  void TryAgain() {
    if (named_.empty()) return;
    asked_ = true;
    on_leftovers_();
  }
  /// TierOwner's, of blocks in host memory.
  bool WritesSoon() const { return parts_.disk != nullptr && parts_.disk->TakesWrites(); }
  bool CanDemote() const { return parts_.disk != nullptr && HasRoom(0) && parts_.disk->CanWrite(0); }
  bool Demote(Block* block);

  /// Before published blocks of a cache are dropped; nullptr: of all. Those that only their writes pin lose their names
  /// here; returns how many.
  uint64_t NotePurge(const CacheDigest* digest);

  /// Blocks that are being written, or wait for that. Not all that the disk lacks: not those named while kQueuedMax
  /// waited, nor unclaimed ones of an earlier process (Recovery), nor those that are not written by intent (lowered
  /// ones, and such as the disk has no room for).
  size_t unwritten() const { return named_.size() + writing_.size(); }

  /// For CheckInvariants.
  uint64_t demoting_bytes() const { return demoting_bytes_; }

 private:
  struct Named {
    CacheId cache = 0;
    BlockKey key;
    PayerId payer = 0;
  };
  /// Waits until the pages of the block that is next are encoded.
  class Waiting;

  void PopNamed();
  bool HasRoom(uint64_t bytes) const;
  /// Else the block is never written.
  bool MayFit(uint64_t bytes) const;
  void ShowUnwritten();
  void Ask();
  bool WriteNext();
  /// Pins the block's pages until they are written. demotes: counted in its tier's bytes().demoting.
  void Start(Block* block, bool demotes);
  void End(Block* block, const BlockKey& key, uint64_t bytes, bool demotes, bool durable);
  void OnGone(const CacheDigest& cache, const BlockKey& key, DiskLoss loss);

  const Parts parts_;
  std::deque<Named> named_;                    // to be written, the first named first
  OwnerCounts<PayerId> named_of_;              // of named_
  std::unique_ptr<Waiting> waiting_;           // for the first of them; nullptr: for nothing
  absl::flat_hash_map<Block*, bool> writing_;  // whether it was purged meanwhile
  uint64_t pinned_bytes_ = 0, demoting_bytes_ = 0;
  std::function<void()> on_leftovers_ = [] {};
  bool asked_ = false;            // for a turn
  const Cache* taker_ = nullptr;  // whose block the disk is being given: it makes room for that
};

}  // namespace kvmanager
