#include "kvmanager/store/cache_table.h"

#include <algorithm>
#include <utility>

#include "codecs/waiting_codec.h"
#include "kvmanager/base/status.h"
#include "kvmanager/base/tenant_label.h"
#include "kvmanager/memory/page_pool.h"
#include "kvmanager/memory/shown_slabs.h"
#include "kvmanager/store/block_checks.h"
#include "kvmanager/store/block_reads.h"
#include "kvmanager/store/block_writes.h"
#include "kvmanager/store/memory_backend.h"
#include "kvmanager/store/payer_name.h"
#include "kvmanager/store/prefix_matches.h"
#include "kvmanager/store/retainings.h"

namespace kvmanager {

absl::StatusOr<std::shared_ptr<const Codec>> CacheDirectory::MakeCodec(const CodecRegistry& registry,
                                                                       const CacheConfig& config) {
  KV_RETURN_IF_ERROR(ValidateCacheConfig(config));
  CodecContext context;
  context.layout = config.layout;
  context.layers = config.layers;
  context.query_heads = config.query_heads;
  context.model = config.model;
  context.revision = config.revision;
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Codec> codec, registry.CreateForCache(config.codec, context));
  return std::shared_ptr<const Codec>(std::move(codec));
}

namespace {

std::string ShapeText(const PageLayout& layout) {
  return absl::StrCat("dtype ", static_cast<int>(layout.dtype), ", kv_heads ", layout.kv_heads, ", head_dim ",
                      layout.head_dim, ", page_tokens ", layout.page_tokens);
}

// Slots, wire and kernels know one page shape of a cache.
absl::Status CheckShapes(const LayerGroups& groups, const PageLayout& layout) {
  for (const LayerGroup& group : groups.all()) {
    if (group.layout == layout) continue;
    return InvalidField(absl::StrCat("page shape of layers ", LayerRanges(group.layers)), ShapeText(group.layout),
                        absl::StrCat(ShapeText(layout), ", the cache's: several page shapes are not stored yet"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<CacheId> CacheTable::Open(const CacheConfig& config, std::shared_ptr<const Codec> codec) {
  KV_ASSIGN_OR_RETURN(const auto cache, FindOrOpen(config, std::move(codec), nullptr));
  cache->wanted = true;
  return cache->id;
}

absl::StatusOr<std::shared_ptr<Cache>> CacheTable::Find(CacheId id) const {
  const auto found = caches_.find(id);
  if (found == caches_.end()) {
    return FieldError(absl::StatusCode::kNotFound, "cache", absl::StrCat(id), "an open cache");
  }
  return found->second;
}

absl::StatusOr<std::shared_ptr<Cache>> CacheTable::FindOrOpen(const CacheConfig& config,
                                                              std::shared_ptr<const Codec> codec,
                                                              const uint32_t* codec_version) {
  if (codec == nullptr) {
    KV_ASSIGN_OR_RETURN(codec, MakeCodec(*parts_.registry, config));
  }
  auto cache = std::make_shared<Cache>();
  cache->config = config;
  cache->codec = std::move(codec);
  const CodecInfo& info = cache->codec->info();
  KV_CHECK(info.layer_bytes.empty() || info.layer_bytes.size() == static_cast<size_t>(config.layers));
  KV_CHECK(!info.identity || (info.layer_bytes.empty() && info.encoded_bytes == config.layout.raw_bytes()));
  if (codec_version != nullptr && *codec_version != info.version) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "codec_version", absl::StrCat(*codec_version),
                      absl::StrCat(info.version, ", this daemon's version of ", info.name));
  }
  if (!config.calibration_digest.empty() && config.calibration_digest != info.calibration_digest) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "calibration_digest", config.calibration_digest,
                      info.calibration_digest.empty()
                          ? "empty: the codec names no artifact"
                          : absl::StrCat(info.calibration_digest, ", this daemon's artifact's"));
  }
  cache->config.calibration_digest = info.calibration_digest;
  cache->config.codec = info.spec;
  cache->digest = DigestOf(cache->config, info.version);
  cache->tier = TierOf(config.device);
  if (cache->tier == nullptr) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "device", absl::StrCat(config.device),
                      absl::StrCat(CacheConfig::kHost, " for host memory, or a GPU that this daemon was started with"));
  }
  const MemoryBackend& memory = cache->tier->memory();
  cache->index = memory.index_layout(*cache->codec);
  if (const auto known = by_digest_.find({cache->digest, config.device}); known != by_digest_.end()) {
    const std::shared_ptr<Cache>& found = caches_.at(known->second);
    by_opened_.erase(found->opened);
    found->opened = ++opens_;
    by_opened_.emplace(found->opened, found.get());
    return found;
  }
  cache->groups = cache->codec->groups(config.layers);
  KV_RETURN_IF_ERROR(CheckShapes(cache->groups, config.layout));
  const int rungs = cache->rungs();
  if (rungs > 1 && cache->tier->lower() != nullptr) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "device", absl::StrCat(config.device),
                      absl::StrCat(CacheConfig::kHost, ", host memory: pages of ladders are read there alone"));
  }
  if (rungs > 1 && WaitingWorkers(*cache->codec) != nullptr) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "codec", info.spec,
                      "a ladder without plug-ins that have processes of their own");
  }
  std::vector<uint64_t> encoded_bytes;  // [rungs][layers]
  for (int rung = 0; rung < rungs; ++rung) {
    for (int layer = 0; layer < config.layers; ++layer) {
      encoded_bytes.push_back(SlabAllocator::RoundedSlotBytes(cache->page_bytes(layer, rung)));
    }
  }
  if (config.hidden > 0 && memory.keeps_activations()) {
    cache->activation_slot_bytes = SlabAllocator::RoundedSlotBytes(cache->activation_page_bytes());
    cache->activation_gauges = &parts_.metrics->PagesOf("activation", cache->tier->name());
  }
  const uint64_t page_bytes = std::max({uint64_t{config.layout.raw_bytes()}, cache->activation_slot_bytes,
                                        *std::max_element(encoded_bytes.begin(), encoded_bytes.end()),
                                        cache->index.book_bytes, cache->index.chunk_bytes});
  const SlotPool& pool = *cache->tier->pool();
  if (page_bytes > pool.slab_bytes()) {
    return FieldError(absl::StatusCode::kResourceExhausted, "page bytes", absl::StrCat(page_bytes),
                      absl::StrCat("at most the slab's ", pool.slab_bytes()));
  }
  KV_ASSIGN_OR_RETURN(cache->raw, parts_.registry->Create("raw", config.layout));
  const Tenants::Tenant tenant = parts_.tenants->Hold(config.tenant);
  if (absl::Status place = MakePlace(tenant.payer); !place.ok()) {
    parts_.tenants->Drop(config.tenant);
    return place;
  }
  cache->opened = ++opens_;
  cache->id = next_cache_++;
  cache->raw_slot_bytes = SlabAllocator::RoundedSlotBytes(config.layout.raw_bytes());
  // A rung without a class of its own would save nothing.
  const size_t classes = SlotClassesOfPool(pool.capacity_bytes() / pool.slab_bytes());
  cache->encoded_slots = MakeSlotClasses(encoded_bytes, std::max(classes, static_cast<size_t>(rungs)));
  for (const uint64_t index_bytes : {cache->index.book_bytes, cache->index.chunk_bytes}) {
    if (index_bytes > 0) cache->encoded_slots.bytes.push_back(SlabAllocator::RoundedSlotBytes(index_bytes));
  }
  KV_CHECK(cache->encoded_slots.bytes.size() <= kSlotClassesMax);
  cache->gauges = &parts_.metrics->PagesOf(info.name, cache->tier->name());
  for (int rung = 0; rungs > 1 && rung < rungs; ++rung) parts_.metrics->Rung(rung);
  cache->tenant = tenant.id;
  cache->payer = tenant.payer;
  cache->tenant_label = TenantLabel(config.tenant);
  cache->owner = WorkerPool::OwnerOf(PayerName(config.tenant));
  caches_.emplace(cache->id, cache);
  of_payer_.Add(cache->payer);
  by_opened_.emplace(cache->opened, cache.get());
  by_digest_.emplace(std::pair(cache->digest, config.device), cache->id);
  parts_.metrics->caches.Increment();
  parts_.after_open(cache);
  return cache;
}

