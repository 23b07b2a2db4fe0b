// Attend and Load: what a batch of queries reads, or the pages of some tokens, in the form that rule 2 of page_store.h
// says.
//
// Where readers find pages by tables (MemoryBackend::follows_tables), a lease pins only the pages that it waits for:
// slots that a plan names stay until the plan is released. Elsewhere it lists the pages that are read, and pins them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "codecs/page_attention.h"
#include "kvmanager/store/encode_jobs.h"
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
  std::vector<size_t> ends;            // by entry, in `pages`
  std::vector<uint32_t> aged;          // by entry
  std::vector<uint64_t> chooses_from;  // by entry
  void Clear() {
    pages.clear();
    encoded.clear();
    pins.clear();
    ends.clear();
    aged.clear();
    chooses_from.clear();
  }
};

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
    std::weak_ptr<const bool> alive;
  };

  explicit StoreReads(Parts parts) : parts_(std::move(parts)) {}
  StoreReads(const StoreReads&) = delete;
  StoreReads& operator=(const StoreReads&) = delete;

  /// PageStore's.
  absl::StatusOr<std::unique_ptr<AttendLease>> Attend(CacheId cache, LayerRange layers,
                                                      absl::Span<const AttendEntry> entries);
  absl::StatusOr<std::unique_ptr<AttendLease>> Load(CacheId cache, int layer, absl::Span<const AttendEntry> entries);
  /// Whether leases may pin `pages` more. Errors: RESOURCE_EXHAUSTED.
  absl::Status CheckPages(uint64_t pages) const;
  uint64_t lease_pages() const { return pages_; }

  // For the leases.
  const Parts& parts() const { return parts_; }
  ReadBuffers TakeBuffers();
  /// Its pages are pinned no more.
  void GiveBack(ReadBuffers buffers);
  void CountPage() { ++pages_; }

 private:
  static constexpr size_t kSpareBuffersMax = 64;
  static constexpr size_t kSparePagesMax = 1 << 14;  // larger buffers are not kept

  absl::Status Check(const Cache& cache, LayerRange layers, absl::Span<const AttendEntry> entries,
                     std::vector<Sequence*>* sequences, uint64_t* pages) const;

  const Parts parts_;
  std::vector<ReadBuffers> spare_;
  uint64_t pages_ = 0;  // pinned by all leases
};

}  // namespace kvmanager
