// The pages of every cache and sequence of this daemon: the one owner of their states, and the sole caller of
// transitions.
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
//  4. Batches are all or nothing: an error changes nothing.
//  5. Of a codec that chooses what queries read, each sequence has an index (codecs/sequence_index.h). Its jobs run
//     behind attention, as encoding does, and begin as soon as their tokens are there; a query that needs one waits.
//  6. A found block is verified: key, token digest, and each page's checksum (XXH3); a mismatch is a counted miss.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "codecs/codec.h"
#include "codecs/page_attention.h"
#include "codecs/registry.h"
#include "codecs/sequence_index.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/page_mover.h"
#include "kvmanager/memory/page_pool.h"
#include "kvmanager/memory/release_epochs.h"
#include "kvmanager/store/cache_config.h"
#include "kvmanager/store/hand_off_lease.h"
#include "kvmanager/store/miss_reason.h"
#include "kvmanager/store/store_ids.h"
#include "kvmanager/store/store_metrics.h"

namespace kvmanager {

/// Training of one layer's index on a GPU: the keys are copied to the host and given to the job's tasks, whose image
/// goes to `image` and is completed there (DeviceChoice::LaunchPrepareIndexes). All addresses are the device's.
struct DeviceIndexJob {
  SequenceId sequence = 0;
  std::shared_ptr<IndexJob> job;
  std::vector<const uint8_t*> pages;  // raw form; the keys are their first halves
  uint64_t key_bytes = 0;             // of a page
  uint8_t* image = nullptr;
  /// Once, on the store's thread; until then bytes and slots stay. An error: the image is not there.
  absl::AnyInvocable<void(absl::Status)> done;
};

/// Runs encode jobs away from the store's thread.
class EncodeExecutor {
 public:
  virtual ~EncodeExecutor() = default;
  /// Encodes `items` (their `declined` is set) and then calls `done(items)` on the store's thread, exactly once. The
  /// codec and the bytes stay alive until then.
  virtual void Encode(std::shared_ptr<const Codec> codec, std::vector<EncodeItem> items,
                      absl::AnyInvocable<void(absl::Span<const EncodeItem>)> done) = 0;
  /// Runs `tasks`, in any order and at once, and then calls `done()` on the store's thread, exactly once.
  virtual void Run(std::vector<absl::AnyInvocable<void()>> tasks, absl::AnyInvocable<void()> done) = 0;
  /// Of a GPU whose caches have indexes. The keys will be there in the order of submission, as what is encoded.
  virtual void Train(DeviceIndexJob job);
};

/// A page whose encoded form has just been made.
struct PageSample {
  CacheId cache = 0;
  CacheDigest digest;  // the cache's
  uint32_t layer = 0;
  std::shared_ptr<const Codec> codec;  // shared: it outlives the cache's closing
  const uint8_t* raw = nullptr;        // of a cache on a GPU there, where its engine may write over both forms
  const uint8_t* encoded = nullptr;
  int device = CacheConfig::kHost;  // as CacheConfig::device
};

/// Looks at both forms of some pages before their raw form goes. The store's thread.
class PageSampler {
 public:
  virtual ~PageSampler() = default;
  /// Asked once for each page that was encoded.
  virtual bool Wants(CacheId cache, uint32_t layer) = 0;
  /// Right after Wants said so. Both forms stay until `done` is called, once, on the store's thread.
  virtual void Compare(const PageSample& page, absl::AnyInvocable<void()> done) = 0;
};

struct AppendEntry {
  SequenceId sequence = 0;
  uint64_t position = 0;  // the layer's token count that the caller expects; another one is FAILED_PRECONDITION
  int tokens = 0;         // >= 1
  const uint8_t* k =
      nullptr;  // [tokens][kv_heads][head_dim] of the layout's dtype; may change under the copy (it is checked after)
  const uint8_t* v = nullptr;
  /// Activations, [tokens][CacheConfig::hidden] of the layout's dtype, or none. Kept of pages all of whose tokens had
  /// them; may change under the copy as K and V.
  const uint8_t* x = nullptr;
};

/// Layers `first` .. `first + count - 1`; one layer where none says how many.
struct LayerRange {
  LayerRange(int layer) : first(layer) {}  // NOLINT: a layer is a range of one
  LayerRange(int first_layer, int layers) : first(first_layer), count(layers) {}
  int end() const { return first + count; }
  int first = 0;
  int count = 1;
};

struct AttendEntry {
  SequenceId sequence = 0;
  uint64_t position = 0;  // of the first query token
  int tokens = 0;         // position + tokens <= the layer's token count
};

struct MatchResult {
  int hit_blocks = 0;                     // consecutive, from the first
  MissReason reason = MissReason::kNone;  // of the first block that was no hit; kNone if all were
};

struct CreateResult {
  SequenceId sequence = 0;
  MatchResult match;
};

struct PublishResult {
  int published = 0;  // newly named by this call
  int shared = 0;     // replaced by an equal block published earlier
  int deferred = 0;   // equal to one published earlier, but still inside this sequence's lag: shared by a later publish
};

struct SequenceInfo {
  SequenceId sequence = 0;
  CacheId cache = 0;
  uint64_t tokens = 0;  // appended to every layer
  int hit_blocks = 0;   // that came by prefix hits or a hand-off
  int published_blocks = 0;
  uint64_t bytes = 0;     // of its pages, shared ones in full
  bool arriving = false;  // by a hand-off, of which pages are still to come
};

struct CacheInfo {
  CacheId cache = 0;
  CacheConfig config;  // codec spec canonical
  CacheDigest digest;
  CodecInfo codec;
  uint64_t sequences = 0;
  uint64_t published_blocks = 0;
  uint64_t raw_bytes = 0;      // resident, raw and open pages
  uint64_t encoded_bytes = 0;  // resident, encoded pages
  uint64_t activation_bytes = 0;
};

/// What a batch of queries will read, or pages that are read back. Pages that it lists are pinned until it is destroyed
/// (on the store's thread). Where kernels find pages by tables it lists none: once it is ready it may go, since slots
/// stay as long as plans (ReleaseEpochs) that were opened before the store's next call may name them; and who had to
/// wait attends again, since only then does TakeChanges tell which pages were declined.
class AttendLease {
 public:
  virtual ~AttendLease() = default;
  /// Every page that must be read encoded is encoded and here, or will never be.
  virtual bool ready() const = 0;
  /// Calls `fn` once on the store's thread: at once if ready, else when it becomes so.
  virtual void OnReady(absl::AnyInvocable<void()> fn) = 0;
  /// After it is ready. UNAVAILABLE: pages of an entry were to arrive by a hand-off that ended early.
  /// FAILED_PRECONDITION: a query that is not the last token of its own page would read that encoded.
  virtual const absl::Status& status() const = 0;
  /// Pages of the i-th entry; only after it is ready, with an OK status. Valid while the lease lives.
  virtual absl::Span<const AttentionPage> pages(size_t entry) const = 0;
  /// Chooses what the i-th entry's queries read; nullptr: everything. As pages(), and it goes before the lease's pages.
  virtual TokenSelector* selector(size_t entry) const = 0;
  /// Pages [0, aged) of the i-th entry are read encoded, whatever the distance.
  virtual uint32_t aged(size_t entry) const = 0;
  /// The position from which on the i-th entry's queries choose what they read; SequenceIndex::kNever: all read
  /// everything.
  virtual uint64_t chooses_from(size_t entry) const = 0;
};

/// The slots of one page in one layer; an invalid id: it has no such form, or raw, none that stays for this sequence.
struct PagePlace {
  uint32_t page = 0;
  PageId raw;
  PageId encoded;  // assigned when the page is full, before its bytes are there; of codecs with indexes: the index's
                   // slot at place `page`, if that is what changed (the page may then be beyond the sequence's)
};

/// Who keeps tables of a sequence's slots: those who run its steps.
enum class TableKeeper : uint8_t { kDaemon = 0, kProcess = 1 };

/// The first `tokens` tokens of a raw page are to be copied into another slot before anything else touches it. A crop
/// gives `from` up, so the plan (ReleaseEpochs) under which the copy runs is opened before the call, not after.
struct OpenCopy {
  uint32_t layer = 0;
  PageId from, to;
  int tokens = 0;
};

/// A sequence whose pages are on their way from another memory. Destroying it without Commit gives the sequence back;
/// nothing of it is visible before.
class ArrivalLease {
 public:
  virtual ~ArrivalLease() = default;
  virtual bool ready() const = 0;
  /// Calls `fn` once on the store's thread: at once if ready, else when it becomes so.
  virtual void OnReady(absl::AnyInvocable<void()> fn) = 0;
  /// Ready, but for room: nothing was copied, and what it would copy stays pinned. TryAgain looks once more, and it is
  /// ready then or later; Commit gives it up.
  virtual bool awaits_room() const = 0;
  virtual void TryAgain() = 0;
  /// The memory that it goes to, as CacheConfig::device.
  virtual int device() const = 0;
  /// After it is ready, at most once. Errors: RESOURCE_EXHAUSTED (of the memory that it was to go to); DATA_LOSS (pages
  /// did not arrive, or are none that a page may be).
  virtual absl::StatusOr<CreateResult> Commit() = 0;
};

struct HolderInfo {
  std::string what;  // "sequence 17 of cache 2 (tenant a)" or "published blocks of cache 2"
  uint64_t bytes = 0;
};

/// A GPU whose memory holds pages. Its bytes are touched by kernels alone, in the order in which somebody submits them
/// (the server): the store keeps books. executor: as the host's, with addresses on the device. epochs: of plans whose
/// kernels may read a slot after the store gave it up. mover: nullptr: what is evicted there is lost, and nothing is
/// fetched.
struct StoreDevice {
  int ordinal = 0;
  SlotPool* pool = nullptr;
  ReleaseEpochs* epochs = nullptr;
  EncodeExecutor* executor = nullptr;
  PageMover* mover = nullptr;
};

/// Whether a call was refused since it is not for pages of this memory: FAILED_PRECONDITION naming `device`.
inline bool IsWrongMemory(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) && DetailOf(status).field == "device";
}

