// The store's own parts, shared by its source files and by nobody else. One thread: the store's.
//
// Invariants beyond those of page_state.h, page_table.h and sequence.h (CheckInvariants):
//  1. A block is in `blocks_` exactly while it has a live page, a holder or a name.
//  2. block.holders = sequences, hand-offs and moves that list it; page.raw_holds = those that have not aged the page.
//  3. Every slot that a page names is the pool's current one, and no slot is named twice.
//  4. A block that is being copied from another memory is Receiving, held by its move and, before it can be found, by
//     the sequences that wait for it; it has no name.
//  5. A block is evictable exactly while published with no holder, pin or job; its slots, and no others, are then
//     reclaimable in the pool.
//  6. A Resident page keeps its raw form only if declined, held, or pinned by who may read it (identity codecs have one
//     form).
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/release_epochs.h"
#include "kvmanager/memory/slot_pool.h"
#include "kvmanager/store/block.h"
#include "kvmanager/store/cache.h"
#include "kvmanager/store/mover.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/raw_page.h"
#include "kvmanager/store/sequence.h"
#include "kvmanager/store/slot_classes.h"
#include "kvmanager/store/tier.h"

namespace kvmanager {

class PageStoreImpl;

/// A hand-off that sends pages of a sequence while it grows. It lives in a lease and leaves the store's lists when
/// destroyed. Callbacks of the lease's owner run in Tell alone.
class PageFollower {
 public:
  virtual ~PageFollower() = default;
  /// What every layer will have: no append goes beyond.
  virtual uint64_t tokens() const = 0;
  /// A page of the sequence is full.
  virtual void OnFull(uint32_t block, uint32_t layer) = 0;
  /// Some pages have been encoded, of any sequence.
  virtual void OnEncoded() = 0;
  /// As PageStore's.
  virtual bool AwaitsWrites(SequenceId sequence) const = 0;
  virtual void OnWritten(SequenceId sequence, int first_layer, absl::Span<const uint64_t> tokens) = 0;
  /// Tells its owner what is new.
  virtual void Tell() = 0;
};

/// What is copied of blocks that move.
struct MoveForms {
  /// Pages of which the raw form is wanted beside the encoded one.
  absl::FunctionRef<bool(const Block& block, uint32_t layer)> with_raw;
  uint32_t full_blocks = UINT32_MAX;  // a block with this index is open
  int open_tokens = 0;                // of that, as many
};

/// Blocks on their way between a tier and the next lower one. The pages that they come from are pinned, the blocks that they
/// become held; both caches have a lease.
struct BlockMove {
  struct Pair {
    Block* from = nullptr;
    Block* to = nullptr;
    size_t first_page = 0;  // of the moving pages, as many as follow until the next pair's
    bool named = false;     // then `to` takes the name, unless another has it by then
    bool arriving = false;  // `to` is in its cache's `arriving`
    BlockName name;
  };
  std::shared_ptr<Cache> from, to;
  Tier* upper = nullptr;  // of the two tiers: its mover copies
  std::vector<Pair> blocks;
  uint64_t bytes = 0;    // that are copied
  bool demotes = false;  // for room on the GPU: counted in its tier's demoting_bytes
  bool purged = false;   // meanwhile: what arrives gets no name
};

/// Something that waits until pages are encoded, or have arrived. It lives in a lease and leaves the store's lists when
/// destroyed.
class EncodeWaiter {
 public:
  explicit EncodeWaiter(PageStoreImpl* store);
  virtual ~EncodeWaiter();
  EncodeWaiter(const EncodeWaiter&) = delete;
  EncodeWaiter& operator=(const EncodeWaiter&) = delete;

  bool is_ready() const { return ready_; }
  void CallWhenReady(absl::AnyInvocable<void()> fn);

 protected:
  /// Waits for `pages`, whose blocks the lease keeps, and `jobs`; resolves at once if there are none.
  void WaitFor(std::vector<PageRef> pages, IndexJobs jobs = {});
  /// Every page waited for has its final form, or never will (Block::arrival).
  virtual void Resolve() = 0;
  /// The store, or nullptr if it has gone.
  PageStoreImpl* store() const { return alive_.expired() ? nullptr : store_; }

 private:
  friend class PageStoreImpl;
  PageStoreImpl* store_;
  std::weak_ptr<const bool> alive_;
  std::vector<PageRef> pending_;
  IndexJobs pending_jobs_;
  absl::AnyInvocable<void()> fn_;
  bool ready_ = false;
};

class PageStoreImpl final : public PageStore, public TierOwner {
 public:
  PageStoreImpl(PagePool* pool, const CodecRegistry* registry, EncodeExecutor* executor, StoreMetrics* metrics,
                const Clock* clock, absl::Span<const StoreDevice> devices);
  ~PageStoreImpl() override;

