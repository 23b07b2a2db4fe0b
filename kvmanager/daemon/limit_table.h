// The table of limits: every bound that the daemon puts on what clients and peers send, hold and keep waiting.
//
// A limit is declared once, in limit_table.cc: its name, whose use it bounds, its value, which is the constant or
// option that enforces it, and how its use is counted. kvmanagerd --help, Admin.limits and with it `kvctl limits` show
// the table; tests/flags_test.py compares docs/operating.md and docs/security.md with it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "kvmanager/daemon/options.h"
#include "kvmanager/rpc/daemon_facts.h"

namespace kvmanager {

/// What is used now of what the table bounds. Of a tenant, a connection or a process: of the one that has most.
struct LimitUse {
  uint64_t host_pool_bytes = 0, device_pool_bytes = 0, disk_bytes = 0;
  uint64_t arena_bytes = 0, recompute_bytes = 0, recompute_device_bytes = 0;
  uint64_t request_bytes = 0, reply_bytes = 0;
  uint64_t connections = 0, tcp_connections = 0, admin_connections = 0, tls_handshakes = 0;
  uint64_t sequences = 0, lease_pages = 0, mapped_pages = 0, sent_pages = 0, caches = 0;
  uint64_t waiting_hand_offs = 0, waiting_blob_bytes = 0, outgoing_hand_offs = 0;
  uint64_t listed_tenants = 0;
  uint64_t tenant_pool_bytes = 0, tenant_recompute_bytes = 0, tenant_recompute_device_bytes = 0;
  uint64_t tenant_sequences = 0, tenant_shared_blocks = 0, tenant_lease_pages = 0, tenant_mapped_pages = 0,
           tenant_caches = 0, tenant_waiting_hand_offs = 0, tenant_waiting_blob_bytes = 0,
           tenant_outgoing_hand_offs = 0, tenant_to_peer_hand_offs = 0, tenant_sent_pages = 0;
  uint64_t user_connections = 0, host_connections = 0, user_arena_bytes = 0;
  uint64_t process_connections = 0;
  uint64_t connection_sequences = 0, connection_request_bytes = 0, connection_reply_bytes = 0;
  uint64_t connection_block_leases = 0, connection_mapped_pages = 0, connection_prefetch_names = 0;
  uint64_t connection_caches = 0, connection_arenas = 0, connection_arena_bytes = 0;
};

/// The table, for these options. use: nullptr: without. Any thread.
std::vector<Limit> ListLimits(const Options& options, const LimitUse* use);
inline std::vector<Limit> ListLimits(const Options& options, const LimitUse& use) { return ListLimits(options, &use); }

/// "4096", "10000 ms", "64KiB": as options are written; "as set" where an option says it and was not given.
std::string LimitText(const Limit& limit);

/// The table as the end of --help: a line each.
std::string LimitsHelp(absl::Span<const Limit> limits);

}  // namespace kvmanager