void CacheTable::CloseIfUnused(const std::shared_ptr<Cache>& cache) {
  if (!cache->unused()) return;
  if (caches_.erase(cache->id) == 0) return;
  by_digest_.erase({cache->digest, cache->config.device});
  by_opened_.erase(cache->opened);
  of_payer_.Remove(cache->payer);
  parts_.metrics->caches.Decrement();
  parts_.tenants->Drop(cache->config.tenant);
}

absl::Status CacheTable::MakePlace(PayerId payer) {
  const auto refuse = [](const char* field, size_t used, size_t most) {
    return FieldError(absl::StatusCode::kResourceExhausted, field, absl::StrCat(used),
                      absl::StrCat("below ", most, " in use to open another; end sequences or purge blocks"));
  };
  const uint64_t own = of_payer_.Of(payer);
  if (own >= kTenantCachesMax && !CloseLeastRecentlyOpened(&payer)) {
    return refuse("open caches of this tenant", own, kTenantCachesMax);
  }
  if (caches_.size() >= kCachesMax && !CloseLeastRecentlyOpened(nullptr)) {
    return refuse("open caches", caches_.size(), kCachesMax);
  }
  return absl::OkStatus();
}

bool CacheTable::CloseLeastRecentlyOpened(const PayerId* payer) {
  const auto oldest = std::find_if(by_opened_.begin(), by_opened_.end(), [payer](const auto& each) {
    return each.second->unused() && (payer == nullptr || each.second->payer == *payer);
  });
  if (oldest == by_opened_.end()) return false;
  CloseIfUnused(std::shared_ptr<Cache>(caches_.at(oldest->second->id)));
  return true;
}

