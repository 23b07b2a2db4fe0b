#include "kvmanager/store/page_store.h"

#include <utility>

#include "kvmanager/store/block_index.h"
#include "kvmanager/store/block_lowering.h"
#include "kvmanager/store/block_moves.h"
#include "kvmanager/store/cache_table.h"
#include "kvmanager/store/disk_loads.h"
#include "kvmanager/store/disk_writes.h"
#include "kvmanager/store/encode_jobs.h"
#include "kvmanager/store/memory_backend.h"
#include "kvmanager/store/mover.h"
#include "kvmanager/store/payers.h"
#include "kvmanager/store/publications.h"
#include "kvmanager/store/recovery.h"
#include "kvmanager/store/sequence_arrivals.h"
#include "kvmanager/store/sequence_beginnings.h"
#include "kvmanager/store/sequence_exports.h"
#include "kvmanager/store/sequence_imports.h"
#include "kvmanager/store/sequence_indexes.h"
#include "kvmanager/store/sequence_table.h"
#include "kvmanager/store/store_appends.h"
#include "kvmanager/store/store_inspector.h"
#include "kvmanager/store/store_reads.h"
#include "kvmanager/store/table_changes.h"
#include "kvmanager/store/tenants.h"
#include "kvmanager/store/tier.h"

namespace kvmanager {
namespace {

// The parts of a store, wired together.
class PageStoreImpl final : public PageStore, private LongCalls, private TierOwner {
 public:
  PageStoreImpl(PagePool* pool, const CodecRegistry* registry, EncodeExecutor* executor, StoreMetrics* metrics,
                const Clock* clock, absl::Span<const StoreDevice> devices, EvictionKind eviction, BlockDisk* disk,
                KeptManifest* manifest)
      : metrics_(metrics),
        disk_(disk),
        tiers_(MakeTiers(pool, executor, devices, eviction, clock, this)),
        mover_(tiers_[0].get(), metrics, alive_),
        gone_(clock),
        blocks_({metrics, clock, tiers_[0].get(), &gone_, [this](Block* block) { AfterName(block); },
                 [this](Block* block) { BeforeUnname(block); }, [this](Block* block) { recovery_.Record(block); }}),
        payers_(&tiers_),
        tenants_(&payers_),
        caches_({registry, metrics, &tiers_, &blocks_, &tenants_, &mapped_pages_, disk, clock,
                 [this](const CacheDigest* of) { return BeforePurge(of); },
                 [this](const std::shared_ptr<Cache>& cache) { recovery_.NoteOpened(cache); }, alive_}),
        recovery_({manifest, pool, tiers_[0].get(), metrics, &tenants_, &caches_, &blocks_}),
        encodes_({metrics, &blocks_, alive_}),
        indexes_({metrics, &blocks_, &encodes_, alive_}),
        sequences_({metrics, &caches_, &blocks_, &indexes_}),
        beginnings_({metrics, &caches_, &blocks_, &indexes_, &sequences_, alive_}),
        publications_({metrics, &blocks_, &sequences_, alive_}),
        moves_({metrics, &tiers_, &caches_, &blocks_, &encodes_, &mover_}),
        disk_writes_({disk, metrics, tiers_[0].get(), &caches_, &blocks_, &encodes_, &gone_, alive_}),
        lowering_({metrics, &caches_, &blocks_, &recovery_, alive_}),
        disk_loads_({disk, tiers_[0].get(), metrics, &caches_, &blocks_, &encodes_, &mover_, alive_}),
        reads_({metrics, &caches_, &blocks_, &encodes_, &indexes_, &sequences_, &lease_pages_, alive_}),
        appends_({metrics, clock, &caches_, &blocks_, &encodes_, &indexes_, &sequences_, &reads_, this, alive_}),
        tables_({&tiers_, &caches_, &sequences_}),
        arrivals_({metrics, &caches_, &blocks_, &encodes_, &indexes_, &sequences_, &moves_, alive_}),
        exports_({metrics, &caches_, &blocks_, &encodes_, &sequences_, &mover_, this, alive_}),
        imports_({metrics, &caches_, &blocks_, &encodes_, &indexes_, &sequences_, this, alive_}),
        inspector_({metrics, &tiers_,        &caches_,      &payers_,     &blocks_,   &encodes_, &sequences_,
                    &moves_, &lowering_,     &disk_writes_, &disk_loads_, &recovery_, &exports_, &imports_,
                    &reads_, &mapped_pages_, &gone_,        disk,         clock,      alive_}) {
    metrics_->pool_capacity_bytes.Set(static_cast<double>(pool->capacity_bytes()));
    recovery_.Recover();
  }
  ~PageStoreImpl() override { alive_.reset(); }