  using PageStore::CreateSequence;
  using PageStore::Import;
  using PageStore::OpenCache;
  absl::StatusOr<CacheId> OpenCache(const CacheConfig& config, std::shared_ptr<const Codec> codec) override;
  absl::StatusOr<CacheInfo> DescribeCache(CacheId cache) const override;
  bool IsOpen(const CacheDigest& digest, int device) const override {
    return cache_by_digest_.contains({digest, device});
  }
  std::shared_ptr<const Codec> codec(CacheId cache) const override;
  const PageAttention* raw_attention(CacheId cache) const override;
  absl::StatusOr<MatchResult> Match(CacheId cache, absl::Span<const BlockName> names) override;
  absl::StatusOr<CreateResult> CreateSequence(CacheId cache, absl::Span<const BlockName> prefix,
                                              uint64_t prompt_tokens) override;
  absl::StatusOr<SequenceInfo> DescribeSequence(SequenceId sequence) const override;
  absl::Status Append(CacheId cache, LayerRange layers, absl::Span<const AppendEntry> entries) override;
  absl::Status TakeChanges(SequenceId sequence, int layer, std::vector<PagePlace>* changes,
                           TableKeeper keeper) override;
  uint64_t ChangedPages(SequenceId sequence, TableKeeper keeper) const override;
  uint64_t ChoosesFrom(SequenceId sequence, uint64_t position, int tokens) const override;
  bool OwnsSlab(CacheId cache, int device, uint32_t slab) const override;
  bool AwaitsWrites(SequenceId sequence) const override;
  void Written(SequenceId sequence, int first_layer, absl::Span<const uint64_t> tokens) override;
  std::vector<uint64_t> LayerTokens(SequenceId sequence) const override;
  void CollectReleased() override {
    for (const auto& tier : tiers_) tier->Collect();
  }
  bool AwaitsRelease(int device) const override;
  absl::StatusOr<std::unique_ptr<ArrivalLease>> Fetch(CacheId cache, absl::Span<const BlockName> prefix,
                                                      uint64_t prompt_tokens) override;
  absl::StatusOr<std::unique_ptr<ArrivalLease>> Copy(SequenceId sequence, int device) override;
  bool IsCounterpart(CacheId cache, SequenceId sequence) const override;
  absl::StatusOr<std::unique_ptr<AttendLease>> Attend(CacheId cache, LayerRange layers,
                                                      absl::Span<const AttendEntry> entries) override;
  absl::StatusOr<std::unique_ptr<AttendLease>> Load(CacheId cache, int layer,
                                                    absl::Span<const AttendEntry> entries) override;
  using PageStore::Crop;
  using PageStore::Fork;
  absl::StatusOr<SequenceId> Fork(SequenceId sequence, std::vector<OpenCopy>* copies) override;
  absl::Status Crop(SequenceId sequence, uint64_t tokens, std::vector<OpenCopy>* copies) override;
  absl::StatusOr<PublishResult> Publish(SequenceId sequence, absl::Span<const BlockName> names) override;
  void Drop(SequenceId sequence) override;
  absl::StatusOr<std::unique_ptr<ExportLease>> ExportWhole(SequenceId sequence, bool will_append) override;
  using PageStore::ExportGrowing;
  absl::StatusOr<std::unique_ptr<ExportLease>> ExportGrowing(SequenceId sequence, uint64_t tokens, bool will_append,
                                                             ExportWay way) override;
  /// written: what there is has been written, and nothing comes.
  absl::StatusOr<std::unique_ptr<ExportLease>> BeginExport(SequenceId sequence, uint64_t tokens, bool will_append,
                                                           ExportWay way, bool written);
  /// page_store_export_host.cc: what `lease` exports out of `from`'s GPU, copied to the host.
  absl::StatusOr<std::unique_ptr<ExportLease>> ExportByHost(std::unique_ptr<ExportLease> lease,
                                                            const std::shared_ptr<Cache>& from);
  absl::StatusOr<std::unique_ptr<ImportLease>> Import(const HandOffHeader& first, std::shared_ptr<const Codec> codec,
                                                      RecomputeChoice recompute) override;
  void OnRoom(absl::AnyInvocable<void()> fn) override { on_room_ = std::move(fn); }
  void SetSampler(PageSampler* sampler) override { sampler_ = sampler; }
  absl::StatusOr<uint64_t> Purge(CacheId cache) override;
  uint64_t PurgeAll() override;
  std::vector<CacheInfo> Caches() const override;
  std::vector<SequenceInfo> Sequences() const override;
  std::vector<HolderInfo> LargestHolders(size_t n) const override { return LargestHolders(n, nullptr); }
  std::vector<HolderInfo> LargestHolders(size_t n, const Tier* tier) const;  // of one, or of all
  void CheckInvariants() const override;