Tier* CacheTable::TierOf(int device) const {
  for (const auto& tier : *parts_.tiers) {
    if (tier->device() == device) return tier.get();
  }
  return nullptr;
}

CacheInfo CacheTable::InfoOf(const Cache& cache) {
  CacheInfo info;
  info.cache = cache.id;
  info.config = cache.config;
  info.digest = cache.digest;
  info.codec = cache.codec->info();
  info.sequences = cache.sequences;
  info.published_blocks = cache.table.size();
  info.raw_bytes = cache.raw_bytes;
  info.encoded_bytes = cache.encoded_bytes;
  info.activation_bytes = cache.activation_bytes;
  const SlotPool& pool = *cache.tier->pool();
  const PoolShares::Account* const share = pool.shares().Find(cache.payer);
  info.pool_bytes = std::min(pool.capacity_bytes(), share == nullptr ? UINT64_MAX : share->most_bytes);
  return info;
}

absl::StatusOr<CacheInfo> CacheTable::Describe(CacheId id) const {
  KV_ASSIGN_OR_RETURN(const auto cache, Find(id));
  return InfoOf(*cache);
}

std::vector<CacheInfo> CacheTable::List() const {
  std::vector<CacheInfo> all;
  for (const auto& [id, cache] : caches_) all.push_back(InfoOf(*cache));
  return all;
}

void CacheTable::ForEachUse(absl::FunctionRef<void(const CacheUse&)> visit) const {
  for (const auto& [id, cache] : caches_) {
    visit({.tenant = cache->config.tenant,
           .device = cache->config.device,
           .sequences = cache->sequences,
           .published_blocks = cache->table.size(),
           .raw_bytes = cache->raw_bytes,
           .encoded_bytes = cache->encoded_bytes,
           .activation_bytes = cache->activation_bytes});
  }
}

std::shared_ptr<const Codec> CacheTable::codec(CacheId id) const {
  const auto cache = Find(id);
  return cache.ok() ? (*cache)->codec : nullptr;
}

const PageAttention* CacheTable::raw_attention(CacheId id) const {
  const auto cache = Find(id);
  return cache.ok() ? &(*cache)->raw->attention() : nullptr;
}

uint64_t CacheTable::PurgeOne(Cache& cache) {
  std::vector<Block*> unpinned;
  for (Block& block : cache.table) {
    if (block.holders == 0 && block.pins == 0) unpinned.push_back(&block);
  }
  for (Block* block : unpinned) parts_.blocks->Unname(block, GoneReason::kPurged);
  parts_.metrics->purged_blocks.Increment(static_cast<double>(unpinned.size()));
  return unpinned.size();
}

absl::StatusOr<uint64_t> CacheTable::Purge(CacheId id) {
  KV_ASSIGN_OR_RETURN(const auto named, Find(id));
  // What is on its way to another memory must not be found there later.
  uint64_t blocks = parts_.before_purge(&named->digest);
  const auto caches = caches_;
  for (const auto& [each, cache] : caches) {
    if (cache->digest != named->digest) continue;
    blocks += PurgeOne(*cache);
    CloseIfUnused(cache);
  }
  return blocks + (parts_.disk == nullptr ? 0 : parts_.disk->EraseCache(named->digest));
}