  Appends& appends() override { return appends_; }
  LongCalls& long_calls() override { return *this; }
  CacheDirectory& caches() override { return caches_; }
  SlotTables& tables() override { return tables_; }
  Exports& exports() override { return exports_; }
  Imports& imports() override { return imports_; }
  StoreReport& report() override { return inspector_; }

  absl::StatusOr<std::unique_ptr<ArrivalLease>> Fetch(CacheId cache, absl::Span<const BlockName> prefix,
                                                      uint64_t prompt_tokens) override {
    return arrivals_.Fetch(cache, prefix, prompt_tokens);
  }
  absl::StatusOr<std::unique_ptr<ArrivalLease>> Copy(SequenceId sequence, int device) override {
    return arrivals_.Copy(sequence, device);
  }
  absl::StatusOr<SequenceInfo> Describe(SequenceId sequence) const override { return sequences_.Describe(sequence); }
  absl::StatusOr<std::unique_ptr<AttendLease>> Attend(CacheId cache, LayerRange layers,
                                                      absl::Span<const AttendEntry> entries) override {
    return reads_.Attend(cache, layers, entries);
  }
  absl::StatusOr<std::unique_ptr<AttendLease>> Load(CacheId cache, int layer,
                                                    absl::Span<const AttendEntry> entries) override {
    return reads_.Load(cache, layer, entries);
  }
  absl::StatusOr<SequenceId> Fork(SequenceId sequence, std::vector<OpenCopy>* copies) override {
    return sequences_.Fork(sequence, copies);
  }
  absl::Status Crop(SequenceId sequence, uint64_t tokens, std::vector<OpenCopy>* copies) override {
    return sequences_.Crop(sequence, tokens, copies);
  }
  void Drop(SequenceId sequence) override { sequences_.Drop(sequence); }

 private:
  using Tiers = std::vector<std::unique_ptr<Tier>>;
  // Host memory first.
  static Tiers MakeTiers(PagePool* pool, EncodeExecutor* executor, absl::Span<const StoreDevice> devices,
                         EvictionKind eviction, const Clock* clock, TierOwner* owner) {
    Tiers tiers;
    tiers.push_back(
        std::make_unique<Tier>(StoreDevice{.ordinal = CacheConfig::kHost, .pool = pool, .executor = executor},
                               MakeHostMemory(executor), /*lower=*/nullptr, eviction, clock, owner));
    for (const StoreDevice& device : devices) {
      KV_CHECK(device.pool != nullptr && device.epochs != nullptr && device.executor != nullptr);
      KV_CHECK(device.ordinal >= 0);
      for (const auto& tier : tiers) KV_CHECK(tier->device() != device.ordinal);
      tiers.push_back(
          std::make_unique<Tier>(device, MakeGpuMemory(device.executor), tiers[0].get(), eviction, clock, owner));
    }
    return tiers;
  }

  absl::StatusOr<std::unique_ptr<SequenceBeginning>> Begin(CacheId cache, std::vector<BlockName> prefix,
                                                           uint64_t prompt_tokens) override {
    return beginnings_.Begin(cache, std::move(prefix), prompt_tokens);
  }
  bool Fetches(CacheId cache) const override {
    const auto found = caches_.Find(cache);
    return found.ok() && (*found)->tier->can_move();
  }
  using LongCalls::BeginLoad;
  std::unique_ptr<DiskLoad> BeginLoad(CacheId cache, std::vector<BlockName>* names, uint32_t first,
                                      LoadUrgency urgency) override {
    return disk_loads_.Begin(cache, names, first, urgency);
  }
  void LookAgain() override {
    disk_writes_.TryAgain();
    for (const auto& tier : tiers_) {
      tier->eviction().EndSome();
      const RetainingEviction::Use& kept = tier->eviction().kept_longer();
      RetainedGauges& gauges = metrics_->RetainedIn(tier->name());
      gauges.blocks->Set(static_cast<double>(kept.blocks));
      gauges.bytes->Set(static_cast<double>(kept.bytes));
    }
    ShowHostUse(*tiers_[0], metrics_);  // processes may have let go of slabs
    if (disk_ != nullptr) disk_->Look();
  }
  absl::StatusOr<std::unique_ptr<Publication>> BeginPublish(SequenceId sequence,
                                                            std::vector<BlockName> names) override {
    return publications_.Begin(sequence, std::move(names));
  }
  absl::StatusOr<std::unique_ptr<Listing>> BeginAttend(CacheId cache, int layer,
                                                       absl::Span<const AttendEntry> entries) override {
    return reads_.BeginAttend(cache, layer, entries);
  }
  void OnLeftovers(std::function<void()> fn) override {
    reads_.OnLeftovers(fn);
    appends_.OnLeftovers(fn);
    disk_loads_.OnLeftovers(fn);
    disk_writes_.OnLeftovers(fn);
    recovery_.OnLeftovers(fn);
    exports_.OnLeftovers(fn);
    sequences_.OnLeftovers(std::move(fn));
  }
  bool ReleaseSome() override {
    const bool more = GiveBackSome(), appends = appends_.FinishSome(), claims = recovery_.ClaimSome();
    const bool exports = exports_.GoOnSome();
    return disk_writes_.WriteSome() || more || appends || claims || exports;  // last: the others may name blocks
  }
  bool GiveBackSome() override {
    const bool reads = reads_.ReleaseSome(), loads = disk_loads_.ReleaseSome(), exports = exports_.ReleaseSome();
    return sequences_.ReleaseSome() || reads || loads || exports;
  }