  // Of TierOwner: page_store_blocks.cc, page_store_tiers.cc.
  void Evict(Block* block) override;
  /// To the host, of a block of a GPU.
  bool Demote(Block* block) override;
  void OnRoomIn(const Tier& tier) override;
  absl::Status Exhausted(const Cache& cache, const SlotCounts& wanted) const override;

  // --- for the leases and the source files of the store ---

  StoreMetrics* metrics() const { return metrics_; }
  std::weak_ptr<const bool> alive() const { return alive_; }
  Mover& mover() { return *mover_; }

  // page_store.cc: caches.
  absl::StatusOr<std::shared_ptr<Cache>> FindCache(CacheId id) const;
  /// codec: may be nullptr. codec_version: the one the caller's bytes have; nullptr for any.
  absl::StatusOr<std::shared_ptr<Cache>> FindOrOpen(const CacheConfig& config, std::shared_ptr<const Codec> codec,
                                                    const uint32_t* codec_version);
  void CloseIfUnused(const std::shared_ptr<Cache>& cache);
  bool CloseLeastRecentlyOpened();  // of the unused ones; false: there is none
  CacheInfo InfoOf(const Cache& cache) const;
  uint64_t PurgeOne(Cache& cache);

  // page_store_blocks.cc: blocks, slots, transitions.
  Block* NewBlock(const std::shared_ptr<Cache>& cache, uint32_t index);
  void Apply(PageRef ref, PageEvent event, const PageChange& after);
  static uint8_t* Data(const Cache& cache, PageId id) { return cache.tier->pool()->Data(id); }
  /// The bytes of a page in raw form: of an identity codec also once it is sealed. nullptr: gone.
  static const uint8_t* RawData(const Cache& cache, const Page& page);
  void Hold(Block* block);     // one more holder
  void Release(Block* block);  // one holder less; of a chain, children first (EvictionPolicy)
  /// Notes that a page of `sequence` has other slots now, for TakeChanges.
  static void NoteChange(Sequence& sequence, uint32_t layer, uint32_t page) {
    for (auto& keeper : sequence.changed) {
      if (!keeper.empty() && keeper[layer].followed) keeper[layer].pages.push_back(page);
    }
  }
  void Attach(Sequence& sequence, Block* block);  // appends `block`, already held, and takes its raw holds
  void DetachLast(Sequence& sequence);            // gives the last block back
  void DropRawHold(PageRef ref);
  /// An append continues a page of K and V without activations: those so far are of no use.
  void DropOpenActivations(PageRef keys_values);
  void Age(Sequence& sequence, uint32_t layer, uint64_t position);
  void Pin(PageRef ref);
  void Unpin(PageRef ref);
  /// Of a lease that reads the encoded form alone, if there is one.
  void PinEncoded(PageRef ref);
  void UnpinEncoded(PageRef ref);
  void Unname(Block* block);  // out of the table; the block goes if nobody holds it
  bool VerifyChecksums(const Block& block) const;
  uint64_t ChecksumOf(const Cache& cache, uint32_t layer, const Page& page) const;  // of the form that stays
  /// Where FindPrefix looks: in the cache's memory, or, of a GPU where pages move, also among those that are arriving
  /// there and in the host's.
  enum class LookIn : uint8_t { kItsMemory, kLowerTiersToo };
  /// The blocks named so, one behind the other, each verified and held. match: how far, and why no further.
  std::vector<Block*> FindPrefix(Cache& cache, absl::Span<const BlockName> names, LookIn where, MatchResult* match);
  void CountHits(const MatchResult& match);
  /// The block named so, verified; a corrupt one is dropped. nullptr and the reason otherwise.
  Block* FindVerified(Cache& cache, const BlockName& name, uint32_t index, MissReason* reason);