uint64_t CacheTable::PurgeAll() {
  uint64_t blocks = parts_.before_purge(nullptr);
  const auto caches = caches_;
  for (const auto& [id, cache] : caches) {
    blocks += PurgeOne(*cache);
    CloseIfUnused(cache);
  }
  return blocks + (parts_.disk == nullptr ? 0 : parts_.disk->EraseAll());
}

absl::StatusOr<std::unique_ptr<PrefixMatch>> CacheTable::BeginMatch(CacheId id, std::vector<BlockName> names) {
  KV_RETURN_IF_ERROR(Find(id).status());
  KV_RETURN_IF_ERROR(CacheTable::CheckNames(names));
  return MakePrefixMatch({this, parts_.blocks, parts_.disk, parts_.metrics, parts_.alive}, id, std::move(names));
}

absl::StatusOr<std::unique_ptr<Retaining>> CacheTable::BeginRetain(CacheId id, std::vector<BlockName> names,
                                                                   uint32_t priority, uint64_t ttl_ms) {
  KV_RETURN_IF_ERROR(Find(id).status());
  KV_RETURN_IF_ERROR(CacheTable::CheckNames(names));
  if (priority > Retention::kPriorityMax) {
    return InvalidField("priority", priority, absl::StrCat("0..", Retention::kPriorityMax));
  }
  if (ttl_ms > kRetentionMsMax) return InvalidField("ttlMs", ttl_ms, absl::StrCat("0..", kRetentionMsMax));
  // Of all blocks the same moment: they are in one order then, children before their parents.
  const int64_t until_ns = ttl_ms == 0 ? 0 : parts_.clock->NowNs() + static_cast<int64_t>(ttl_ms) * 1000000;
  return MakeRetaining({this, parts_.tiers, parts_.disk, parts_.alive}, id, std::move(names),
                       {static_cast<uint8_t>(priority), until_ns});
}

absl::StatusOr<std::unique_ptr<BlockCheck>> CacheTable::Check(CacheId id, absl::Span<const BlockName> names) {
  KV_ASSIGN_OR_RETURN(const auto cache, Find(id));
  KV_RETURN_IF_ERROR(CacheTable::CheckNames(names));
  MatchResult match;
  return MakeBlockCheck(parts_.blocks, FindPrefix(*cache, names, BlockIndex::Bytes::kTrust, &match), parts_.alive);
}

absl::StatusOr<std::shared_ptr<Cache>> CacheTable::FindForTransfer(CacheId id) const {
  KV_ASSIGN_OR_RETURN(auto cache, Find(id));
  KV_RETURN_IF_ERROR(cache->NotOfLadders("clients that copy blocks decode them by one codec"));
  KV_RETURN_IF_ERROR(cache->tier->memory().CheckTransfers(*cache));
  return cache;
}

absl::StatusOr<std::shared_ptr<Cache>> CacheTable::FindForTransfer(CacheId id, uint32_t first, size_t blocks) const {
  KV_ASSIGN_OR_RETURN(auto cache, FindForTransfer(id));
  const size_t names_max = std::max<size_t>(kTransferPagesMax / cache->layers(), 1);
  if (blocks == 0 || blocks > names_max) {
    return InvalidField("names", absl::StrCat(blocks, " long"), absl::StrCat("1..", names_max, " long"));
  }
  if (first > kSequenceBlocksMax - blocks) {
    return InvalidField("firstBlock", first, absl::StrCat("at most ", kSequenceBlocksMax - blocks));
  }
  return cache;
}

absl::StatusOr<std::unique_ptr<BlockReads>> CacheTable::ReadBlocks(CacheId id, uint32_t first,
                                                                   absl::Span<const BlockName> names,
                                                                   const ReadRoom& room) {
  KV_ASSIGN_OR_RETURN(const auto cache, FindForTransfer(id, first, names.size()));
  return MakeBlockReads({parts_.blocks, parts_.mapped_pages, parts_.metrics, parts_.alive}, cache, first, names, room);
}