class PageStore {
 public:
  static constexpr size_t kSequencesMax = 65536;
  static constexpr size_t kSequenceBlocksMax = 65536;      // of one sequence; kSequenceBlocksMax * page_tokens tokens
  static constexpr size_t kNamesMax = kSequenceBlocksMax;  // of one call
  static constexpr size_t kEntriesMax = 4096;              // of one append or attend
  static constexpr uint64_t kAttendPagesMax = 1 << 24;     // under all attend leases, each time that one names it
  static constexpr size_t kHoldersNamed = 3;               // in RESOURCE_EXHAUSTED

  /// Everything given outlives the store. `registry` knows "raw", whose attention serves raw pages of every cache.
  /// `metrics` belongs to this store alone. Leases and encode jobs may end after the store: they then do nothing.
  static std::unique_ptr<PageStore> Create(PagePool* pool, const CodecRegistry* registry, EncodeExecutor* executor,
                                           StoreMetrics* metrics, const Clock* clock,
                                           absl::Span<const StoreDevice> devices = {});
  virtual ~PageStore() = default;

  /// Opens a cache, or finds the one with an equal digest. It stays until purged, or until another is opened while
  /// kCachesMax are open: that closes the least recently opened of those without sequence, lease and block. Errors:
  /// INVALID_ARGUMENT (config, codec), RESOURCE_EXHAUSTED (kCachesMax in use; a page that does not fit a slab).
  /// codec: what MakeCodec gave for an equal config; nullptr: it is made here, which may read files.
  static constexpr size_t kCachesMax = 4096;
  virtual absl::StatusOr<CacheId> OpenCache(const CacheConfig& config, std::shared_ptr<const Codec> codec) = 0;
  absl::StatusOr<CacheId> OpenCache(const CacheConfig& config) { return OpenCache(config, nullptr); }
  /// Checks `config` and makes its codec, for which it reads the artifacts that it names: this may take long. Any
  /// thread. Errors: OpenCache's, and those of CodecRegistry::Create.
  static absl::StatusOr<std::shared_ptr<const Codec>> MakeCodec(const CodecRegistry& registry,
                                                                const CacheConfig& config);
  virtual absl::StatusOr<CacheInfo> DescribeCache(CacheId cache) const = 0;
  /// Whether a cache of this digest is open on `device`.
  virtual bool IsOpen(const CacheDigest& digest, int device) const = 0;
  virtual std::shared_ptr<const Codec> codec(CacheId cache) const = 0;  // nullptr: no such cache
  virtual const PageAttention* raw_attention(CacheId cache) const = 0;  // nullptr: no such cache

