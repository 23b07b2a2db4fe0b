#include "client/c/describe.h"

#include <limits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/json_text.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client::c {
namespace {

using nlohmann::json;

const char* const kDTypes[] = {"float16", "bfloat16", "float32"};

absl::Status Take(absl::string_view field, const json& value, std::string* to) {
  if (!value.is_string()) return InvalidField(field, JsonText(value), "a string");
  *to = value.get<std::string>();
  return absl::OkStatus();
}

template <typename T>
absl::Status Take(absl::string_view field, const json& value, T* to) {
  constexpr int64_t kMin = std::numeric_limits<T>::min(), kMax = std::numeric_limits<T>::max();
  const bool fits = value.is_number_unsigned()
                        ? value.get<uint64_t>() <= uint64_t{kMax}
                        : value.is_number_integer() && value.get<int64_t>() >= kMin && value.get<int64_t>() <= kMax;
  if (!fits) return InvalidField(field, JsonText(value), absl::StrCat("an integer in ", kMin, "..", kMax));
  *to = value.get<T>();
  return absl::OkStatus();
}

absl::Status Take(absl::string_view field, const json& value, DType* to) {
  for (int i = 0; i < 3; ++i) {
    if (value == kDTypes[i]) {
      *to = static_cast<DType>(i);
      return absl::OkStatus();
    }
  }
  return InvalidField(field, JsonText(value), "\"float16\", \"bfloat16\" or \"float32\"");
}

absl::StatusOr<json> ParseObject(absl::string_view text) {
  json parsed = json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_object()) return InvalidField("options", text, "a JSON object");
  return parsed;
}

json Describe(const RecomputeDescription::Rate& rate) {
  return {{"per_second", rate.per_second}, {"samples", rate.samples}, {"stale", rate.stale}};
}

}  // namespace

std::string Text(const json& value) { return value.dump(-1, ' ', false, json::error_handler_t::replace); }

std::string Hex(absl::string_view bytes) { return absl::BytesToHexString(bytes); }

json Describe(const CacheDescription& d) {
  const CacheOptions& o = d.options;
  return {{"options",
           {{"model", o.model},
            {"revision", o.revision},
            {"tenant", o.tenant},
            {"rope", o.rope},
            {"calibration_digest", o.calibration_digest},
            {"layers", o.layers},
            {"kv_heads", o.kv_heads},
            {"query_heads", o.query_heads},
            {"head_dim", o.head_dim},
            {"page_tokens", o.page_tokens},
            {"dtype", int(o.dtype) < 3 ? kDTypes[int(o.dtype)] : "unknown"},
            {"tensor_parallel_rank", o.tensor_parallel_rank},
            {"tensor_parallel_size", o.tensor_parallel_size},
            {"codec", o.codec},
            {"lag_pages", o.lag_pages},
            {"device", o.device},
            {"hidden_size", o.hidden_size}}},
          {"id", d.id},
          {"digest", d.digest.ToHex()},
          {"raw_page_bytes", d.raw_page_bytes},
          {"encoded_page_bytes", d.encoded_page_bytes},
          {"payload_page_bytes", d.payload_page_bytes},
          {"sink_tokens", d.sink_tokens},
          {"pool_bytes", d.pool_bytes},
          {"resident_raw_bytes", d.resident_raw_bytes},
          {"resident_encoded_bytes", d.resident_encoded_bytes},
          {"resident_activation_bytes", d.resident_activation_bytes},
          {"sequences", d.sequences},
          {"published_blocks", d.published_blocks}};
}

