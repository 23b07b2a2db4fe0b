#include "client/cli/format.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "kvmanager/base/status.h"
#include "kvmanager/base/tenant_label.h"

namespace kvmanager::client::cli {
namespace {

using nlohmann::json;

constexpr absl::string_view kBlanksBetweenColumns = "  ";

std::string Hex(uint64_t value) { return absl::StrFormat("%016x", value); }

const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
  }
  return "unknown";
}

std::string OrNone(const std::string& text) { return text.empty() ? "-" : text; }

/// A count, a share, or a number with its unit; not an address or a digest.
bool IsNumber(absl::string_view cell) {
  const size_t end = std::min(cell.find_first_not_of("0123456789."), cell.size());
  if (end == 0 || std::count(cell.begin(), cell.begin() + end, '.') > 1) return false;
  return end == cell.size() || cell[end] == ' ' || cell[end] == '%';
}

}  // namespace

std::string Utf8(const std::string& text) {
  return json::parse(json(text).dump(-1, ' ', false, json::error_handler_t::replace)).get<std::string>();
}

std::string Printable(const std::string& text) {
  std::string shown = text;
  for (char& c : shown) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  }
  return shown;
}

std::string FormatBytes(uint64_t bytes) {
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  constexpr const char* kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = double(bytes) / 1024;
  size_t unit = 0;
  // Just below the next unit, one digit after the point would already read as 1024.0.
  for (; value >= 1023.95 && unit + 1 < std::size(kUnits); ++unit) value /= 1024;
  return absl::StrFormat("%.1f %s", value, kUnits[unit]);
}

std::string FormatSeconds(double seconds) {
  if (!(seconds >= 0)) return "-";
  if (seconds < 59.95) return absl::StrFormat("%.1f s", seconds);
  const uint64_t s = uint64_t(std::llround(std::min(seconds, 1e15)));
  if (s < 3600) return absl::StrFormat("%d m %02d s", s / 60, s % 60);
  if (s < 86400) return absl::StrFormat("%d h %02d m", s / 3600, s / 60 % 60);
  return absl::StrFormat("%d d %02d h", s / 86400, s / 3600 % 24);
}