  /// How far `names` can be found, verified and used (LRU), but not pinned.
  virtual absl::StatusOr<MatchResult> Match(CacheId cache, absl::Span<const BlockName> names) = 0;
  /// A new sequence that begins with the blocks found: find and pin are one step. prompt_tokens: for codecs whose
  /// queries choose what they read behind the prompt, its length; 0: the prompt ends where the first append of a single
  /// token begins. Errors: INVALID_ARGUMENT (beyond a sequence's limit).
  virtual absl::StatusOr<CreateResult> CreateSequence(CacheId cache, absl::Span<const BlockName> prefix,
                                                      uint64_t prompt_tokens) = 0;
  absl::StatusOr<CreateResult> CreateSequence(CacheId cache, absl::Span<const BlockName> prefix) {
    return CreateSequence(cache, prefix, 0);
  }
  virtual absl::StatusOr<SequenceInfo> DescribeSequence(SequenceId sequence) const = 0;

  /// Appends to layers of which every entry's position must be the token count. In host memory K and V of one layer are
  /// copied here, and looked at. On a GPU they are given to the kernels that write them, and whether they are finite is
  /// known later, so a sequence is published only after that was looked at. Pages that this fills are given to the
  /// executor before it returns: on a GPU their bytes will be there in the order of submission. Memory for indexes is
  /// taken here, too, and their jobs are given to the executor (Train). Errors: NOT_FOUND (sequence),
  /// FAILED_PRECONDITION (position, naming the expected one), INVALID_ARGUMENT (tokens; NaN or Inf in K or V with entry,
  /// side, token, head, channel, or in X; X for a cache that keeps no activations), RESOURCE_EXHAUSTED (naming the
  /// pool's limit and the largest holders: evicting every evictable block would not make room, and none was evicted; or
  /// kAttendPagesMax, if the entries could then not be attended to: what was appended can be).
  virtual absl::Status Append(CacheId cache, LayerRange layers, absl::Span<const AppendEntry> entries) = 0;
  /// What the entries' queries read: of one layer in host memory, where its pages are listed. Errors: as Append's; of
  /// memory where an index that queries choose by takes slots; the lease's, if it is ready; FAILED_PRECONDITION where
  /// the layers are not equally old.
  virtual absl::StatusOr<std::unique_ptr<AttendLease>> Attend(CacheId cache, LayerRange layers,
                                                              absl::Span<const AttendEntry> entries) = 0;
  /// Pins the pages of the entries' tokens, each in the one form that the sequence reads it in, whatever the query: raw
  /// while it has not aged there, else encoded, or raw where the codec declined it. The lease's pages(i) begin with the
  /// page of token entries[i].position, and it has no selectors. Of a cache on a GPU the pages' addresses are there,
  /// and raw ones hold what their kernels have written by then. Errors: Attend's.
  virtual absl::StatusOr<std::unique_ptr<AttendLease>> Load(CacheId cache, int layer,
                                                            absl::Span<const AttendEntry> entries) = 0;