  // page_store_tiers.cc: blocks that move between a GPU and the host.
  /// The cache of equal digest in the next lower tier, or nullptr.
  std::shared_ptr<Cache> LowerCounterpart(const Cache& cache) const;
  /// The same on `device`, opened where there is none.
  absl::StatusOr<std::shared_ptr<Cache>> CounterpartOn(const Cache& cache, int device);
  /// This tier has the block no more: those of higher tiers with its name are not kept.
  void NotKept(const Block& block);
  /// Starts to copy `blocks`, all of cache `from`, into slots of `to`, which they need as CountSlots says. Adds the new
  /// blocks, in order, to `copies`; each has the move as its holder.
  void StartMove(const std::shared_ptr<Cache>& from, const std::shared_ptr<Cache>& to, absl::Span<Block* const> blocks,
                 const MoveForms& forms, bool demotes, Reservation* slots, std::vector<Block*>* copies);
  /// The higher of two tiers that are one above the other; nullptr: they are not.
  static Tier* UpperOf(Tier* a, Tier* b) { return a->lower() == b ? a : b->lower() == a ? b : nullptr; }
  static void CountSlots(const Block& block, const Cache& to, const MoveForms& forms, SlotCounts* wanted);

  // page_store_encode.cc: jobs and those who wait for them.
  void PostEncodes(const std::shared_ptr<Cache>& cache, std::vector<PageRef> pages);
  void AddWaiter(EncodeWaiter* waiter) { waiting_.push_back(waiter); }
  void RemoveWaiter(EncodeWaiter* waiter);
  /// Whether the page's bytes are still to come: from the codec, or from elsewhere. What will not arrive is not waited
  /// for.
  static bool Awaits(const PageRef& ref) {
    const Page& page = ref.page();
    return page.awaits_encoding() || (page.state == PageState::kReceiving && !ref.block->corrupt);
  }
  void NotifyWaiters();
  void TellFollowers();

  // page_store_index.cc: indexes of sequences.
  /// A new index for a sequence of `cache` that has `tokens` tokens, if the codec has indexes.
  void MakeIndex(Sequence& sequence, const IndexFacts& facts, uint64_t tokens);
  void CopyIndex(const Sequence& from, Sequence& to);
  void CropIndex(Sequence& sequence, uint64_t tokens);
  void DropIndex(Sequence& sequence);
  /// Begins what `layer`'s next queries will need.
  void AdvanceIndex(Sequence& sequence, uint32_t layer);
  void AdvanceIndexes(Sequence& sequence);  // of every layer
  /// Where indexes take slots: those that an append (or none, of 0 tokens) of entries at `position` needs so that
  /// queries before `end` can choose; and their giving.
  void CountIndexSlots(const Sequence& sequence, LayerRange layers, uint64_t position, int tokens, uint64_t end,
                       SlotCounts* wanted) const;
  void GiveIndexSlots(Sequence& sequence, LayerRange layers, uint64_t position, int tokens, uint64_t end,
                      Reservation* slots);
  /// Adds to `wait` what queries `first` .. `last` of `layer` wait for; it is begun.
  void NeedIndex(Sequence& sequence, uint32_t layer, uint64_t first, uint64_t last, IndexJobs* wait);
  static void NoteIndexChange(Sequence& sequence, uint32_t layer, uint32_t place);
  static void AddIndexChanges(const Sequence& sequence, uint32_t layer, Sequence::Changes& changed,
                              std::vector<PagePlace>* changes);
  /// After its step.
  void TakeBack(SequenceId sequence, TokenSelector& selector);

  // page_store_sequence.cc
  absl::StatusOr<Sequence*> FindSequence(SequenceId id) const;
  /// One that calls may use. Errors: NOT_FOUND; UNAVAILABLE for one that did not arrive whole.
  absl::StatusOr<Sequence*> FindUsable(SequenceId id) const;
  /// One that is here as a whole. Errors: FindUsable's; FAILED_PRECONDITION for one that still arrives.
  absl::StatusOr<Sequence*> FindWhole(SequenceId id) const;
  std::unique_ptr<Sequence> NewSequence(const std::shared_ptr<Cache>& cache);
  absl::Status CheckSequenceLimit() const;
  static absl::Status CheckNames(absl::Span<const BlockName> names);
  static absl::Status CheckPrompt(const Cache& cache, uint64_t prompt_tokens);
  SequenceId Show(std::unique_ptr<Sequence> sequence);  // makes it visible
  void ReleaseBlocks(Sequence& sequence);
  SequenceInfo InfoOf(const Sequence& sequence) const;

