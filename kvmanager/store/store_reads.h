// Attend and Load: what a batch of queries reads, or the pages of some tokens, in the form that rule 2 of page_store.h
// says.
//
// Where readers find pages by tables (MemoryBackend::follows_tables), a lease pins only the pages that it waits for:
// slots that a plan names stay until the plan is released. Elsewhere it lists the pages that are read, and pins them.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "codecs/page_attention.h"
#include "kvmanager/store/encode_jobs.h"
#include "kvmanager/store/lease_pages.h"
#include "kvmanager/store/long_call.h"
#include "kvmanager/store/sequence_table.h"

namespace kvmanager {

/// What a lease lists: reused, so that the hot path allocates little.
struct ReadBuffers {
  struct EncodedPage {
    PageRef ref;
    size_t at;  // in `pages`
  };
  std::vector<AttentionPage> pages;
  std::vector<EncodedPage> encoded;  // pages that are read encoded
  std::vector<PageRef> pins;
  std::vector<size_t> ends;           // by entry, in `pages`
  std::vector<uint32_t> aged;         // by entry
  std::vector<uint64_t> sparse_from;  // by entry
  void Clear() {
    pages.clear();
    encoded.clear();
    pins.clear();
    ends.clear();
    aged.clear();
    sparse_from.clear();
  }
};

class AttendLeaseImpl;

class StoreReads {
 public:
  /// Everything outlives it. alive: expires with the store.
  struct Parts {
    StoreMetrics* metrics = nullptr;
    CacheTable* caches = nullptr;
    BlockIndex* blocks = nullptr;
    EncodeJobs* encodes = nullptr;
    SequenceIndexes* indexes = nullptr;
    SequenceTable* sequences = nullptr;
    LeasePages* pages = nullptr;
    std::weak_ptr<const bool> alive;
  };

  explicit StoreReads(Parts parts) : parts_(std::move(parts)) {}
  StoreReads(const StoreReads&) = delete;
  StoreReads& operator=(const StoreReads&) = delete;

  /// PageStore's.
  absl::StatusOr<std::unique_ptr<AttendLease>> Attend(CacheId cache, LayerRange layers,
                                                      absl::Span<const AttendEntry> entries);
  absl::StatusOr<std::unique_ptr<AttendLease>> Load(CacheId cache, int layer, absl::Span<const AttendEntry> entries);
  /// LongCalls'.
  absl::StatusOr<std::unique_ptr<Listing>> BeginAttend(CacheId cache, int layer, absl::Span<const AttendEntry> entries);
  void OnLeftovers(std::function<void()> fn) { on_leftovers_ = std::move(fn); }
  bool ReleaseSome();
  /// Which leases read.
  LeasePages& pages() { return *parts_.pages; }
  const LeasePages& pages() const { return *parts_.pages; }

  // For the leases, and what makes them.
  static constexpr size_t kPagesAtOnce = 512;  // some 0.1 ms
  /// What a lease that goes has had.
  struct Done {
    std::shared_ptr<Cache> cache;
    ReadBuffers buffers;
    uint64_t counted = 0;  // pages
  };
  const Parts& parts() const { return parts_; }
  ReadBuffers TakeBuffers();
  /// Unpins its pages, many of them later.
  void GiveBack(Done done);
  /// That entry `i` can be read now, and its sequence.
  absl::Status CheckEntry(const Cache& cache, LayerRange layers, absl::Span<const AttendEntry> entries, size_t i,
                          Sequence** sequence) const;
  /// The same of all of them; adds up the pages that are read.
  absl::Status Check(const Cache& cache, LayerRange layers, absl::Span<const AttendEntry> entries,
                     std::vector<Sequence*>* sequences, uint64_t* pages) const;
  /// Gives the sequences' indexes the slots that the entries' queries need.
  absl::Status GiveSlots(const Cache& cache, LayerRange layers, absl::Span<const AttendEntry> entries,
                         absl::Span<Sequence* const> sequences);
  /// Behind the last entry. False: the lease waits.
  absl::StatusOr<bool> Finish(AttendLeaseImpl& lease);

 private:
  static constexpr size_t kSpareBuffersMax = 64;
  static constexpr size_t kSparePagesMax = 1 << 14;  // larger buffers are not kept

  // Some of its pages; with the last, all that it has had goes.
  void Unpin(Done& done);

  const Parts parts_;
  std::vector<ReadBuffers> spare_;
  std::deque<Done> left_;
  std::function<void()> on_leftovers_ = [] {};
};

}  // namespace kvmanager
