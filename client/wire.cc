#include "client/wire.h"

#include <cstring>

namespace kvmanager::client {

absl::Status CheckMessageBytes(absl::string_view what, uint64_t bytes, uint64_t bytes_max) {
  if (bytes <= bytes_max) return absl::OkStatus();
  return InvalidField(absl::StrCat(what, " (bytes of the message)"), bytes,
                      absl::StrCat("at most ", bytes_max, "; use an arena, or several calls"));
}

std::string ToString(capnp::Text::Reader text) { return std::string(text.begin(), text.size()); }
std::string ToString(capnp::Data::Reader data) { return std::string(data.asChars().begin(), data.size()); }

absl::Status FromWire(api::Status::Reader wire) {
  if (wire.getCode() == 0) return absl::OkStatus();
  constexpr int kCodeMax = 16;  // UNAUTHENTICATED, the last of absl::StatusCode
  const auto code =
      wire.getCode() <= kCodeMax ? static_cast<absl::StatusCode>(wire.getCode()) : absl::StatusCode::kUnknown;
  return WithDetail(absl::Status(code, ToString(wire.getMessage())),
                    {ToString(wire.getField()), ToString(wire.getValue()), ToString(wire.getBound())});
}

api::DType ToWire(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return api::DType::FLOAT16;
    case DType::kBFloat16:
      return api::DType::BFLOAT16;
    case DType::kFloat32:
      return api::DType::FLOAT32;
  }
  return static_cast<api::DType>(static_cast<uint16_t>(dtype));  // refused by the daemon
}

absl::Status CheckOptions(const CacheOptions& o) {
  const std::pair<const char*, int> numbers[] = {
      {"layers", o.layers},
      {"kv_heads", o.kv_heads},
      {"query_heads", o.query_heads},
      {"head_dim", o.head_dim},
      {"page_tokens", o.page_tokens},
      {"tensor_parallel_rank", o.tensor_parallel_rank},
      {"tensor_parallel_size", o.tensor_parallel_size},
      {"lag_pages", o.lag_pages},
      {"hidden_size", o.hidden_size},
  };
  for (const auto& [field, value] : numbers) {
    if (value < 0) return InvalidField(field, value, "at least 0");
  }
  return absl::OkStatus();
}

void ToWire(const CacheOptions& o, api::CacheConfig::Builder wire) {
  wire.setModel(ToKj(o.model));
  wire.setRevision(ToKj(o.revision));
  wire.setTenant(ToKj(o.tenant));
  wire.setRope(ToKj(o.rope));
  wire.setCalibrationDigest(ToKj(o.calibration_digest));
  wire.setLayers(uint32_t(o.layers));
  wire.setKvHeads(uint32_t(o.kv_heads));
  wire.setQueryHeads(uint32_t(o.query_heads));
  wire.setHeadDim(uint32_t(o.head_dim));
  wire.setPageTokens(uint32_t(o.page_tokens));
  wire.setDtype(ToWire(o.dtype));
  wire.setTensorParallelRank(uint32_t(o.tensor_parallel_rank));
  wire.setTensorParallelSize(uint32_t(o.tensor_parallel_size));
  wire.setCodec(ToKj(o.codec));
  wire.setLagPages(uint32_t(o.lag_pages));
  wire.setDevice(o.device);
  wire.setHiddenSize(uint32_t(o.hidden_size));
}

void ToWire(absl::Span<const BlockName> names, capnp::List<api::BlockName>::Builder wire) {
  for (size_t i = 0; i < names.size(); ++i) {
    wire[i].setKey(capnp::Data::Reader(names[i].key.bytes.data(), names[i].key.bytes.size()));
    wire[i].setTokens(capnp::Data::Reader(names[i].tokens.bytes.data(), names[i].tokens.bytes.size()));
  }
}

absl::Status CheckListed(absl::string_view what, uint32_t entries) {
  if (entries <= kListedMax) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the daemon sent ", entries, " ", what, ", expected at most ", kListedMax));
}

