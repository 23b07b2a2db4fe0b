// What kvmanagerd is told at start, by flags or by a file that says the same.
//
// Values that copy. Parsing has no effect beyond its result; nothing here opens, binds or allocates.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvmanager/base/byte_text.h"
#include "kvmanager/daemon/handed_sockets.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/eviction/eviction_policy.h"

namespace kvmanager {

constexpr absl::string_view kVersion = "0.1.0";

struct Options {
  static constexpr size_t kListenMax = 8;
  static constexpr size_t kCodecPluginsMax = 32;
  static constexpr size_t kHandOffPeersMax = 1024;
  static constexpr size_t kPeerTenantsMax = 1024;
  static constexpr size_t kHttpHostsMax = 64, kHttpHostBytesMax = 253;
  static constexpr uint64_t kHostPoolBytesMin = 2 << 20, kHostPoolBytesMax = uint64_t{1} << 41;
  static constexpr uint64_t kDiskBytesMin = BlockDisk::kBytesMin, kDiskBytesMax = uint64_t{1} << 46;
  static constexpr uint64_t kArenaBytesMax = uint64_t{1} << 41;
  static constexpr uint64_t kMemoryBeyondPoolBytesMin = uint64_t{128} << 20;
  static constexpr uint64_t kSlabBytesMax = uint64_t{1} << 30;
  static constexpr int64_t kThreadsMax = 1024;
  static constexpr int64_t kBusyPollUsMax = 1000000;
  static constexpr int64_t kHandOffLeaseMsMin = 100, kHandOffLeaseMsMax = 3600000;
  static constexpr int64_t kDrainSMax = 3600;
  static constexpr int64_t kTenantMostPercentMin = 1, kTenantMostPercentMax = 100;
  static constexpr uint64_t kDeviceSlabBytesMin = uint64_t{256} << 20, kDeviceSlabBytesMax = uint64_t{16} << 30;
  static constexpr uint64_t kDeviceSlabBytesStep = uint64_t{2} << 20;
  static constexpr uint64_t kDevicePoolBytesMax = uint64_t{1} << 38;  // of one GPU
  static constexpr size_t kDevicesMax = 16;
  static constexpr int kDeviceOrdinalMax = 1023;
  static constexpr int64_t kQualitySampleMax = 1000000000;
  static constexpr int64_t kStateKeepSMax = 1000000;
  static constexpr uint64_t kPeerRateBytesMin = 1 << 16;
  static constexpr uint64_t kPeerWindowBytesMin = 1 << 16, kPeerWindowBytesMax = uint64_t{4} << 30;

