// Caches, and what an operator asks.
#include <algorithm>
#include <tuple>

#include "kvmanager/base/tenant_label.h"
#include "kvmanager/store/page_store_impl.h"

namespace kvmanager {

std::unique_ptr<PageStore> PageStore::Create(PagePool* pool, const CodecRegistry* registry, EncodeExecutor* executor,
                                             StoreMetrics* metrics, const Clock* clock,
                                             absl::Span<const StoreDevice> devices) {
  return std::make_unique<PageStoreImpl>(pool, registry, executor, metrics, clock, devices);
}

PageStoreImpl::PageStoreImpl(PagePool* pool, const CodecRegistry* registry, EncodeExecutor* executor,
                             StoreMetrics* metrics, const Clock* clock, absl::Span<const StoreDevice> devices)
    : registry_(registry), metrics_(metrics), clock_(clock) {
  tiers_.push_back(std::make_unique<Tier>(StoreDevice{.ordinal = CacheConfig::kHost, .pool = pool, .executor = executor},
                                          MakeHostMemory(executor), /*lower=*/nullptr, this));
  for (const StoreDevice& device : devices) {
    KV_CHECK(device.pool != nullptr && device.epochs != nullptr && device.executor != nullptr);
    KV_CHECK(device.ordinal >= 0 && TierOf(device.ordinal) == nullptr);
    tiers_.push_back(std::make_unique<Tier>(device, MakeGpuMemory(device.executor), tiers_[0].get(), this));
  }
  mover_ = std::make_unique<Mover>(tiers_[0].get(), metrics_, alive_);
  metrics_->pool_capacity_bytes.Set(static_cast<double>(pool->capacity_bytes()));
}

Tier* PageStoreImpl::TierOf(int device) {
  for (const auto& tier : tiers_) {
    if (tier->device() == device) return tier.get();
  }
  return nullptr;
}

PageStoreImpl::~PageStoreImpl() { alive_.reset(); }

absl::StatusOr<std::shared_ptr<Cache>> PageStoreImpl::FindCache(CacheId id) const {
  const auto found = caches_.find(id);
  if (found == caches_.end()) {
    return FieldError(absl::StatusCode::kNotFound, "cache", absl::StrCat(id), "an open cache");
  }
  return found->second;
}

absl::StatusOr<std::shared_ptr<const Codec>> PageStore::MakeCodec(const CodecRegistry& registry,
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

absl::StatusOr<CacheId> PageStoreImpl::OpenCache(const CacheConfig& config, std::shared_ptr<const Codec> codec) {
  KV_ASSIGN_OR_RETURN(const auto cache, FindOrOpen(config, std::move(codec), nullptr));
  cache->wanted = true;
  return cache->id;
}

absl::StatusOr<std::shared_ptr<Cache>> PageStoreImpl::FindOrOpen(const CacheConfig& config,
                                                                 std::shared_ptr<const Codec> codec,
                                                                 const uint32_t* codec_version) {
  if (codec == nullptr) {
    KV_ASSIGN_OR_RETURN(codec, MakeCodec(*registry_, config));
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
  if (const auto known = cache_by_digest_.find({cache->digest, config.device}); known != cache_by_digest_.end()) {
    const std::shared_ptr<Cache>& found = caches_.at(known->second);
    found->opened = ++opens_;
    return found;
  }
  std::vector<uint64_t> encoded_bytes(config.layers);
  for (int layer = 0; layer < config.layers; ++layer) {
    encoded_bytes[layer] = PagePool::RoundedSlotBytes(info.page_bytes(layer));
  }
  if (config.hidden > 0 && memory.keeps_activations()) {
    cache->activation_slot_bytes = PagePool::RoundedSlotBytes(cache->activation_page_bytes());
    cache->activation_gauges = &metrics_->PagesOf("activation", cache->tier->name());
  }
  const uint64_t page_bytes = std::max({uint64_t{config.layout.raw_bytes()}, cache->activation_slot_bytes,
                                        *std::max_element(encoded_bytes.begin(), encoded_bytes.end()),
                                        cache->index.book_bytes, cache->index.chunk_bytes});
  const SlotPool& pool = *cache->tier->pool();
  if (page_bytes > pool.slab_bytes()) {
    return FieldError(absl::StatusCode::kResourceExhausted, "page bytes", absl::StrCat(page_bytes),
                      absl::StrCat("at most the slab's ", pool.slab_bytes()));
  }
  KV_ASSIGN_OR_RETURN(cache->raw, registry_->Create("raw", config.layout));
  if (caches_.size() >= kCachesMax && !CloseLeastRecentlyOpened()) {
    return FieldError(absl::StatusCode::kResourceExhausted, "open caches", absl::StrCat(caches_.size()),
                      absl::StrCat("below ", kCachesMax, " in use to open another; end sequences or purge blocks"));
  }
  cache->opened = ++opens_;
  cache->id = next_cache_++;
  cache->raw_slot_bytes = PagePool::RoundedSlotBytes(config.layout.raw_bytes());
  cache->encoded_slots = MakeSlotClasses(encoded_bytes, SlotClassesOfPool(pool.capacity_bytes() / pool.slab_bytes()));
  for (const uint64_t index_bytes : {cache->index.book_bytes, cache->index.chunk_bytes}) {
    if (index_bytes > 0) cache->encoded_slots.bytes.push_back(PagePool::RoundedSlotBytes(index_bytes));
  }
  KV_CHECK(cache->encoded_slots.bytes.size() <= kSlotClassesMax);
  cache->gauges = &metrics_->PagesOf(info.name, cache->tier->name());
  Tenant& tenant = tenants_[config.tenant];
  if (tenant.caches++ == 0) tenant.id = next_tenant_++;
  cache->tenant = tenant.id;
  caches_.emplace(cache->id, cache);
  cache_by_digest_.emplace(std::pair(cache->digest, config.device), cache->id);
  metrics_->caches.Increment();
  return cache;
}

void PageStoreImpl::CloseIfUnused(const std::shared_ptr<Cache>& cache) {
  if (!cache->unused()) return;
  if (caches_.erase(cache->id) == 0) return;
  cache_by_digest_.erase({cache->digest, cache->config.device});
  metrics_->caches.Decrement();
  const auto tenant = tenants_.find(cache->config.tenant);
  if (--tenant->second.caches == 0) tenants_.erase(tenant);
}

bool PageStoreImpl::CloseLeastRecentlyOpened() {
  std::shared_ptr<Cache> oldest;
  for (const auto& [id, cache] : caches_) {
    if (cache->unused() && (oldest == nullptr || cache->opened < oldest->opened)) oldest = cache;
  }
  if (oldest == nullptr) return false;
  CloseIfUnused(oldest);
  return true;
}

CacheInfo PageStoreImpl::InfoOf(const Cache& cache) const {
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
  return info;
}

absl::StatusOr<CacheInfo> PageStoreImpl::DescribeCache(CacheId id) const {
  KV_ASSIGN_OR_RETURN(const auto cache, FindCache(id));
  return InfoOf(*cache);
}

std::shared_ptr<const Codec> PageStoreImpl::codec(CacheId id) const {
  const auto cache = FindCache(id);
  return cache.ok() ? (*cache)->codec : nullptr;
}

const PageAttention* PageStoreImpl::raw_attention(CacheId id) const {
  const auto cache = FindCache(id);
  return cache.ok() ? &(*cache)->raw->attention() : nullptr;
}

uint64_t PageStoreImpl::PurgeOne(Cache& cache) {
  std::vector<Block*> unpinned;
  for (const auto& [key, block] : cache.table.blocks()) {
    if (block->holders == 0 && block->pins == 0) unpinned.push_back(block);
  }
  for (Block* block : unpinned) Unname(block);
  metrics_->purged_blocks.Increment(static_cast<double>(unpinned.size()));
  return unpinned.size();
}

absl::StatusOr<uint64_t> PageStoreImpl::Purge(CacheId id) {
  KV_ASSIGN_OR_RETURN(const auto named, FindCache(id));
  // What is on its way to another memory must not be found there later.
  for (const auto& move : moves_) move->purged |= move->from->digest == named->digest;
  uint64_t blocks = 0;
  const auto caches = caches_;
  for (const auto& [each, cache] : caches) {
    if (cache->digest != named->digest) continue;
    blocks += PurgeOne(*cache);
    CloseIfUnused(cache);
  }
  return blocks;
}

uint64_t PageStoreImpl::PurgeAll() {
  for (const auto& move : moves_) move->purged = true;
  uint64_t blocks = 0;
  const auto caches = caches_;
  for (const auto& [id, cache] : caches) {
    blocks += PurgeOne(*cache);
    CloseIfUnused(cache);
  }
  return blocks;
}

std::vector<CacheInfo> PageStoreImpl::Caches() const {
  std::vector<CacheInfo> all;
  for (const auto& [id, cache] : caches_) all.push_back(InfoOf(*cache));
  return all;
}

std::vector<HolderInfo> PageStoreImpl::LargestHolders(size_t n, const Tier* tier) const {
  // Named only once the largest are known: this runs at every refusal of a full pool.
  enum class Kind : uint8_t { kSequence, kPublished, kLeased };
  struct Holder {
    uint64_t bytes;
    Kind kind;
    SequenceId sequence;  // of kSequence
    const Cache* cache;
  };
  std::vector<Holder> all;
  for (const auto& [id, sequence] : sequences_) {
    if (tier != nullptr && sequence->cache->tier != tier) continue;
    const uint64_t bytes = InfoOf(*sequence).bytes;
    if (bytes > 0) all.push_back({bytes, Kind::kSequence, id, sequence->cache.get()});
  }
  absl::flat_hash_map<const Cache*, uint64_t> published, leased;
  for (const auto& [block, owned] : blocks_) {
    if (tier != nullptr && block->cache->tier != tier) continue;
    if (block->holders == 0) (block->published ? published : leased)[block->cache.get()] += block->bytes;
  }
  for (const auto& [cache, bytes] : published) all.push_back({bytes, Kind::kPublished, 0, cache});
  for (const auto& [cache, bytes] : leased) all.push_back({bytes, Kind::kLeased, 0, cache});
  const size_t kept = std::min(n, all.size());
  std::partial_sort(all.begin(), all.begin() + kept, all.end(), [](const Holder& a, const Holder& b) {
    return std::tuple(b.bytes, a.kind, a.sequence, a.cache->id) < std::tuple(a.bytes, b.kind, b.sequence, b.cache->id);
  });
  std::vector<HolderInfo> named;
  for (const Holder& holder : absl::MakeConstSpan(all).first(kept)) {
    const std::string what = holder.kind == Kind::kSequence    ? absl::StrCat("sequence ", holder.sequence)
                             : holder.kind == Kind::kPublished ? "published blocks"
                                                               : "leases on dropped pages";
    named.push_back(
        {absl::StrCat(what, " of cache ", holder.cache->id, " (tenant ", TenantLabel(holder.cache->config.tenant), ")"),
         holder.bytes});
  }
  return named;
}

}  // namespace kvmanager