  // For those whose kernels find pages by tables.

  /// Appends to `changes` the pages of one layer whose slots changed since this keeper last asked, all at first,
  /// ascending; a page beyond the layer's last is not named.
  virtual absl::Status TakeChanges(SequenceId sequence, int layer, std::vector<PagePlace>* changes,
                                   TableKeeper keeper = TableKeeper::kDaemon) = 0;
  /// The position from which on queries of the sequence choose what they read (SequenceIndex::ChoosesFrom, for an
  /// append to come); SequenceIndex::kNever: none does, or it does not exist.
  virtual uint64_t ChoosesFrom(SequenceId sequence, uint64_t position, int tokens) const = 0;
  /// Pages, over all layers, that TakeChanges would name at most.
  virtual uint64_t ChangedPages(SequenceId sequence, TableKeeper keeper) const = 0;
  /// Whether a hand-off of this sequence waits to hear of what is written (ExportGrowing).
  virtual bool AwaitsWrites(SequenceId sequence) const = 0;
  /// Kernels have written the first tokens[i] tokens of layer first_layer + i, all of them appended. Tells
  /// such hand-offs, also of a sequence that was dropped since; in any order.
  virtual void Written(SequenceId sequence, int first_layer, absl::Span<const uint64_t> tokens) = 0;
  /// Token counts by layer; empty: no such sequence.
  virtual std::vector<uint64_t> LayerTokens(SequenceId sequence) const = 0;
  /// Whether the cache is on `device` and pages of its tenant are in a slab of that pool, so that a process of that
  /// tenant may map it.
  virtual bool OwnsSlab(CacheId cache, int device, uint32_t slab) const = 0;
  /// Frees slots that were given up and that kernels have done with; Append and others do so when they need room.
  virtual void CollectReleased() = 0;
  /// Slots were given up that kernels may still read, or are being copied to the host: what RESOURCE_EXHAUSTED refused
  /// may soon fit.
  virtual bool AwaitsRelease(int device) const = 0;