std::string FormatTable(const std::vector<std::string>& header, const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> width;
  width.reserve(header.size());
  for (const auto& cell : header) width.push_back(cell.size());
  for (const auto& row : rows) {
    for (size_t c = 0; c < row.size() && c < width.size(); ++c) width[c] = std::max(width[c], row[c].size());
  }
  std::string text;
  const auto add = [&](const std::vector<std::string>& row, bool is_header) {
    std::string line;
    for (size_t c = 0; c < width.size(); ++c) {
      const std::string cell = c < row.size() ? Printable(row[c]) : "";
      // A header stands over its column's first cell, on the same side.
      const bool right = IsNumber(is_header ? (rows.empty() ? "" : rows[0][c]) : cell);
      const std::string blanks(width[c] - cell.size(), ' ');
      if (c > 0) absl::StrAppend(&line, kBlanksBetweenColumns);
      absl::StrAppend(&line, right ? blanks + cell : cell + blanks);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    absl::StrAppend(&text, line, "\n");
  };
  add(header, true);
  for (const auto& row : rows) add(row, false);
  return text;
}

std::string FormatStatus(const DaemonDescription& d) {
  std::string text;
  const auto line = [&text](absl::string_view name, const std::string& value) {
    absl::StrAppend(&text, absl::StrFormat("%-19s", std::string(name) + ":"), Printable(value), "\n");
  };
  line("version", d.version);
  line("state", d.draining ? "draining: no new sequences or incoming hand-offs" : "serving");
  line("uptime", FormatSeconds(d.uptime_seconds));
  line("boot epoch", Hex(d.boot_epoch));
  line("attention", absl::StrCat(d.cpu_target, ", ", d.threads, d.threads == 1 ? " thread" : " threads"));
  line("listening", OrNone(d.listen));
  line("peers connect to", OrNone(d.peer_listen));
  line("metrics", OrNone(d.metrics_listen));
  line("page", OrNone(d.http_listen));
  line("connections", absl::StrCat(d.connections));
  line("caches", absl::StrCat(d.caches));
  line("leases", absl::StrCat(d.leases));
  line("GPUs", OrNone(d.gpus));
  line("UCX", OrNone(d.ucx));
  if (d.pin_total_bytes > 0) {
    line("host pool pinned", absl::StrCat(FormatBytes(d.pinned_bytes), " of ", FormatBytes(d.pin_total_bytes),
                                          d.pin_error.empty() ? "" : "; the rest stays so: ", d.pin_error));
  }
  line("disk", !d.disk.has_value()
                   ? OrNone("")
                   : absl::StrCat(d.disk->path, ": ", FormatBytes(d.disk->used_bytes), " of ",
                                  FormatBytes(d.disk->capacity_bytes), ", ", d.disk->blocks, " blocks, ",
                                  d.disk->unwritten_blocks, " to be written; ", d.disk->state));
  if (const auto& kept = d.kept_memory; kept.has_value()) {
    line("memory kept", absl::StrCat(kept->state_dir, ": ", kept->state,
                                     kept->pid == 0 ? "" : absl::StrCat(" (process ", kept->pid, ")"), "; ",
                                     kept->unclaimed_blocks, " blocks of an earlier daemon wait for their cache"));
  } else {
    line("memory kept", OrNone(""));
  }
  line("waiting hand-offs", absl::StrCat(d.waiting_hand_offs));
  line("published blocks", absl::StrCat(d.published_blocks));
  std::vector<std::vector<std::string>> rows;
  for (const PoolDescription& pool : d.pools) {
    const double share = pool.capacity_bytes == 0 ? 0 : 100.0 * double(pool.used_bytes) / double(pool.capacity_bytes);
    rows.push_back({pool.tier, FormatBytes(pool.capacity_bytes), FormatBytes(pool.used_bytes),
                    absl::StrFormat("%.1f%%", share), FormatBytes(pool.slab_bytes), absl::StrCat(pool.free_slabs),
                    OrNone(pool.huge_pages)});
  }
  absl::StrAppend(&text, "\n",
                  FormatTable({"POOL", "CAPACITY", "USED", "USED%", "SLAB", "FREE SLABS", "HUGE PAGES"}, rows));
  return text;
}

std::string FormatCaches(const std::vector<CacheDescription>& caches) {
  if (caches.empty()) return "no caches are open: an engine opens one, and a purge closes those that nobody uses\n";
  std::vector<std::vector<std::string>> rows;
  for (const CacheDescription& c : caches) {
    const CacheOptions& o = c.options;
    const double ratio = c.raw_page_bytes == 0 ? 0 : double(c.encoded_page_bytes) / double(c.raw_page_bytes);
    rows.push_back(
        {absl::StrCat(c.id), o.model, OrNone(o.tenant), TenantLabel(o.tenant), o.codec,
         absl::StrCat(o.layers, "x", o.query_heads, "/", o.kv_heads, "x", o.head_dim, " ", DTypeName(o.dtype)),
         absl::StrCat(o.page_tokens), absl::StrCat(o.lag_pages), absl::StrCat(c.sink_tokens),
         absl::StrFormat("%.3f", ratio), FormatBytes(c.resident_raw_bytes), FormatBytes(c.resident_encoded_bytes),
         FormatBytes(c.resident_activation_bytes), absl::StrCat(c.sequences), absl::StrCat(c.published_blocks),
         c.digest.ToHex(6)});
  }
  return FormatTable({"ID", "MODEL", "TENANT", "LABEL", "CODEC", "LAYERSxQ/KVxD", "PAGE", "LAG", "SINKS", "RATIO",
                      "RAW", "ENCODED", "ACTIVATIONS", "SEQUENCES", "BLOCKS", "DIGEST"},
                     rows);
}

std::string FormatSequences(const std::vector<SequenceDescription>& sequences) {
  if (sequences.empty()) return "no sequences: nobody holds a lease\n";
  std::vector<std::vector<std::string>> rows;
  rows.reserve(sequences.size());
  for (const SequenceDescription& s : sequences) {
    rows.push_back({absl::StrCat(s.id), absl::StrCat(s.cache_id), absl::StrCat(s.tokens), absl::StrCat(s.hit_blocks),
                    absl::StrCat(s.published_blocks), FormatBytes(s.bytes), s.pid == 0 ? "-" : absl::StrCat(s.pid),
                    OrNone(s.client)});
  }
  return FormatTable({"ID", "CACHE", "TOKENS", "HIT BLOCKS", "PUBLISHED", "BYTES", "PID", "CLIENT"}, rows);
}

std::string FormatPeers(const std::vector<PeerDescription>& peers) {
  if (peers.empty()) return "no peers: nothing has been handed off since the daemon started\n";
  const auto rate = [](double bytes_per_second) {
    return bytes_per_second > 0 ? absl::StrCat(FormatBytes(uint64_t(bytes_per_second)), "/s") : "-";
  };
  std::vector<std::vector<std::string>> rows, loads;
  for (const PeerDescription& p : peers) {
    rows.push_back({p.peer, p.incoming ? "in" : "out", absl::StrCat(p.transfers), absl::StrCat(p.failures),
                    absl::StrCat(p.active), FormatBytes(p.bytes), FormatBytes(p.copied_bytes), rate(p.bytes_per_second),
                    OrNone(p.last_error)});
    if (p.incoming) continue;
    if (p.load.ok()) {
      loads.push_back({p.peer, FormatBytes(p.load->free_bytes), FormatBytes(p.load->capacity_bytes),
                       FormatBytes(p.load->queued_bytes), absl::StrCat(p.load->waiting_offers),
                       absl::StrCat(p.load->active_transfers), rate(p.bytes_per_second), "-"});
    } else {
      loads.push_back(
          {p.peer, "-", "-", "-", "-", "-", rate(p.bytes_per_second), std::string(p.load.status().message())});
    }
  }
  std::string text =
      FormatTable({"PEER", "WAY", "TRANSFERS", "FAILURES", "ACTIVE", "BYTES", "COPIED", "RATE", "LAST ERROR"}, rows);
  if (loads.empty()) return text;
  return absl::StrCat(text, "\n",
                      FormatTable({"ASKED", "FREE", "OF", "QUEUED", "WAITING", "RECEIVES", "RATE", "ERROR"}, loads));
}

std::string FormatLimits(const std::vector<LimitDescription>& limits) {
  const auto amount = [](const LimitDescription& limit, uint64_t value) {
    if (limit.unit == "bytes") return FormatBytes(value);
    return limit.unit == "ms" || limit.unit == "s" ? absl::StrCat(value, " ", limit.unit) : absl::StrCat(value);
  };
  std::vector<std::vector<std::string>> rows;
  rows.reserve(limits.size());
  for (const LimitDescription& limit : limits) {
    rows.push_back({limit.name, limit.scope, amount(limit, limit.limit),
                    limit.used.has_value() ? amount(limit, *limit.used) : "-",
                    limit.flag.empty() ? "fixed" : limit.flag, limit.bounds});
  }
  return FormatTable({"NAME", "OF A", "LIMIT", "USED", "SET BY", "WHAT"}, rows);
}

json ToJson(const DaemonDescription& d) {
  json pools = json::array();
  for (const PoolDescription& p : d.pools) {
    pools.push_back({{"tier", Utf8(p.tier)},
                     {"capacity_bytes", p.capacity_bytes},
                     {"used_bytes", p.used_bytes},
                     {"slab_bytes", p.slab_bytes},
                     {"free_slabs", p.free_slabs},
                     {"huge_pages", Utf8(p.huge_pages)}});
  }
  json disk;  // null: there is none
  if (d.disk.has_value()) {
    disk = {{"path", Utf8(d.disk->path)},
            {"capacity_bytes", d.disk->capacity_bytes},
            {"used_bytes", d.disk->used_bytes},
            {"blocks", d.disk->blocks},
            {"unwritten_blocks", d.disk->unwritten_blocks},
            {"state", Utf8(d.disk->state)}};
  }
  json kept;  // null: without --state-dir
  if (d.kept_memory.has_value()) {
    kept = {{"state_dir", Utf8(d.kept_memory->state_dir)},
            {"state", Utf8(d.kept_memory->state)},
            {"pid", d.kept_memory->pid},
            {"unclaimed_blocks", d.kept_memory->unclaimed_blocks}};
  }
  return {{"version", Utf8(d.version)},
          {"boot_epoch", Hex(d.boot_epoch)},
          {"uptime_seconds", d.uptime_seconds},
          {"draining", d.draining},
          {"pools", pools},
          {"disk", disk},
          {"kept_memory", kept},
          {"connections", d.connections},
          {"caches", d.caches},
          {"threads", d.threads},
          {"leases", d.leases},
          {"waiting_hand_offs", d.waiting_hand_offs},
          {"published_blocks", d.published_blocks},
          {"cpu_target", Utf8(d.cpu_target)},
          {"listen", Utf8(d.listen)},
          {"peer_listen", Utf8(d.peer_listen)},
          {"metrics_listen", Utf8(d.metrics_listen)},
          {"http_listen", Utf8(d.http_listen)},
          {"gpus", Utf8(d.gpus)},
          {"ucx", Utf8(d.ucx)},
          {"pinned_bytes", d.pinned_bytes},
          {"pin_total_bytes", d.pin_total_bytes},
          {"pin_error", Utf8(d.pin_error)}};
}

json ToJson(const std::vector<CacheDescription>& caches) {
  json list = json::array();
  for (const CacheDescription& c : caches) {
    const CacheOptions& o = c.options;
    list.push_back({{"id", c.id},
                    {"digest", c.digest.ToHex()},
                    {"model", Utf8(o.model)},
                    {"revision", Utf8(o.revision)},
                    {"tenant", Utf8(o.tenant)},
                    {"tenant_label", TenantLabel(o.tenant)},
                    {"rope", Utf8(o.rope)},
                    {"calibration_digest", Utf8(o.calibration_digest)},
                    {"layers", o.layers},
                    {"kv_heads", o.kv_heads},
                    {"query_heads", o.query_heads},
                    {"head_dim", o.head_dim},
                    {"page_tokens", o.page_tokens},
                    {"dtype", DTypeName(o.dtype)},
                    {"tensor_parallel_rank", o.tensor_parallel_rank},
                    {"tensor_parallel_size", o.tensor_parallel_size},
                    {"codec", Utf8(o.codec)},
                    {"lag_pages", o.lag_pages},
                    {"device", o.device},
                    {"hidden_size", o.hidden_size},
                    {"raw_page_bytes", c.raw_page_bytes},
                    {"encoded_page_bytes", c.encoded_page_bytes},
                    {"payload_page_bytes", c.payload_page_bytes},
                    {"sink_tokens", c.sink_tokens},
                    {"resident_raw_bytes", c.resident_raw_bytes},
                    {"resident_encoded_bytes", c.resident_encoded_bytes},
                    {"resident_activation_bytes", c.resident_activation_bytes},
                    {"sequences", c.sequences},
                    {"published_blocks", c.published_blocks}});
  }
  return {{"caches", list}};
}

json ToJson(const std::vector<SequenceDescription>& sequences) {
  json list = json::array();
  for (const SequenceDescription& s : sequences) {
    list.push_back({{"id", s.id},
                    {"cache_id", s.cache_id},
                    {"tokens", s.tokens},
                    {"hit_blocks", s.hit_blocks},
                    {"published_blocks", s.published_blocks},
                    {"bytes", s.bytes},
                    {"client", Utf8(s.client)},
                    {"pid", s.pid}});
  }
  return {{"sequences", list}};
}

json ToJson(const std::vector<PeerDescription>& peers) {
  json list = json::array();
  for (const PeerDescription& p : peers) {
    json peer = {{"peer", Utf8(p.peer)},
                 {"incoming", p.incoming},
                 {"transfers", p.transfers},
                 {"failures", p.failures},
                 {"active", p.active},
                 {"bytes", p.bytes},
                 {"copied_bytes", p.copied_bytes},
                 {"bytes_per_second", p.bytes_per_second},
                 {"last_error", Utf8(p.last_error)}};
    if (p.load.ok()) {
      peer["load"] = {{"capacity_bytes", p.load->capacity_bytes},
                      {"free_bytes", p.load->free_bytes},
                      {"queued_bytes", p.load->queued_bytes},
                      {"waiting_offers", p.load->waiting_offers},
                      {"active_transfers", p.load->active_transfers}};
    } else if (!p.incoming) {
      peer["load_error"] = Utf8(std::string(p.load.status().message()));
    }
    list.push_back(std::move(peer));
  }
  return {{"peers", list}};
}

json ToJson(const std::vector<LimitDescription>& limits) {
  json list = json::array();
  for (const LimitDescription& limit : limits) {
    list.push_back({{"name", Utf8(limit.name)},
                    {"scope", Utf8(limit.scope)},
                    {"unit", Utf8(limit.unit)},
                    {"limit", limit.limit},
                    {"used", limit.used.has_value() ? json(*limit.used) : json()},
                    {"flag", Utf8(limit.flag)},
                    {"bounds", Utf8(limit.bounds)}});
  }
  return {{"limits", list}};
}

json ErrorToJson(const absl::Status& error, absl::string_view address, bool reached) {
  const ErrorDetail detail = DetailOf(error);
  json body = {{"code", absl::StatusCodeToString(error.code())}, {"message", Utf8(std::string(error.message()))}};
  if (!detail.field.empty()) body["field"] = Utf8(detail.field);
  if (!detail.value.empty()) body["value"] = Utf8(detail.value);
  if (!detail.bound.empty()) body["bound"] = Utf8(detail.bound);
  if (const std::string advice = Advice(error, address, reached); !advice.empty()) body["advice"] = Utf8(advice);
  return {{"error", body}};
}

std::string Advice(const absl::Status& error, absl::string_view address, bool reached) {
  const bool tls = absl::StartsWith(address, "tls:");
  const std::string at =
      tls ? absl::StrCat("tcp:", address.substr(4), " --tls-cert FILE --tls-key FILE") : std::string(address);
  switch (error.code()) {
    case absl::StatusCode::kUnavailable:
      if (DetailOf(error).field == kUpgradeField) return "";  // it says itself what to start
      if (reached) return "the daemon was reached before: its log says more, and `kvctl status` whether it serves now.";
      return absl::StrCat(
          "is the daemon running, and listening there? If it has run before, start it with the flags that it had, "
          "--state-dir among them (a service: systemctl start kvmanagerd). Start a new one with\n  kvmanagerd "
          "--listen ",
          at,
          " --host-pool-bytes 4GiB --metrics-listen 127.0.0.1:9464\nor say where it is with --connect ADDRESS or "
          "KVMANAGER_ADDRESS (unix:PATH, tcp:HOST:PORT or tls:HOST:PORT). Who may connect to a Unix socket is up to "
          "its "
          "file's permissions: ls -l shows them.");
    case absl::StatusCode::kDeadlineExceeded:
      return "the daemon is there but does not answer: see its log and its metrics; --deadline-ms waits longer.";
    case absl::StatusCode::kNotFound: {
      const std::string field = DetailOf(error).field;  // another option names a file
      return absl::StartsWith(field, "--") && field != "--cache"
                 ? ""
                 : "`kvctl caches` and `kvctl sequences` list what there is.";
    }
    case absl::StatusCode::kUnimplemented:
      return "the daemon is older than this kvctl: install both from one release.";
    case absl::StatusCode::kPermissionDenied:
      return DetailOf(error).field == "admin_address" ? "run kvctl as the daemon's user or as root (sudo)." : "";
    case absl::StatusCode::kFailedPrecondition:
      return DetailOf(error).field == "api_major" ? "install kvctl and kvmanagerd from one release." : "";
    default:
      return "";
  }
}

}  // namespace kvmanager::client::cli