  void AfterName(Block* block) {
    disk_writes_.NoteNamed(block);
    recovery_.Record(block);
  }
  void BeforeUnname(Block* block) {
    moves_.NotKept(*block);
    recovery_.Forget(block);
  }
  uint64_t BeforePurge(const CacheDigest* of) {
    moves_.NotePurge(of);
    disk_loads_.NotePurge(of);
    while (GiveBackSome()) {  // what nobody uses is to go
    }
    const uint64_t unclaimed = recovery_.Purge(of);
    return unclaimed + lowering_.NotePurge(of) + disk_writes_.NotePurge(of);
  }
  void Evict(Block* block, const Cache& taker) override {
    if (disk_ != nullptr && !block->kept && block->cache->tier == tiers_[0].get()) {
      metrics_->unwritten_evictions.Increment();
    }
    blocks_.Evict(block, taker);
  }
  bool WritesSoon(const Tier& tier) const override { return &tier == tiers_[0].get() && disk_writes_.WritesSoon(); }
  bool CanDemote(const Tier& tier) const override {
    return &tier == tiers_[0].get() ? disk_writes_.CanDemote() : tier.can_move();
  }
  bool Demote(Block* block) override {
    return block->cache->tier == tiers_[0].get() ? disk_writes_.Demote(block) : moves_.Demote(block);
  }
  bool CanLower(const Block& block) const override { return BlockLowering::CanLower(block, disk_ != nullptr); }
  bool Lower(Block* block) override { return lowering_.Lower(block); }
  absl::Status Exhausted(const Cache& cache, const SlotCounts& wanted) const override {
    return inspector_.Exhausted(cache, wanted);
  }
  bool HasUnclaimed(const Tier& tier, PayerId payer) const override {
    return &tier == tiers_[0].get() && recovery_.HasUnclaimed(payer);
  }
  bool GiveUpUnclaimed(const Tier& tier, PayerId payer) override {
    return &tier == tiers_[0].get() && recovery_.GiveUpUnclaimed(payer);
  }
  void OnRoomIn(const Tier& tier) override {
    if (&tier == tiers_[0].get()) imports_.RoomCame();
  }

  StoreMetrics* const metrics_;
  BlockDisk* const disk_;                                                   // nullptr: there is none
  std::shared_ptr<const bool> alive_ = std::make_shared<const bool>(true);  // leases and jobs outlive it, and look
  Tiers tiers_;
  // In the order of who needs whom, but for callbacks.
  Mover mover_;
  GoneBlocks gone_;
  BlockIndex blocks_;
  Payers payers_;
  Tenants tenants_;
  LeasePages lease_pages_{LeasePages::kCalls}, mapped_pages_{LeasePages::kMapped};
  CacheTable caches_;
  Recovery recovery_;
  EncodeJobs encodes_;
  SequenceIndexes indexes_;
  SequenceTable sequences_;
  SequenceBeginnings beginnings_;
  Publications publications_;
  BlockMoves moves_;
  DiskWrites disk_writes_;
  BlockLowering lowering_;
  DiskLoads disk_loads_;
  StoreReads reads_;
  StoreAppends appends_;
  TableChanges tables_;
  SequenceArrivals arrivals_;
  SequenceExports exports_;
  SequenceImports imports_;
  StoreInspector inspector_;
};

}  // namespace

std::unique_ptr<PageStore> PageStore::Make(PagePool* pool, const CodecRegistry* registry, EncodeExecutor* executor,
                                           StoreMetrics* metrics, const Clock* clock,
                                           absl::Span<const StoreDevice> devices, EvictionKind eviction,
                                           BlockDisk* disk, KeptManifest* manifest) {
  return std::make_unique<PageStoreImpl>(pool, registry, executor, metrics, clock, devices, eviction, disk, manifest);
}

}  // namespace kvmanager