  // Between a GPU and the host (page_store_tiers.cc): caches of equal digest are one cache in several memories. A block
  // that nothing uses on a GPU is copied to the host before its room is needed, and can be fetched from there.

  /// CreateSequence for a cache on a GPU, with the blocks that the host has besides: those are fetched, once whoever
  /// asks. Errors: CreateSequence's.
  virtual absl::StatusOr<std::unique_ptr<ArrivalLease>> Fetch(CacheId cache, absl::Span<const BlockName> prefix,
                                                              uint64_t prompt_tokens) = 0;
  absl::StatusOr<std::unique_ptr<ArrivalLease>> Fetch(CacheId cache, absl::Span<const BlockName> prefix) {
    return Fetch(cache, prefix, 0);
  }
  /// A sequence like this one in another memory of its cache: `device`, or CacheConfig::kHost; one of the two is the
  /// host. It has the same tokens and reads the same forms; the other stays as it is and may go on. What was appended
  /// must be there. Errors: FAILED_PRECONDITION (layers of different lengths; no such memory, or none that moves
  /// pages); UNAVAILABLE (pages cannot move yet).
  virtual absl::StatusOr<std::unique_ptr<ArrivalLease>> Copy(SequenceId sequence, int device) = 0;
  /// Whether this cache is `sequence`'s in another memory.
  virtual bool IsCounterpart(CacheId cache, SequenceId sequence) const = 0;

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
  virtual absl::StatusOr<PublishResult> Publish(SequenceId sequence, absl::Span<const BlockName> names) = 0;
  /// Gives the sequence back; pages under a lease go when the lease does.
  virtual void Drop(SequenceId sequence) = 0;

