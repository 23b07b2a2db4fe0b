// The pages of every cache and sequence of this daemon. This header has the store's face; its parts are
//
//   what        interface            made by
//   caches      cache_directory.h    cache_table.h, block_index.h (blocks by name), tier.h (slots, eviction)
//   sequences   this, long_call.h    sequence_table.h, sequence_beginnings.h, publications.h, sequence_indexes.h
//   steps       step_lease.h         store_appends.h, store_reads.h, encode_jobs.h, memory_backend.h (host, GPU)
//   tables      slot_tables.h        table_changes.h
//   tiers       arrival_lease.h      sequence_arrivals.h, block_moves.h, mover.h
//   the disk    disk_load.h          disk_loads.h, disk_writes.h
//   hand-offs   hand_off_lease.h     sequence_exports.h, exported_sequence.h, host_export.h, sequence_imports.h
//   the whole   store_report.h       store_inspector.h (invariants), explanations.h, gone_blocks.h (how blocks went)
//
// Single-threaded: every method is called on the store's thread (the daemon's event loop). Workers and transports touch
// only the bytes of pages that a lease (AttendLease, ExportLease, an import's targets, an encode job) keeps pinned;
// their completions come back to the store's thread as messages. Nothing here blocks or locks.
//
// Rules (docs/design.md, sections 1 and 5):
//  1. A page is appended raw, sealed when full, encoded once, immutable from the seal on.
//  2. What a query reads depends on the sequence's own operations alone, never on timing: of the pages that its
//     sequence appended, its own page and the `lag_pages` before it raw, older ones encoded. A page has *aged* for a
//     sequence and layer once an append began at a position more than lag_pages pages beyond it, or a crop took tokens
//     away whose newest was that far; it is read encoded from then on. So after a crop nothing depends on how the
//     tokens had been cut into appends. Pages that came by a prefix hit are aged from the start.
//  3. A page's raw form stays while some sequence has not aged it, or a lease reads it, or the codec declined it.
//  4. Batches are all or nothing: an error changes no sequence.
//  5. Of a codec that chooses what queries read, each sequence has an index (codecs/sequence_index.h). Its jobs run
//     behind attention, as encoding does, and begin as soon as their tokens are there; a query that needs one waits.
//  6. A block that a sequence begins with is verified: key, token digest and, in host memory, checksums (XXH3) of its
//     encoded pages. A mismatch is a counted miss. Bytes of a GPU are verified when they leave it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "codecs/registry.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/status.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/eviction/eviction_policy.h"
#include "kvmanager/memory/page_mover.h"
#include "kvmanager/memory/page_pool.h"
#include "kvmanager/memory/release_epochs.h"
#include "kvmanager/store/append_lease.h"
#include "kvmanager/store/arrival_lease.h"
#include "kvmanager/store/cache_directory.h"
#include "kvmanager/store/hand_off_lease.h"
#include "kvmanager/store/long_call.h"
#include "kvmanager/store/page_executor.h"
#include "kvmanager/store/quotas.h"
#include "kvmanager/store/slot_tables.h"
#include "kvmanager/store/step_lease.h"
#include "kvmanager/store/store_device.h"
#include "kvmanager/store/store_metrics.h"
#include "kvmanager/store/store_report.h"

namespace kvmanager {

class KeptManifest;

/// Whether a call was refused since it is not for pages of this memory: FAILED_PRECONDITION naming `device`.
inline bool IsWrongMemory(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) && DetailOf(status).field == "device";
}

class PageStore {
 public:
  /// Everything given outlives the store. `registry` knows "raw", whose attention serves raw pages of every cache.
  /// `metrics` belongs to this store alone. disk: nullptr: none. manifest: where blocks of `pool` are recorded, and
  /// those of an earlier process are found (Recovery); nullptr: nowhere. Leases and encode jobs may end after the
  /// store: they then do nothing.
  static std::unique_ptr<PageStore> Make(PagePool* pool, const CodecRegistry* registry, EncodeExecutor* executor,
                                         StoreMetrics* metrics, const Clock* clock,
                                         absl::Span<const StoreDevice> devices = {},
                                         EvictionKind eviction = EvictionKind::kLru, BlockDisk* disk = nullptr,
                                         KeptManifest* manifest = nullptr);
  virtual ~PageStore() = default;

  virtual Appends& appends() = 0;
  virtual LongCalls& long_calls() = 0;
  virtual CacheDirectory& caches() = 0;
  virtual SlotTables& tables() = 0;
  virtual Exports& exports() = 0;
  virtual Imports& imports() = 0;
  virtual StoreReport& report() = 0;