  std::vector<std::string> listen;      // "unix:PATH" or "tcp:HOST:PORT"; 1..kListenMax
  uint64_t host_pool_bytes = 0;         // kHostPoolBytesMin..kHostPoolBytesMax
  std::string admin_listen;             // "unix:PATH" or "none"; empty: beside the first Unix socket of `listen`
  std::string tenants;                  // file that says whose tenants are (rpc/principals.h); empty: none
  std::string metrics_listen;           // "HOST:PORT"; empty: no metrics endpoint
  std::string http_listen;              // "HOST:PORT"; empty: no page for people
  std::vector<std::string> http_hosts;  // names in the Host field that both answer to, or "any"; at most kHttpHostsMax
  std::string peer_listen;              // "HOST:PORT"; empty: receives no hand-offs
  std::vector<std::string> hand_off_peers;  // "HOST:PORT" that clients may name, or "any"; at most kHandOffPeersMax
  std::string peer_key;                     // file of the key that TCP peers must have; empty: none
  std::string tls_cert, tls_key;            // files in PEM of what TCP listeners speak TLS with; both or none
  std::string tls_ca;  // file in PEM of who signs certificates of clients and peers; empty: no one's are taken
  bool tls_clients_required = false;  // a client over TCP must have one
  bool peer_tls = true;               // peers speak TLS too, if tls_ca is set
  std::vector<std::string> peer_tenants = {
      "any"};                                    // whose sequences peers may bring, or "any"; at most kPeerTenantsMax
  bool insecure = false;                         // listen on addresses that others reach, without a key
  std::string disk_path;                         // folder in which published blocks are kept; empty: no disk
  uint64_t disk_bytes = 0;                       // that they take there: kDiskBytesMin..kDiskBytesMax with disk_path
  std::string state_dir;                         // folder of the keeper of host memory; empty: it goes with the daemon
  int64_t state_keep_s = 300;                    // without a daemon: 0 (for ever)..kStateKeepSMax
  EvictionKind eviction = EvictionKind::kCost;   // of every tier, and of the disk
  int64_t tenant_most_percent = 100;             // of each pool, for a tenant: kTenantMostPercentMin..Max
  int64_t threads = 0;                           // 0: one per CPU that the process may use
  int64_t busy_poll_us = 0;                      // 0..kBusyPollUsMax
  uint64_t arena_bytes = uint64_t{8} << 30;      // of all arenas together: 0..kArenaBytesMax
  uint64_t recompute_bytes = uint64_t{8} << 30;  // of projections that clients register: 0..kArenaBytesMax
  uint64_t recompute_device_bytes = 0;           // the same, of each GPU: 0 (the CPU multiplies)..kDevicePoolBytesMax
  int64_t quality_sample = 64;     // of each layer one encoded page in so many is compared: 0 (none)..kQualitySampleMax
  uint64_t slab_bytes = 0;         // 0: from host_pool_bytes; else a multiple of 2 MiB up to kSlabBytesMax
  uint64_t device_pool_bytes = 0;  // of each GPU: 0 (none is used), or device_slab_bytes..kDevicePoolBytesMax
  uint64_t device_slab_bytes = uint64_t{256} << 20;  // kDeviceSlabBytesMin..Max, a multiple of kDeviceSlabBytesStep
  std::vector<int> devices = {0};                    // ordinals, each once; 1..kDevicesMax
  int64_t hand_off_lease_ms = 60000;                 // kHandOffLeaseMsMin..kHandOffLeaseMsMax
  int64_t drain_s = 10;                              // 0..kDrainSMax
  uint64_t peer_rate_bytes = 0;           // per second sent to all peers; 0: no limit; else kPeerRateBytesMin or more
  uint64_t peer_window_bytes = 64 << 20;  // on their way to this daemon: kPeerWindowBytesMin..Max
  bool peer_local_copy = true;            // pages from and to daemons of this host and user by copying between memories
  std::string map_blocks = "own";         // whose engines map blocks of their tenants for reading: own, all or off
  bool peer_zero_copy = true;             // TCP sends pages straight from the pool, where the kernel has that
  std::string peer_ucx_key;               // file of the key of peers that read pages through UCX; empty: none do
  uint64_t memory_beyond_pool_bytes = uint64_t{1} << 30;  // kMemoryBeyondPoolBytesMin..kArenaBytesMax
  std::string calibration_dir;                            // of artifacts that codecs may name; empty: none can be named
  std::vector<std::string> codec_plugins;                 // shared objects; at most kCodecPluginsMax
  bool codec_plugin_process = false;                      // each of these in a process of its own
  std::string log_level = "info";                         // debug, info, warn, error or off

  // What main() knows besides flags.
  std::vector<std::string> command;   // this program's path and its flags, for an upgrade; empty: there can be none
  std::vector<HandedSocket> sockets;  // listening ones that the process was given
};

/// Whether peers speak TLS, both ways.
inline bool PeersSpeakTls(const Options& options) { return options.peer_tls && !options.tls_ca.empty(); }

/// The listeners that whoever reaches the host may use, as flag and value: "--listen tcp:0.0.0.0:9000".
std::vector<std::string> OpenListeners(const Options& options);

/// What the command line asks for: to run, or to print `text` and stop.
struct CommandLine {
  bool run = false;
  std::string text;
  Options options;
};

/// help_end: what --help says last. Errors: INVALID_ARGUMENT naming the flag, its value and its bound.
absl::StatusOr<CommandLine> ParseCommandLine(int argc, const char* const* argv, absl::string_view help_end = "");

/// Where Admin is served: Options::admin_listen, or "unix:PATH.admin" of the first Unix socket; empty: nowhere, since
/// there is none, or its path would be too long.
std::string AdminAddress(const Options& options);

}  // namespace kvmanager