  // Hand-offs under way. For CheckInvariants: sequences that are not visible; blocks that an export holds since they
  // are copies, or an import since pages of them are to come.
  absl::flat_hash_set<const Sequence*> hidden_sequences;
  absl::flat_hash_set<const Block*> hand_off_blocks;
  std::vector<PageFollower*> followers;
  std::vector<const Block*> held_blocks;  // by arrivals that have yet to begin
  /// Buffers of finished attend leases, reused so that the hot path allocates little.
  struct AttendBuffers {
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
  static constexpr size_t kSpareBuffersMax = 64;
  static constexpr size_t kSparePagesMax = 1 << 14;  // larger buffers are not kept
  std::vector<AttendBuffers> spare_buffers;
  uint64_t attend_pages = 0;  // pinned by all attend leases, each time that one names it
  /// Adds to `pending` the pages of a layer before page `end` that are still to be encoded.
  void Settle(Sequence& sequence, uint32_t layer, uint32_t end, std::vector<PageRef>* pending);
  /// Whether attend leases may pin `pages` more. Errors: RESOURCE_EXHAUSTED.
  absl::Status CheckAttendPages(uint64_t pages) const;

 private:
  void OnEncoded(const std::vector<PageRef>& pages, absl::Span<const EncodeItem> items);
  void Sample(const PageRef& ref);
  void Land(BlockMove& move, bool moved, absl::Span<const MovingPage> pages);
  void LandBlock(BlockMove& move, const BlockMove::Pair& pair, bool moved, absl::Span<const MovingPage> pages);
  void BeginJobs(const Sequence& sequence, const IndexJobs& jobs);
  void EndJob(IndexJob& job, absl::Span<const PageRef> pins, absl::Status status);
  std::shared_ptr<const IndexMemory> NewIndexMemory(Tier* tier, PageId slot);
  /// Chunks of a sequence of `tokens` tokens of which none changes any more, whoever else has them.
  static void KeepFullChunks(const Cache& cache, uint64_t tokens, Sequence& sequence);
  void CountIndexBytes(Sequence& sequence);
  void ReleaseRawIfUnused(PageRef ref);
  void MakeEvictableIfUnused(Block* block);
  void MakeUnevictable(Block* block);
  void Dispose(Block* block);  // nobody holds it, it has no name
  void FreePage(PageRef ref);  // and deletes the block with its last page
  void DeleteIfEmpty(Block* block);
  static absl::Status CheckLayers(const Cache& cache, LayerRange layers);
  /// Looks at an append's entries. pages: that its queries would read.
  absl::Status CheckAppend(const Cache& cache, LayerRange layers, absl::Span<const AppendEntry> entries,
                           std::vector<Sequence*>* sequences, SlotCounts* wanted, uint64_t* pages);
  /// What was reserved and, in host memory, copied becomes part of the sequences.
  void CommitAppend(const std::shared_ptr<Cache>& cache, uint32_t layer, absl::Span<const AppendEntry> entries,
                    absl::Span<Sequence* const> sequences, Reservation* slots, std::vector<PageRef>* to_encode);
  absl::Status CheckAttend(const Cache& cache, LayerRange layers, absl::Span<const AttendEntry> entries,
                           std::vector<Sequence*>* sequences, uint64_t* pages) const;

  /// The error of a hand-off out of or into memory where the cache's indexes take slots.
  static absl::Status IndexStaysHere(const Cache& cache);

  Tier* TierOf(int device);  // nullptr: there is none

  std::vector<std::unique_ptr<Tier>> tiers_;  // host memory first
  std::unique_ptr<Mover> mover_;
  const CodecRegistry* const registry_;
  StoreMetrics* const metrics_;
  const Clock* const clock_;
  std::shared_ptr<const bool> alive_ =
      std::make_shared<const bool>(true);  // outlived by leases and jobs that look at it
  CacheId next_cache_ = 1;
  SequenceId next_sequence_ = 1;
  TenantId next_tenant_ = 1;
  uint64_t calls_ = 0;
  uint64_t opens_ = 0;
  std::map<CacheId, std::shared_ptr<Cache>> caches_;
  absl::flat_hash_map<std::pair<CacheDigest, int>, CacheId> cache_by_digest_;  // and device
  struct Tenant {
    TenantId id = 0;
    size_t caches = 0;
  };
  absl::flat_hash_map<std::string, Tenant> tenants_;
  absl::flat_hash_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  absl::flat_hash_map<const Block*, std::unique_ptr<Block>> blocks_;
  std::vector<std::shared_ptr<BlockMove>> moves_;  // under way
  std::vector<EncodeWaiter*> waiting_;
  std::deque<EncodeWaiter*> ready_;  // whose callbacks are to be called
  absl::AnyInvocable<void()> on_room_;
  PageSampler* sampler_ = nullptr;
};

}  // namespace kvmanager