absl::StatusOr<CacheDescription> FromWire(api::CacheInfo::Reader wire) {
  CacheDescription d;
  const auto config = wire.getConfig();
  CacheOptions& o = d.options;
  o.model = ToString(config.getModel());
  o.revision = ToString(config.getRevision());
  o.tenant = ToString(config.getTenant());
  o.rope = ToString(config.getRope());
  o.calibration_digest = ToString(config.getCalibrationDigest());
  o.layers = int(config.getLayers());
  o.kv_heads = int(config.getKvHeads());
  o.query_heads = int(config.getQueryHeads());
  o.head_dim = int(config.getHeadDim());
  o.page_tokens = int(config.getPageTokens());
  o.dtype = static_cast<DType>(config.getDtype());
  o.tensor_parallel_rank = int(config.getTensorParallelRank());
  o.tensor_parallel_size = int(config.getTensorParallelSize());
  o.codec = ToString(config.getCodec());
  o.lag_pages = int(config.getLagPages());
  o.device = config.getDevice();
  o.hidden_size = int(config.getHiddenSize());
  const auto digest = wire.getDigest();
  if (digest.size() != d.digest.bytes.size()) {
    return absl::InternalError(
        absl::StrCat("the daemon sent a cache digest of ", digest.size(), " bytes, expected 32"));
  }
  std::memcpy(d.digest.bytes.data(), digest.begin(), digest.size());
  d.id = wire.getCacheId();
  d.raw_page_bytes = wire.getRawPageBytes();
  d.encoded_page_bytes =
      wire.getMeanEncodedPageBytes() != 0 ? wire.getMeanEncodedPageBytes() : wire.getEncodedPageBytes();
  d.payload_page_bytes = wire.getPayloadPageBytes();
  d.sink_tokens = wire.getSinkTokens();
  d.pool_bytes = wire.getPoolBytes();
  d.resident_raw_bytes = wire.getResidentRawBytes();
  d.resident_encoded_bytes = wire.getResidentEncodedBytes();
  d.resident_activation_bytes = wire.getResidentActivationBytes();
  d.sequences = wire.getSequences();
  d.published_blocks = wire.getPublishedBlocks();
  return d;
}

SequenceDescription FromWire(api::SequenceInfo::Reader wire) {
  return {.id = wire.getSequenceId(),
          .cache_id = wire.getCacheId(),
          .tokens = wire.getTokens(),
          .hit_blocks = int(wire.getHitBlocks()),
          .published_blocks = int(wire.getPublishedBlocks()),
          .bytes = wire.getBytes(),
          .client = ToString(wire.getClient()),
          .pid = wire.getPid()};
}