absl::StatusOr<std::unique_ptr<BlockWrites>> CacheTable::WriteBlocks(CacheId id, uint32_t first,
                                                                     absl::Span<const BlockName> names,
                                                                     absl::Span<const uint8_t> raw) {
  KV_ASSIGN_OR_RETURN(const auto cache, FindForTransfer(id, first, names.size()));
  cache->wanted = true;
  return MakeBlockWrites({parts_.blocks, parts_.metrics, parts_.alive}, cache, first, names, raw);
}

absl::StatusOr<std::unique_ptr<SlabBinding>> CacheTable::BeginBind(CacheId id, uint64_t bytes) {
  class Binding final : public SlabBinding {
   public:
    Binding(std::shared_ptr<Cache> cache, const ShownSlabs::Binding& binding, std::weak_ptr<const bool> alive)
        : cache_(std::move(cache)), binding_(binding), alive_(std::move(alive)) {}
    bool DoPiece() override { return !alive_.expired() && shown().BindSome(&binding_); }
    absl::StatusOr<std::vector<uint32_t>> result() const override {
      if (alive_.expired()) return absl::UnavailableError("the daemon ends");
      return shown().BoundTo(cache_->tenant);
    }

   private:
    ShownSlabs& shown() const { return *cache_->tier->pool()->shown(); }

    const std::shared_ptr<Cache> cache_;
    ShownSlabs::Binding binding_;
    const std::weak_ptr<const bool> alive_;
  };
  KV_ASSIGN_OR_RETURN(auto cache, FindForTransfer(id));
  KV_ASSIGN_OR_RETURN(const auto binding, cache->tier->pool()->shown()->BeginBind(cache->tenant, bytes));
  return std::make_unique<Binding>(std::move(cache), binding, parts_.alive);
}

absl::StatusOr<ShownSlab> CacheTable::ShowSlab(CacheId id, uint32_t slab) {
  KV_ASSIGN_OR_RETURN(const auto cache, FindForTransfer(id));
  SlotPool& pool = *cache->tier->pool();
  KV_ASSIGN_OR_RETURN(const int fd, pool.shown()->ShowBound(cache->tenant, slab));
  return ShownSlab{fd, pool.slab_bytes()};
}

std::shared_ptr<Cache> CacheTable::FindIn(const CacheDigest& digest, const Tier* tier) const {
  if (tier == nullptr) return nullptr;
  const auto found = by_digest_.find({digest, tier->device()});
  return found == by_digest_.end() ? nullptr : caches_.at(found->second);
}

absl::StatusOr<std::shared_ptr<Cache>> CacheTable::OpenCounterpart(const Cache& cache, const Tier& tier) {
  CacheConfig config = cache.config;
  config.device = tier.device();
  return FindOrOpen(config, cache.codec, nullptr);
}

std::vector<Block*> CacheTable::FindPrefix(Cache& cache, absl::Span<const BlockName> names, BlockIndex::Bytes bytes,
                                           MatchResult* match) const {
  const bool moves = cache.tier->can_move();
  const std::shared_ptr<Cache> lower = moves ? FindIn(cache.digest, cache.tier->lower()) : nullptr;
  return parts_.blocks->FindPrefix(cache, names, bytes, moves, lower.get(), match);
}

void CacheTable::CheckInvariants() const {
  KV_CHECK(caches_.size() == by_digest_.size() && caches_.size() <= kCachesMax);
  KV_CHECK(caches_.size() == by_opened_.size() && caches_.size() == of_payer_.all());
  absl::flat_hash_map<PayerId, uint64_t> of_payer;
  for (const auto& [id, cache] : caches_) {
    KV_CHECK(++of_payer[cache->payer] <= of_payer_.Of(cache->payer));
    KV_CHECK(by_opened_.at(cache->opened) == cache.get());
    KV_CHECK(cache->encoded_slots.of_layer.size() == cache->layers() * static_cast<size_t>(cache->rungs()));
    for (uint32_t layer = 0; layer < cache->layers(); ++layer) {
      KV_CHECK(cache->page_bytes(layer) <= cache->slot_bytes(layer).encoded);
    }
    const Tenants::Tenant& tenant = parts_.tenants->at(cache->config.tenant);
    KV_CHECK(tenant.id == cache->tenant && tenant.payer == cache->payer);
  }
}

absl::Status CacheTable::CheckNames(absl::Span<const BlockName> names) {
  if (names.size() <= kNamesMax) return absl::OkStatus();
  return InvalidField("names", names.size(), absl::StrCat("at most ", kNamesMax));
}

}  // namespace kvmanager