json Describe(const DaemonDescription& d) {
  json pools = json::array();
  for (const PoolDescription& pool : d.pools) {
    pools.push_back({{"tier", pool.tier},
                     {"capacity_bytes", pool.capacity_bytes},
                     {"used_bytes", pool.used_bytes},
                     {"slab_bytes", pool.slab_bytes},
                     {"free_slabs", pool.free_slabs},
                     {"huge_pages", pool.huge_pages}});
  }
  json disk;  // null: there is none
  if (d.disk.has_value()) {
    disk = {
        {"path", d.disk->path},     {"capacity_bytes", d.disk->capacity_bytes},     {"used_bytes", d.disk->used_bytes},
        {"blocks", d.disk->blocks}, {"unwritten_blocks", d.disk->unwritten_blocks}, {"state", d.disk->state}};
  }
  json kept;  // null: without --state-dir
  if (d.kept_memory.has_value()) {
    kept = {{"state_dir", d.kept_memory->state_dir},
            {"state", d.kept_memory->state},
            {"pid", d.kept_memory->pid},
            {"unclaimed_blocks", d.kept_memory->unclaimed_blocks}};
  }
  return {{"version", d.version},
          {"boot_epoch", d.boot_epoch},
          {"uptime_seconds", d.uptime_seconds},
          {"draining", d.draining},
          {"pools", std::move(pools)},
          {"disk", std::move(disk)},
          {"kept_memory", std::move(kept)},
          {"connections", d.connections},
          {"caches", d.caches},
          {"threads", d.threads},
          {"leases", d.leases},
          {"published_blocks", d.published_blocks},
          {"waiting_hand_offs", d.waiting_hand_offs},
          {"cpu_target", d.cpu_target},
          {"listen", d.listen},
          {"peer_listen", d.peer_listen},
          {"metrics_listen", d.metrics_listen},
          {"gpus", d.gpus},
          {"ucx", d.ucx},
          {"pinned_bytes", d.pinned_bytes},
          {"pin_total_bytes", d.pin_total_bytes},
          {"pin_error", d.pin_error}};
}

json Describe(const SequenceDescription& d) {
  return {{"id", d.id},
          {"cache_id", d.cache_id},
          {"tokens", d.tokens},
          {"hit_blocks", d.hit_blocks},
          {"published_blocks", d.published_blocks},
          {"bytes", d.bytes},
          {"client", d.client},
          {"pid", d.pid}};
}

json Describe(const PeerDescription& d) {
  json load;  // null: not known
  if (d.load.ok()) {
    load = {{"capacity_bytes", d.load->capacity_bytes},
            {"free_bytes", d.load->free_bytes},
            {"queued_bytes", d.load->queued_bytes},
            {"waiting_offers", d.load->waiting_offers},
            {"active_transfers", d.load->active_transfers}};
  }
  return {{"peer", d.peer},
          {"incoming", d.incoming},
          {"transfers", d.transfers},
          {"failures", d.failures},
          {"bytes", d.bytes},
          {"active", d.active},
          {"copied_bytes", d.copied_bytes},
          {"bytes_per_second", d.bytes_per_second},
          {"last_error", d.last_error},
          {"load", std::move(load)},
          {"load_error", d.load.ok() ? std::string() : std::string(d.load.status().message())}};
}

json Describe(const LimitDescription& d) {
  return {{"name", d.name},
          {"scope", d.scope},
          {"unit", d.unit},
          {"limit", d.limit},
          {"used", d.used.has_value() ? json(*d.used) : json()},
          {"flag", d.flag},
          {"bounds", d.bounds}};
}

json Describe(const Explanation& e) {
  json blocks = json::array(), others = json::array();
  for (const BlockExplanation& block : e.blocks) {
    blocks.push_back({{"place", PlaceName(block.place)},
                      {"loss", LossName(block.loss)},
                      {"tier", block.tier},
                      {"cache_id", block.cache_id},
                      {"seconds_ago", block.seconds_ago},
                      {"owner", block.owner},
                      {"taker", block.taker},
                      {"other_tokens", block.other_tokens},
                      {"priority", block.priority},
                      {"retained_ms", block.retained_ms},
                      {"same_tokens_cache_id", block.same_tokens_cache_id}});
  }
  for (const Explanation::Other& other : e.others) {
    others.push_back(
        {{"cache_id", other.cache_id}, {"tenant", other.tenant}, {"tier", other.tier}, {"differs", other.differs}});
  }
  return {{"blocks", std::move(blocks)},
          {"others", std::move(others)},
          {"remembered", e.remembered},
          {"remembered_max", e.remembered_max},
          {"remembered_seconds", e.remembered_seconds}};
}

json Describe(const RecomputeDescription& d) {
  json sets = json::array(), links = json::array(), devices = json::array();
  for (const auto& set : d.sets) {
    sets.push_back({{"digest", set.digest.ToHex()},
                    {"hidden_size", set.hidden_size},
                    {"kv_width", set.kv_width},
                    {"layers", set.layers},
                    {"layers_ready", set.layers_ready},
                    {"chunk_tokens", set.chunk_tokens},
                    {"device", set.device},
                    {"flops", Describe(set.flops)},
                    {"failed", set.failed}});
  }
  for (const auto& link : d.links) links.push_back({{"peer", link.peer}, {"bytes", Describe(link.bytes)}});
  for (const auto& device : d.devices) {
    devices.push_back({{"ordinal", device.ordinal},
                       {"weight_bytes", device.weight_bytes},
                       {"weight_bytes_max", device.weight_bytes_max}});
  }
  return {{"weight_bytes", d.weight_bytes},
          {"weight_bytes_max", d.weight_bytes_max},
          {"sets", std::move(sets)},
          {"links", std::move(links)},
          {"devices", std::move(devices)}};
}