absl::StatusOr<DaemonDescription> FromWire(api::DaemonStatus::Reader wire) {
  KV_RETURN_IF_ERROR(CheckListed("pools", wire.getPools().size()));
  DaemonDescription d;
  d.version = ToString(wire.getVersion());
  d.boot_epoch = wire.getBootEpoch();
  d.uptime_seconds = wire.getUptimeSeconds();
  d.draining = wire.getDraining();
  for (const auto pool : wire.getPools()) {
    d.pools.push_back({.tier = ToString(pool.getTier()),
                       .capacity_bytes = pool.getCapacityBytes(),
                       .used_bytes = pool.getUsedBytes(),
                       .slab_bytes = pool.getSlabBytes(),
                       .free_slabs = pool.getFreeSlabs(),
                       .huge_pages = ToString(pool.getHugePages())});
  }
  if (const auto disk = wire.getDisk(); disk.getPath().size() > 0) {
    d.disk = DiskDescription{.path = ToString(disk.getPath()),
                             .capacity_bytes = disk.getCapacityBytes(),
                             .used_bytes = disk.getUsedBytes(),
                             .blocks = disk.getBlocks(),
                             .unwritten_blocks = disk.getUnwrittenBlocks(),
                             .state = ToString(disk.getState())};
  }
  if (const auto kept = wire.getKeptMemory(); kept.getStateDir().size() > 0) {
    d.kept_memory = KeptMemoryDescription{.state_dir = ToString(kept.getStateDir()),
                                          .state = ToString(kept.getState()),
                                          .pid = kept.getPid(),
                                          .unclaimed_blocks = kept.getUnclaimedBlocks()};
  }
  d.connections = wire.getConnections();
  d.caches = wire.getCaches();
  d.threads = wire.getThreads();
  d.leases = wire.getLeases();
  d.waiting_hand_offs = wire.getWaitingHandOffs();
  d.published_blocks = wire.getPublishedBlocks();
  d.cpu_target = ToString(wire.getCpuTarget());
  d.listen = ToString(wire.getListen());
  d.peer_listen = ToString(wire.getPeerListen());
  d.metrics_listen = ToString(wire.getMetricsListen());
  d.http_listen = ToString(wire.getHttpListen());
  d.gpus = ToString(wire.getGpus());
  d.ucx = ToString(wire.getUcx());
  d.pinned_bytes = wire.getPinnedBytes();
  d.pin_total_bytes = wire.getPinTotalBytes();
  d.pin_error = ToString(wire.getPinError());
  return d;
}

PeerDescription FromWire(api::PeerStatus::Reader wire) {
  PeerDescription peer{.peer = ToString(wire.getPeer()),
                       .incoming = wire.getIncoming(),
                       .transfers = wire.getTransfers(),
                       .failures = wire.getFailures(),
                       .bytes = wire.getBytes(),
                       .active = wire.getActive(),
                       .copied_bytes = wire.getCopiedBytes(),
                       .bytes_per_second = wire.getBytesPerSecond(),
                       .last_error = ToString(wire.getLastError())};
  if (wire.hasLoad()) {
    const auto load = wire.getLoad();
    peer.load = PeerLoad{.capacity_bytes = load.getCapacityBytes(),
                         .free_bytes = load.getFreeBytes(),
                         .queued_bytes = load.getQueuedBytes(),
                         .waiting_offers = load.getWaitingOffers(),
                         .active_transfers = load.getActiveTransfers()};
  } else if (absl::Status error = FromWire(wire.getLoadError()); !error.ok()) {
    peer.load = std::move(error);
  }
  return peer;
}

LimitDescription FromWire(api::LimitInfo::Reader wire) {
  LimitDescription limit{.name = ToString(wire.getName()),
                         .scope = ToString(wire.getScope()),
                         .unit = ToString(wire.getUnit()),
                         .limit = wire.getLimit(),
                         .flag = ToString(wire.getFlag()),
                         .bounds = ToString(wire.getBounds())};
  if (wire.getUsedKnown()) limit.used = wire.getUsed();
  return limit;
}

absl::Status CheckRetention(const RetentionOptions& options) {
  if (options.priority < 0 || options.priority > 100) return InvalidField("priority", options.priority, "0..100");
  if (options.ttl_ms < 0) return InvalidField("ttl_ms", options.ttl_ms, "at least 0");
  return absl::OkStatus();
}