  /// A new sequence that begins with the blocks found: find and pin are one step. prompt_tokens: for codecs whose
  /// queries choose what they read behind the prompt, its length; 0: the prompt ends where the first append of a single
  /// token begins. Errors: INVALID_ARGUMENT (beyond a sequence's limit).
  absl::StatusOr<CreateResult> Create(CacheId cache, absl::Span<const BlockName> prefix, uint64_t prompt_tokens = 0) {
    KV_ASSIGN_OR_RETURN(const auto beginning, long_calls().Begin(cache, {prefix.begin(), prefix.end()}, prompt_tokens));
    beginning->DoAll();
    return beginning->Commit();
  }
  /// Like Create, but also fetches blocks that only the next lower tier has; concurrent callers share one fetch.
  /// Errors: Create's.
  virtual absl::StatusOr<std::unique_ptr<ArrivalLease>> Fetch(CacheId cache, absl::Span<const BlockName> prefix,
                                                              uint64_t prompt_tokens = 0) = 0;
  /// A sequence like this one in another memory of its cache: `device`, or CacheConfig::kHost; one of the two is the
  /// host. It has the same tokens and reads the same forms; the other stays as it is and may go on. What was appended
  /// must be there. Errors: FAILED_PRECONDITION (layers of different lengths; no such memory, or none that moves
  /// pages); UNAVAILABLE (pages cannot move yet).
  virtual absl::StatusOr<std::unique_ptr<ArrivalLease>> Copy(SequenceId sequence, int device) = 0;
  virtual absl::StatusOr<SequenceInfo> Describe(SequenceId sequence) const = 0;

  /// Appends::Append.
  absl::Status Append(CacheId cache, LayerRange layers, absl::Span<const AppendEntry> entries) {
    return appends().Append(cache, layers, entries);
  }
  /// What the entries' queries read: of one layer in host memory, where its pages are listed. Errors: as Append's; of
  /// memory where an index that queries choose by takes slots; the lease's, if it is ready; FAILED_PRECONDITION where
  /// the layers are not equally old.
  virtual absl::StatusOr<std::unique_ptr<AttendLease>> Attend(CacheId cache, LayerRange layers,
                                                              absl::Span<const AttendEntry> entries) = 0;
  /// Pins the pages of the entries' tokens, each in the one form that the sequence reads it in, whatever the query: raw
  /// while it has not aged there, else encoded, or raw where the codec declined it. The lease's pages(i) begin with the
  /// page of token entries[i].position, and it has no selectors. Of a cache on a GPU the addresses are the device's,
  /// and raw ones hold what kernels have written by then. Errors: Attend's.
  virtual absl::StatusOr<std::unique_ptr<AttendLease>> Load(CacheId cache, int layer,
                                                            absl::Span<const AttendEntry> entries) = 0;

  /// Needs equal token counts in all layers. Shares sealed pages, copies open ones. copies: what kernels are to copy.
  absl::StatusOr<SequenceId> Fork(SequenceId sequence) {
    std::vector<OpenCopy> none;  // where the memory copies at once
    auto fork = Fork(sequence, &none);
    KV_CHECK(none.empty());
    return fork;
  }
  virtual absl::StatusOr<SequenceId> Fork(SequenceId sequence, std::vector<OpenCopy>* copies) = 0;
  /// Keeps the first `tokens` tokens of every layer; a layer that has no more than that stays as it is. Errors:
  /// FAILED_PRECONDITION naming the boundary below when that is inside a page that is aged, by the newest token at the
  /// latest; INVALID_ARGUMENT beyond the end.
  absl::Status Crop(SequenceId sequence, uint64_t tokens) {
    std::vector<OpenCopy> none;
    absl::Status status = Crop(sequence, tokens, &none);
    KV_CHECK(none.empty());
    return status;
  }
  virtual absl::Status Crop(SequenceId sequence, uint64_t tokens, std::vector<OpenCopy>* copies) = 0;
  /// Names the sequence's first blocks, which must be full in every layer. Errors: FAILED_PRECONDITION (not full, or
  /// named differently before), INVALID_ARGUMENT (the key exists with other tokens).
  absl::StatusOr<PublishResult> Publish(SequenceId sequence, absl::Span<const BlockName> names) {
    KV_ASSIGN_OR_RETURN(const auto publication, long_calls().BeginPublish(sequence, {names.begin(), names.end()}));
    publication->DoAll();
    return publication->result();
  }
  /// Gives the sequence back; pages under a lease go when the lease does.
  virtual void Drop(SequenceId sequence) = 0;
};

}  // namespace kvmanager