json Describe(const HandOffOutcome& o) {
  json layers = json::array();
  for (const LayerTimes& layer : o.layers) {
    layers.push_back({{"ready_first", layer.ready_first},
                      {"ready_last", layer.ready_last},
                      {"sent_first", layer.sent_first},
                      {"arrived_last", layer.arrived_last}});
  }
  return {{"ticket", Hex(o.ticket)},
          {"bytes_sent", o.bytes_sent},
          {"pages_sent", o.pages_sent},
          {"pages_skipped", o.pages_skipped},
          {"bytes_resent", o.bytes_resent},
          {"resumes", o.resumes},
          {"seconds", o.seconds},
          {"sending_seconds", o.sending_seconds},
          {"peer", o.peer},
          {"begun_unix_ns", o.begun_unix_ns},
          {"layers", std::move(layers)}};
}

absl::StatusOr<Client::Options> ParseClientOptions(absl::string_view text) {
  KV_ASSIGN_OR_RETURN(const json parsed, ParseObject(text));
  Client::Options o;
  for (const auto& [field, value] : parsed.items()) {
    absl::Status taken = InvalidField(
        "options", field,
        "name, deadline_ms, connect_ms, hello_ms, busy_poll_us, admin_address, token, tls_ca, tls_cert, tls_key "
        "or tls_name");
    if (field == "name") taken = Take(field, value, &o.name);
    if (field == "deadline_ms") taken = Take(field, value, &o.deadline_ms);
    if (field == "connect_ms") taken = Take(field, value, &o.connect_ms);
    if (field == "hello_ms") taken = Take(field, value, &o.hello_ms);
    if (field == "busy_poll_us") taken = Take(field, value, &o.busy_poll_us);
    if (field == "admin_address") taken = Take(field, value, &o.admin_address);
    if (field == "tls_ca") taken = Take(field, value, &o.tls_ca);
    if (field == "tls_cert") taken = Take(field, value, &o.tls_cert);
    if (field == "tls_key") taken = Take(field, value, &o.tls_key);
    if (field == "tls_name") taken = Take(field, value, &o.tls_name);
    if (field == "token")
      taken = value.is_string() ? Take(field, value, &o.token) : InvalidField(field, "no string", "a string");
    KV_RETURN_IF_ERROR(taken);
  }
  return o;
}

absl::StatusOr<CacheOptions> ParseCacheOptions(absl::string_view text) {
  KV_ASSIGN_OR_RETURN(const json parsed, ParseObject(text));
  CacheOptions o;
  const std::pair<const char*, std::string*> strings[] = {
      {"model", &o.model}, {"revision", &o.revision}, {"tenant", &o.tenant},
      {"rope", &o.rope},   {"codec", &o.codec},       {"calibration_digest", &o.calibration_digest},
  };
  const std::pair<const char*, int*> integers[] = {
      {"layers", &o.layers},
      {"kv_heads", &o.kv_heads},
      {"query_heads", &o.query_heads},
      {"head_dim", &o.head_dim},
      {"page_tokens", &o.page_tokens},
      {"lag_pages", &o.lag_pages},
      {"device", &o.device},
      {"hidden_size", &o.hidden_size},
      {"tensor_parallel_rank", &o.tensor_parallel_rank},
      {"tensor_parallel_size", &o.tensor_parallel_size},
  };
  for (const auto& [field, value] : parsed.items()) {
    absl::Status taken = InvalidField("options", field, "a field of CacheOptions");
    if (field == "dtype") taken = Take(field, value, &o.dtype);
    for (const auto& [name, to] : strings) {
      if (field == name) taken = Take(field, value, to);
    }
    for (const auto& [name, to] : integers) {
      if (field == name) taken = Take(field, value, to);
    }
    KV_RETURN_IF_ERROR(taken);
  }
  return o;
}

absl::StatusOr<std::vector<std::string>> ParseStrings(absl::string_view field, absl::string_view text) {
  const json parsed = json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_array()) return InvalidField(field, text, "a JSON array of strings");
  std::vector<std::string> strings;
  for (const json& each : parsed) KV_RETURN_IF_ERROR(Take(field, each, &strings.emplace_back()));
  return strings;
}

}  // namespace kvmanager::client::c