absl::StatusOr<Explanation> FromWire(api::Admin::ExplainResults::Reader wire) {
  KV_RETURN_IF_ERROR(CheckListed("blocks", wire.getBlocks().size()));
  KV_RETURN_IF_ERROR(CheckListed("other caches", wire.getOthers().size()));
  Explanation explanation{.remembered = wire.getRemembered(),
                          .remembered_max = wire.getRememberedMax(),
                          .remembered_seconds = wire.getRememberedSeconds()};
  for (const auto block : wire.getBlocks()) {
    // A place or a loss of a newer daemon: none that is known here.
    const auto place = static_cast<uint16_t>(block.getPlace()), loss = static_cast<uint16_t>(block.getLoss());
    explanation.blocks.push_back(
        {.place = place <= static_cast<uint16_t>(BlockPlace::kDisk) ? BlockPlace(place) : BlockPlace::kNowhere,
         .loss = loss <= static_cast<uint16_t>(BlockLoss::kDiskRecord) ? BlockLoss(loss) : BlockLoss::kUnknown,
         .tier = ToString(block.getTier()),
         .cache_id = block.getCacheId(),
         .seconds_ago = block.getSecondsAgo(),
         .owner = ToString(block.getOwner()),
         .taker = ToString(block.getTaker()),
         .other_tokens = block.getOtherTokens(),
         .priority = block.getPriority(),
         .retained_ms = block.getRetainedMs(),
         .same_tokens_cache_id = block.getSameTokensCacheId()});
  }
  for (const auto each : wire.getOthers()) {
    KV_RETURN_IF_ERROR(CheckListed("differing fields", each.getDiffers().size()));
    Explanation::Other& other = explanation.others.emplace_back();
    other.cache_id = each.getCacheId();
    other.tenant = ToString(each.getTenant());
    other.tier = ToString(each.getTier());
    for (const auto field : each.getDiffers()) other.differs.push_back(ToString(field));
  }
  return explanation;
}

absl::StatusOr<RecomputeDescription> FromWire(api::RecomputeStatus::Reader wire) {
  const auto rate = [](api::RecomputeStatus::Rate::Reader in) {
    return RecomputeDescription::Rate{in.getPerSecond(), in.getSamples(), in.getStale()};
  };
  KV_RETURN_IF_ERROR(CheckListed("sets of projections", wire.getSets().size()));
  KV_RETURN_IF_ERROR(CheckListed("links", wire.getLinks().size()));
  KV_RETURN_IF_ERROR(CheckListed("devices", wire.getDevices().size()));
  RecomputeDescription d;
  d.weight_bytes = wire.getWeightBytes();
  d.weight_bytes_max = wire.getWeightBytesMax();
  for (const auto in : wire.getSets()) {
    RecomputeDescription::Set set;
    const auto digest = in.getDigest();
    if (digest.size() != set.digest.bytes.size()) {
      return absl::InternalError(
          absl::StrCat("the daemon sent a cache digest of ", digest.size(), " bytes, expected 32"));
    }
    std::memcpy(set.digest.bytes.data(), digest.begin(), digest.size());
    set.hidden_size = in.getHiddenSize();
    set.kv_width = in.getKvWidth();
    set.layers = in.getLayers();
    set.layers_ready = in.getLayersReady();
    set.chunk_tokens = in.getChunkTokens();
    set.device = in.getDevice();
    set.flops = rate(in.getFlops());
    set.failed = ToString(in.getFailed());
    d.sets.push_back(std::move(set));
  }
  for (const auto in : wire.getLinks()) d.links.push_back({ToString(in.getPeer()), rate(in.getBytes())});
  for (const auto in : wire.getDevices()) {
    d.devices.push_back({in.getOrdinal(), in.getWeightBytes(), in.getWeightBytesMax()});
  }
  return d;
}

Miss FromWire(api::MissReason wire) {
  switch (wire) {
    case api::MissReason::NONE:
      return Miss::kNone;
    case api::MissReason::NOT_FOUND:
      return Miss::kNotFound;
    case api::MissReason::TOKEN_MISMATCH:
      return Miss::kTokenMismatch;
    case api::MissReason::CHECKSUM:
      return Miss::kChecksum;
    case api::MissReason::INCOMPLETE:
      return Miss::kIncomplete;
  }
  return Miss::kNotFound;  // a reason of a newer daemon: a miss all the same
}

PrefixMatch FromWire(api::MatchResult::Reader wire) {
  return {int(wire.getHitBlocks()), FromWire(wire.getReason()), int(wire.getInMemory())};
}

}  // namespace kvmanager::client