  /// A sequence that is complete: begins and finishes at once. will_append: the receiver appends before it reads, so
  /// pages travel as the token to come will read them, not as the last one did; one that the last token filled may then
  /// travel encoded, and the receiver cannot crop into it. On a GPU everything that was appended must have been
  /// written. Errors: FAILED_PRECONDITION naming the shortest layer, or of a cache on a GPU whose codec has indexes;
  /// RESOURCE_EXHAUSTED.
  virtual absl::StatusOr<std::unique_ptr<ExportLease>> ExportWhole(SequenceId sequence, bool will_append) = 0;
  absl::StatusOr<std::unique_ptr<ExportLease>> Export(SequenceId sequence) { return ExportWhole(sequence, false); }
  /// One that will have `tokens` tokens. On a GPU nothing counts as written before Written says so, what it has already
  /// included; `way` is of those alone. Errors: INVALID_ARGUMENT (tokens); FAILED_PRECONDITION (directly from a GPU, of
  /// a codec with indexes; by way of the host, of a GPU that moves no pages); UNAVAILABLE (pages cannot move yet);
  /// RESOURCE_EXHAUSTED (of the host, which is to have room for all of it).
  virtual absl::StatusOr<std::unique_ptr<ExportLease>> ExportGrowing(SequenceId sequence, uint64_t tokens,
                                                                     bool will_append, ExportWay way) = 0;
  absl::StatusOr<std::unique_ptr<ExportLease>> ExportGrowing(SequenceId sequence, uint64_t tokens, bool will_append) {
    return ExportGrowing(sequence, tokens, will_append, ExportWay::kDirect);
  }
  absl::StatusOr<std::unique_ptr<ExportLease>> Export(SequenceId sequence, uint64_t tokens) {
    return ExportGrowing(sequence, tokens, false);
  }
  /// first.config.device: where it is to be. On a GPU raw pages are given to the executor in Arrived. Errors:
  /// INVALID_ARGUMENT (what contradicts itself or its cache), FAILED_PRECONDITION (codec version; a codec with indexes,
  /// on a GPU), RESOURCE_EXHAUSTED. codec: as OpenCache's. recompute: asked once per layer before this returns; by
  /// default nothing is recomputed, and nothing is on a GPU.
  virtual absl::StatusOr<std::unique_ptr<ImportLease>> Import(const HandOffHeader& first,
                                                              std::shared_ptr<const Codec> codec,
                                                              RecomputeChoice recompute) = 0;
  absl::StatusOr<std::unique_ptr<ImportLease>> Import(const HandOffHeader& first) {
    return Import(first, nullptr, [](uint32_t, uint32_t, uint32_t) { return 0u; });
  }
  /// Calls `fn` once, when host memory is next given back or can be evicted: what was refused may fit then. It is
  /// called from within other calls, and must only pass a message on. A later call replaces it.
  virtual void OnRoom(absl::AnyInvocable<void()> fn) = 0;
  /// Before the first append; it outlives the store's use. nullptr: none, as at first.
  virtual void SetSampler(PageSampler* sampler) = 0;

  /// Drops published blocks that nothing pins, of one cache or of all, in every memory, and closes caches that are then
  /// empty and have no sequence. Returns the number of blocks.
  virtual absl::StatusOr<uint64_t> Purge(CacheId cache) = 0;
  virtual uint64_t PurgeAll() = 0;

  virtual std::vector<CacheInfo> Caches() const = 0;
  virtual std::vector<SequenceInfo> Sequences() const = 0;
  /// Holders by bytes, largest first, at most `n`.
  virtual std::vector<HolderInfo> LargestHolders(size_t n) const = 0;
  /// Aborts if an invariant of the whole store does not hold (tests, and debug builds of the daemon on request).
  virtual void CheckInvariants() const = 0;
};

}  // namespace kvmanager
