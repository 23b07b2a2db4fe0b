#include "kvmanager/daemon/options.h"

#include <sys/stat.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kvmanager/base/address.h"
#include "kvmanager/base/status.h"
#include "kvmanager/daemon/options_places.h"
#include "kvmanager/daemon/options_trust.h"

namespace kvmanager {
namespace {

constexpr off_t kConfigBytesMax = 1 << 20;

constexpr char kAbout[] =
    "kvmanagerd owns the memory in which LLM inference engines on this host keep attention keys and values.\n"
    "Engines connect over Cap'n Proto RPC; see docs/operating.md and docs/api.md.\n";

constexpr char kExamples[] =
    "Examples:\n"
    "  One host, 8 GiB of pages, metrics for Prometheus:\n"
    "    kvmanagerd --listen unix:/run/kvmanager/kvmanager.sock --host-pool-bytes 8GiB --metrics-listen "
    "127.0.0.1:9464\n"
    "  A decode host that also receives sequences from prefill hosts:\n"
    "    kvmanagerd --listen unix:/run/kvmanager/kvmanager.sock --host-pool-bytes 64GiB \\\n"
    "        --metrics-listen 0.0.0.0:9464 --peer-listen 0.0.0.0:9470 --peer-key /etc/kvmanager/peer.key\n"
    "  The same from a file, in which each line is a flag without its dashes:\n"
    "    kvmanagerd --config /etc/kvmanagerd.conf\n"
    "      listen = \"unix:/run/kvmanager/kvmanager.sock\"\n"
    "      host-pool-bytes = \"64GiB\"\n"
    "      metrics-listen = \"0.0.0.0:9464\"\n"
    "      peer-listen = \"0.0.0.0:9470\"\n"
    "      peer-key = \"/etc/kvmanager/peer.key\"\n"
    "Port 0 picks a free port; the line `kvmanagerd ready listen=... peer=... metrics=... http=... admin=...` on "
    "stdout names it.\n"
    "SIGTERM drains (no new sequences; leases and unclaimed hand-offs get --drain-s seconds) and exits with 0;\n"
    "a second one exits at once.\n";

std::string Range(int64_t low, int64_t high) { return absl::StrCat(low, "..", high); }

absl::Status ParseInteger(absl::string_view field, const std::string& text, int64_t low, int64_t high, int64_t* out) {
  int64_t value;
  if (!absl::SimpleAtoi(text, &value) || value < low || value > high)
    return InvalidField(field, text, Range(low, high));
  *out = value;
  return absl::OkStatus();
}

absl::Status CheckBytes(absl::string_view field, const std::string& text, uint64_t low, uint64_t high, uint64_t* out) {
  KV_ASSIGN_OR_RETURN(*out, ParseBytes(field, text, low, high));
  return absl::OkStatus();
}

// The flags as texts: what CLI11 fills from the command line and the file, before values are checked.
struct Texts {
  std::string host_pool_bytes, threads, busy_poll_us, quality_sample, arena_bytes, recompute_bytes,
      memory_beyond_pool_bytes, slab_bytes, hand_off_lease_ms, tenant_most_percent, drain_s, peer_rate_bytes,
      peer_window_bytes, peer_local_copy, peer_zero_copy, peer_tls, tls_clients, device_pool_bytes, device_slab_bytes,
      devices, recompute_device_bytes, eviction, disk_bytes, state_keep_s;
  std::vector<std::string> peer_tenants;
};

absl::Status CheckDevices(const Texts& texts, Options* options) {
  if (!texts.device_slab_bytes.empty()) {
    KV_RETURN_IF_ERROR(CheckBytes("--device-slab-bytes", texts.device_slab_bytes, Options::kDeviceSlabBytesMin,
                                  Options::kDeviceSlabBytesMax, &options->device_slab_bytes));
    if (options->device_slab_bytes % Options::kDeviceSlabBytesStep != 0) {
      return InvalidField("--device-slab-bytes", texts.device_slab_bytes, "a multiple of 2MiB");
    }
  }
  if (!texts.device_pool_bytes.empty()) {
    KV_RETURN_IF_ERROR(CheckBytes("--device-pool-bytes", texts.device_pool_bytes, 0, Options::kDevicePoolBytesMax,
                                  &options->device_pool_bytes));
    if (options->device_pool_bytes != 0 && options->device_pool_bytes < options->device_slab_bytes) {
      return InvalidField("--device-pool-bytes", texts.device_pool_bytes,
                          absl::StrCat("0 (no GPU), or at least --device-slab-bytes, ", options->device_slab_bytes));
    }
  }
  if (!texts.recompute_device_bytes.empty()) {
    KV_RETURN_IF_ERROR(CheckBytes("--recompute-device-bytes", texts.recompute_device_bytes, 0,
                                  Options::kDevicePoolBytesMax, &options->recompute_device_bytes));
    if (options->recompute_device_bytes > 0 && options->device_pool_bytes == 0) {
      return InvalidField("--recompute-device-bytes", texts.recompute_device_bytes, "0 without --device-pool-bytes");
    }
  }
  if (texts.devices.empty()) return absl::OkStatus();
  const std::string bound = absl::StrCat("ordinals of GPUs such as 0 or 0,1, each once, at most ", Options::kDevicesMax,
                                         " of 0..", Options::kDeviceOrdinalMax);
  options->devices.clear();
  for (const absl::string_view word : absl::StrSplit(texts.devices, ',')) {
    int ordinal;
    if (!absl::SimpleAtoi(word, &ordinal) || ordinal < 0 || ordinal > Options::kDeviceOrdinalMax ||
        options->devices.size() == Options::kDevicesMax ||
        std::find(options->devices.begin(), options->devices.end(), ordinal) != options->devices.end()) {
      return InvalidField("--devices", texts.devices, bound);
    }
    options->devices.push_back(ordinal);
  }
  return absl::OkStatus();
}

constexpr char kAny[] = "any";

bool IsAny(const std::vector<std::string>& values) { return values == std::vector<std::string>{kAny}; }

absl::Status Check(const Texts& texts, Options* options) {
  if (options->listen.empty()) return InvalidField("--listen", "missing", "unix:PATH or tcp:HOST:PORT");
  if (options->listen.size() > Options::kListenMax) {
    return InvalidField("--listen", absl::StrCat("given ", options->listen.size(), " times"),
                        absl::StrCat("given at most ", Options::kListenMax, " times"));
  }
  for (const std::string& listen : options->listen) {
    KV_RETURN_IF_ERROR(ParseListenAddress("--listen", listen).status());
  }
  if (const std::string& admin = options->admin_listen; !admin.empty() && admin != "none") {
    const auto address = ParseListenAddress("--admin-listen", admin);
    if (!address.ok() || address->unix_path.empty()) {
      return InvalidField("--admin-listen", admin, "unix:PATH with a path of 1..107 bytes, or none");
    }
  }
  if (texts.host_pool_bytes.empty()) {
    return InvalidField("--host-pool-bytes", "missing", "the memory for pages, such as 8GiB");
  }
  KV_RETURN_IF_ERROR(CheckBytes("--host-pool-bytes", texts.host_pool_bytes, Options::kHostPoolBytesMin,
                                Options::kHostPoolBytesMax, &options->host_pool_bytes));
  if (!options->metrics_listen.empty()) {
    KV_RETURN_IF_ERROR(ParseHostPort("--metrics-listen", options->metrics_listen).status());
  }
  if (!options->http_listen.empty()) {
    KV_RETURN_IF_ERROR(ParseHostPort("--http-listen", options->http_listen).status());
  }
  if (options->http_hosts.size() > Options::kHttpHostsMax) {
    return InvalidField("--http-hosts", absl::StrCat(options->http_hosts.size(), " names"),
                        absl::StrCat("at most ", Options::kHttpHostsMax, " names"));
  }
  for (const std::string& host : options->http_hosts) {
    if (host.empty() || host.size() > Options::kHttpHostBytesMax || host.find_first_of(":/[] ") != std::string::npos) {
      return InvalidField("--http-hosts", host,
                          absl::StrCat("a name of 1..", Options::kHttpHostBytesMax, " bytes, without a port, or any"));
    }
  }
  if (!options->peer_listen.empty()) {
    KV_RETURN_IF_ERROR(ParseHostPort("--peer-listen", options->peer_listen).status());
  }
  if (options->hand_off_peers.size() > Options::kHandOffPeersMax) {
    return InvalidField("--hand-off-peers", absl::StrCat(options->hand_off_peers.size(), " addresses"),
                        absl::StrCat("at most ", Options::kHandOffPeersMax, " addresses"));
  }
  for (const std::string& peer : options->hand_off_peers) {
    if (IsAny(options->hand_off_peers)) break;
    KV_RETURN_IF_ERROR(ParseHostPort("--hand-off-peers", peer).status());
  }
  for (const auto& [flag, text, value] :
       {std::tuple("--peer-local-copy", &texts.peer_local_copy, &options->peer_local_copy),
        std::tuple("--peer-zero-copy", &texts.peer_zero_copy, &options->peer_zero_copy),
        std::tuple("--peer-tls", &texts.peer_tls, &options->peer_tls)}) {
    if (text->empty()) continue;
    if (*text != "on" && *text != "off") return InvalidField(flag, *text, "on or off");
    *value = *text == "on";
  }
  if (!texts.tls_clients.empty() && texts.tls_clients != "allow" && texts.tls_clients != "require") {
    return InvalidField("--tls-clients", texts.tls_clients, "allow or require");
  }
  options->tls_clients_required = texts.tls_clients == "require";
  KV_RETURN_IF_ERROR(CheckTrust(texts.peer_tenants, texts.peer_tls, options));
  KV_RETURN_IF_ERROR(CheckPlaces(*options));
  if (!texts.arena_bytes.empty()) {
    KV_RETURN_IF_ERROR(
        CheckBytes("--arena-bytes", texts.arena_bytes, 0, Options::kArenaBytesMax, &options->arena_bytes));
  }
  if (!texts.memory_beyond_pool_bytes.empty()) {
    KV_RETURN_IF_ERROR(CheckBytes("--memory-beyond-pool-bytes", texts.memory_beyond_pool_bytes,
                                  Options::kMemoryBeyondPoolBytesMin, Options::kArenaBytesMax,
                                  &options->memory_beyond_pool_bytes));
  }
  if (!texts.recompute_bytes.empty()) {
    KV_RETURN_IF_ERROR(
        CheckBytes("--recompute-bytes", texts.recompute_bytes, 0, Options::kArenaBytesMax, &options->recompute_bytes));
  }
  if (!texts.slab_bytes.empty()) {
    KV_RETURN_IF_ERROR(CheckBytes("--slab-bytes", texts.slab_bytes, 0, Options::kSlabBytesMax, &options->slab_bytes));
    constexpr uint64_t kStep = 2 << 20;
    if (options->slab_bytes % kStep != 0 || options->slab_bytes > options->host_pool_bytes) {
      return InvalidField("--slab-bytes", texts.slab_bytes, "a multiple of 2MiB, at most --host-pool-bytes");
    }
  }
  if (options->disk_path.empty() != texts.disk_bytes.empty()) {
    return options->disk_path.empty()
               ? InvalidField("--disk-path", "missing", "a folder, as --disk-bytes is given")
               : InvalidField("--disk-bytes", "missing", "the room in --disk-path, such as 1TiB");
  }
  if (!texts.disk_bytes.empty()) {
    KV_RETURN_IF_ERROR(CheckBytes("--disk-bytes", texts.disk_bytes, Options::kDiskBytesMin, Options::kDiskBytesMax,
                                  &options->disk_bytes));
  }
  if (options->state_dir.empty() && !texts.state_keep_s.empty()) {
    return InvalidField("--state-dir", "missing", "a folder, as --state-keep-s is given");
  }
  if (!texts.eviction.empty()) {
    KV_ASSIGN_OR_RETURN(options->eviction, ParseEvictionKind("--eviction", texts.eviction));
  }
  KV_RETURN_IF_ERROR(CheckDevices(texts, options));
  const struct {
    const char* flag;
    const std::string& text;
    int64_t low, high;
    int64_t* value;
  } integers[] = {
      {"--threads", texts.threads, 0, Options::kThreadsMax, &options->threads},
      {"--busy-poll-us", texts.busy_poll_us, 0, Options::kBusyPollUsMax, &options->busy_poll_us},
      {"--quality-sample", texts.quality_sample, 0, Options::kQualitySampleMax, &options->quality_sample},
      {"--tenant-most-percent", texts.tenant_most_percent, Options::kTenantMostPercentMin,
       Options::kTenantMostPercentMax, &options->tenant_most_percent},
      {"--hand-off-lease-ms", texts.hand_off_lease_ms, Options::kHandOffLeaseMsMin, Options::kHandOffLeaseMsMax,
       &options->hand_off_lease_ms},
      {"--drain-s", texts.drain_s, 0, Options::kDrainSMax, &options->drain_s},
      {"--state-keep-s", texts.state_keep_s, 0, Options::kStateKeepSMax, &options->state_keep_s},
  };
  for (const auto& [flag, text, low, high, value] : integers) {
    if (!text.empty()) KV_RETURN_IF_ERROR(ParseInteger(flag, text, low, high, value));
  }
  if (!texts.peer_rate_bytes.empty()) {
    KV_RETURN_IF_ERROR(
        CheckBytes("--peer-rate-bytes", texts.peer_rate_bytes, 0, UINT64_MAX, &options->peer_rate_bytes));
    if (options->peer_rate_bytes != 0 && options->peer_rate_bytes < Options::kPeerRateBytesMin) {
      return InvalidField("--peer-rate-bytes", texts.peer_rate_bytes,
                          absl::StrCat("0 (no limit), or ", Options::kPeerRateBytesMin, " or more"));
    }
  }
  if (!texts.peer_window_bytes.empty()) {
    KV_RETURN_IF_ERROR(CheckBytes("--peer-window-bytes", texts.peer_window_bytes, Options::kPeerWindowBytesMin,
                                  Options::kPeerWindowBytesMax, &options->peer_window_bytes));
  }
  if (std::error_code error;
      !options->peer_ucx_key.empty() && !std::filesystem::is_regular_file(options->peer_ucx_key, error)) {
    return InvalidField("--peer-ucx-key", options->peer_ucx_key, "a file that exists");
  }
  if (std::error_code error;
      !options->calibration_dir.empty() && !std::filesystem::is_directory(options->calibration_dir, error)) {
    return InvalidField("--calibration-dir", options->calibration_dir, "a directory that exists");
  }
  if (options->codec_plugins.size() > Options::kCodecPluginsMax) {
    return InvalidField("--codec-plugin", absl::StrCat("given ", options->codec_plugins.size(), " times"),
                        absl::StrCat("given at most ", Options::kCodecPluginsMax, " times"));
  }
  for (absl::string_view level : {"debug", "info", "warn", "error", "off"}) {
    if (options->log_level == level) return absl::OkStatus();
  }
  return InvalidField("--log-level", options->log_level, "debug, info, warn, error or off");
}

// Empty: it can be read; CLI11 says itself that there is none.
std::string CheckConfigFile(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return "";
  if (!S_ISREG(info.st_mode)) return absl::StrCat(path, " is no regular file");
  if (info.st_size <= kConfigBytesMax) return "";
  return absl::StrCat(path, " has ", info.st_size, " bytes, must be at most ", kConfigBytesMax);
}

}  // namespace

std::string AdminAddress(const Options& options) {
  if (options.admin_listen == "none") return "";
  if (!options.admin_listen.empty()) return options.admin_listen;
  for (const std::string& listen : options.listen) {
    if (!absl::StartsWith(listen, "unix:")) continue;
    const std::string beside = listen + ".admin";
    return ParseListenAddress("--admin-listen", beside).ok() ? beside : "";
  }
  return "";
}

absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv, absl::string_view help_end) {
  CommandLine result;
  Options& options = result.options;
  Texts texts;
  CLI::App app(kAbout, "kvmanagerd");
  app.footer(absl::StrCat(kExamples, help_end));
  app.set_version_flag("--version", std::string(kVersion), "Print the version and exit");
  CLI::Option* const config =
      app.set_config("--config", "", "Read flags from FILE; the command line wins")->type_name("FILE");
  config->check(CheckConfigFile);
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::Throw);
  app.add_option("--listen", options.listen,
                 "Where engines and kvctl connect: unix:PATH or tcp:HOST:PORT; may be repeated")
      ->type_name("ADDRESS")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--admin-listen", options.admin_listen,
                 "Where kvctl connects, for this user and root alone: unix:PATH, or none (default: PATH.admin of the "
                 "first --listen unix:PATH; else none)")
      ->type_name("ADDRESS");
  app.add_option(
         "--tenants", options.tenants,
         "Which users and tokens open which tenants, in JSON, read again on SIGHUP; see docs/operating.md, \"Who "
         "may do what\" (default: each user has names of its own)")
      ->type_name("FILE");
  app.add_option(
         "--tls-cert", options.tls_cert,
         "Certificate of this daemon in PEM, those that signed it behind it: each --listen tcp: then speaks TLS "
         "1.3 and nothing else; read again on SIGHUP (default: no TLS)")
      ->type_name("FILE");
  app.add_option("--tls-key", options.tls_key, "Its private key in PEM, which its owner alone can read")
      ->type_name("FILE");
  app.add_option("--tls-ca", options.tls_ca,
                 "Who signs the certificates of clients and peers, in PEM. A client's certificate then says who it is; "
                 "peers speak TLS too, and must have one with extendedKeyUsage=serverAuth,clientAuth (default: no "
                 "certificate is asked for)")
      ->type_name("FILE");
  app.add_option("--tls-clients", texts.tls_clients,
                 "Whether clients over TLS may do without a certificate; allow or require (default allow)")
      ->type_name("allow|require");
  app.add_option("--tenant-most-percent", texts.tenant_most_percent,
                 "Most of each pool that one user, or one tenant of --tenants without \"most\" there, may have, in "
                 "percent (default 100)")
      ->type_name("N");
  app.add_option("--host-pool-bytes", texts.host_pool_bytes, "Host memory for pages, taken at start: 512MiB, 8GiB, ...")
      ->type_name("BYTES");
  app.add_option("--disk-path", options.disk_path,
                 "Folder of this daemon alone, on a local disk, in which published blocks are kept beyond the host's "
                 "memory and over restarts; made if it is not there (default: none are)")
      ->type_name("DIR");
  app.add_option("--disk-bytes", texts.disk_bytes, "Room for them there: 100GiB, 1TiB, ...")->type_name("BYTES");
  app.add_option(
         "--state-dir", options.state_dir,
         "Folder of this daemon alone, by which published blocks stay in host memory over restarts and kill -9: "
         "a process that it starts, or kvmanagerd --keeper DIR, keeps the memory meanwhile; made if it is not "
         "there (default: the memory goes with the daemon)")
      ->type_name("DIR");
  app.add_option("--state-keep-s", texts.state_keep_s,
                 "How long that process keeps the memory without a daemon; 0: until it is ended (default 300)")
      ->type_name("N");
  app.add_option("--eviction", texts.eviction,
                 "Which published block goes first when a pool is full: lru: the least recently used; s3fifo: S3-FIFO; "
                 "cost: the one whose memory is expected to save the least recompute (default cost)")
      ->type_name("lru|s3fifo|cost");
  app.add_option("--metrics-listen", options.metrics_listen, "Where Prometheus scrapes /metrics; absent: nowhere")
      ->type_name("HOST:PORT");
  app.add_option(
         "--http-listen", options.http_listen,
         "A page for people: memory, hits, transfers, attention, errors; 127.0.0.1:PORT, as it has no password; "
         "absent: nowhere")
      ->type_name("HOST:PORT");
  app.add_option("--http-hosts", options.http_hosts,
                 "Names by which browsers and scrapers may ask for --metrics-listen and --http-listen, besides numeric "
                 "addresses, localhost and this host's own name; others are answered 421; or any; may be repeated "
                 "(default: none)")
      ->type_name("NAME[,NAME...]")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--peer-listen", options.peer_listen,
                 "Where other daemons hand sequences to; absent: none are received")
      ->type_name("HOST:PORT");
  app.add_option("--hand-off-peers", options.hand_off_peers,
                 "The daemons that clients may name to hand sequences to or to ask for their load, as clients write "
                 "them, or any; may be repeated (default: none)")
      ->type_name("HOST:PORT[,HOST:PORT...]")
      ->delimiter(',')
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_option("--peer-key", options.peer_key,
                 "Peers must have the same file, 32 to 4096 bytes that its owner alone can read, and prove it before "
                 "anything else is said on a TCP connection, either way (default: no key, and without --tls-ca "
                 "--peer-listen only on loopback)")
      ->type_name("FILE");
  app.add_option("--peer-tenants", texts.peer_tenants,
                 "The tenants whose sequences peers may bring, or any; an empty name is that of caches without a "
                 "tenant; may be repeated (default: any)")
      ->type_name("NAME[,NAME...]")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_flag("--insecure", options.insecure,
               "Without TLS let --listen tcp: and, without --peer-key, --peer-listen be addresses that other hosts "
               "reach: whoever "
               "reaches them is trusted; with the latter --peer-tenants must be given");
  app.add_option("--threads", texts.threads, "Workers that encode and attend; 0: one per usable CPU (default 0)")
      ->type_name("N");
  app.add_option("--quality-sample", texts.quality_sample,
                 "Of each layer one encoded page in so many is attended to raw and encoded with recent queries, for "
                 "kvmanager_codec_relative_error; 0: none (default 64)")
      ->type_name("PAGES");
  app.add_option("--busy-poll-us", texts.busy_poll_us,
                 "Look for calls this long before blocking: lower latency for one busy CPU (default 0)")
      ->type_name("US");
  app.add_option("--arena-bytes", texts.arena_bytes,
                 "Most memory that clients may have in arenas, all together, besides the pool (default 8GiB)")
      ->type_name("BYTES");
  app.add_option("--memory-beyond-pool-bytes", texts.memory_beyond_pool_bytes,
                 "Memory for requests that are being received or served, and for replies, half for each; what finds no "
                 "room waits (default 1GiB, at least 128MiB)")
      ->type_name("BYTES");
  app.add_option(
      "--recompute-bytes", texts.recompute_bytes,
      "memory for the projection weights that clients register, to recompute K and V of received activations "
      "(default 8GiB; taken as they register; 0: none)");
  app.add_option("--recompute-device-bytes", texts.recompute_device_bytes,
                 "The same of each GPU of --devices, which then multiplies in the CPU's place; needs cuBLAS (default "
                 "0: the CPU does)")
      ->type_name("BYTES");
  app.add_option("--slab-bytes", texts.slab_bytes,
                 "Unit in which tenants get memory; 0: chosen by pool size (default 0)")
      ->type_name("BYTES");
  app.add_option("--device-pool-bytes", texts.device_pool_bytes,
                 "GPU memory for pages, of each GPU of --devices, taken at start; whole slabs; 0: no GPU (default 0)")
      ->type_name("BYTES");
  app.add_option("--devices", texts.devices, "GPUs to use, by ordinal (default 0)")->type_name("N[,N...]");
  app.add_option("--device-slab-bytes", texts.device_slab_bytes,
                 "Unit in which tenants get GPU memory (default 256MiB, the least)")
      ->type_name("BYTES");
  app.add_option("--hand-off-lease-ms", texts.hand_off_lease_ms,
                 "How long a received sequence waits to be claimed (default 60000)")
      ->type_name("MS");
  app.add_option("--drain-s", texts.drain_s,
                 "How long SIGTERM waits for leases to be given back and hand-offs to be claimed (default 10)")
      ->type_name("S");
  app.add_option(
         "--map-blocks", options.map_blocks,
         "Whose engines on this host map their tenant's blocks for reading: own: those of the daemon's user and "
         "root, all, or off: the daemon copies (default own)")
      ->check(CLI::IsMember({"own", "all", "off"}));
  app.add_option("--peer-rate-bytes", texts.peer_rate_bytes,
                 "Bytes per second sent to peers, all together; 0: no limit (default 0)")
      ->type_name("BYTES");
  app.add_option("--peer-window-bytes", texts.peer_window_bytes,
                 "Bytes of pages on their way to this daemon, of all senders: what is sent again at most after a link "
                 "breaks (default 64MiB)")
      ->type_name("BYTES");
  app.add_option("--peer-local-copy", texts.peer_local_copy,
                 "Pages go between daemons of this host and user from memory to memory, through no socket: these "
                 "daemons can read the whole pool; on or off (default on; what is sent never with --peer-rate-bytes)")
      ->type_name("on|off");
  app.add_option(
         "--peer-zero-copy", texts.peer_zero_copy,
         "TCP sends pages straight from the pool (MSG_ZEROCOPY) to where the kernel then copies none; on or off "
         "(default on)")
      ->type_name("on|off");
  app.add_option("--peer-tls", texts.peer_tls,
                 "Whether peers speak TLS, either way, where there is --tls-ca; on or off (default on)")
      ->type_name("on|off");
  app.add_option("--peer-ucx-key", options.peer_ucx_key,
                 "Pages also go through UCX (RDMA, shared memory, TCP), between daemons that have the same file, 16 to "
                 "4096 bytes; UCX's ports are open to whoever reaches them, see docs/operating.md (default: off)")
      ->type_name("FILE");
  app.add_option("--calibration-dir", options.calibration_dir,
                 "Directory of calibration artifacts, for caches whose codec names one: calibration=FILE")
      ->type_name("DIR");
  app.add_option("--codec-plugin", options.codec_plugins,
                 "Shared object of a codec, run in this process or as --codec-plugin-process says; may be repeated "
                 "(docs/writing-a-codec.md)")
      ->type_name("FILE.so")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  app.add_flag("--codec-plugin-process", options.codec_plugin_process,
               "Run each --codec-plugin in a process of its own, which can end and is started again: for plug-ins that "
               "are not trusted (docs/operating.md)");
  app.add_option("--log-level", options.log_level, "debug, info, warn, error or off (default info)")
      ->type_name("LEVEL");

  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    result.text = app.help();
    return result;
  } catch (const CLI::CallForVersion&) {
    result.text = absl::StrCat("kvmanagerd ", kVersion, "\n");
    return result;
  } catch (const CLI::ConfigError& error) {
    const std::string what = error.what();
    absl::string_view key = what;
    if (!absl::ConsumePrefix(&key, "INI was not able to parse ") || config->results().empty()) {
      return absl::InvalidArgumentError(what);
    }
    return InvalidField(absl::StrCat(key, " in ", config->results().front()), "unknown",
                        "a flag that kvmanagerd --help names, without its dashes");
  } catch (const CLI::Error& error) {
    return absl::InvalidArgumentError(error.what());
  }
  // What a script's variable, which is not set, would leave out without a word.
  for (const char* const flag : {"--tenants", "--tls-cert", "--tls-key", "--tls-ca", "--peer-key", "--admin-listen",
                                 "--disk-path", "--state-dir", "--calibration-dir"}) {
    const CLI::Option& option = *app.get_option(flag);
    if (option.count() > 0 && option.results().front().empty())
      return InvalidField(flag, "empty", "given, or left out");
  }
  KV_RETURN_IF_ERROR(Check(texts, &options));
  result.run = true;
  return result;
}

}  // namespace kvmanager
