#include "kvmanager/daemon/limit_use.h"

#include <algorithm>

namespace kvmanager {

LimitUse MeasureLimits(const LimitHolders& holders) {
  LimitUse use;
  use.host_pool_bytes = holders.host_pool->used_bytes();
  for (Gpu* const gpu : holders.gpus) {
    use.device_pool_bytes = std::max<uint64_t>(use.device_pool_bytes, gpu->pool()->used_bytes());
  }
  if (holders.disk != nullptr) use.disk_bytes = holders.disk->use().used_bytes;
  use.arena_bytes = holders.arenas->used_bytes();
  use.recompute_bytes = holders.recomputer->bytes();
  use.tenant_recompute_bytes = holders.recomputer->most_bytes_of_payer();
  for (const auto& gpu : holders.recomputer->GpuInfos()) {
    use.recompute_device_bytes = std::max(use.recompute_device_bytes, gpu.bytes);
    use.tenant_recompute_device_bytes = std::max(use.tenant_recompute_device_bytes, gpu.most_of_payer);
  }
  use.request_bytes = holders.requests->used_bytes();
  use.reply_bytes = holders.replies->used_bytes();
  use.connection_request_bytes = holders.requests->most_used_bytes();
  use.connection_reply_bytes = holders.replies->most_used_bytes();
  const Connections::Use connections = holders.connections->use();
  use.connections = connections.engines;
  use.tcp_connections = connections.tcp;
  use.process_connections = connections.of_process;
  use.user_connections = connections.of_user;
  use.host_connections = connections.of_host;
  use.user_arena_bytes = holders.arenas->most_of_user();
  use.admin_connections = connections.admin;
  use.tls_handshakes = connections.handshakes;
  const StoreUse store = holders.store->report().Use();
  use.sequences = store.sequences;
  use.tenant_sequences = store.tenant_sequences;
  use.tenant_shared_blocks = store.tenant_shared_blocks;
  use.tenant_lease_pages = store.tenant_lease_pages;
  use.tenant_caches = store.tenant_caches;
  use.lease_pages = store.lease_pages;
  use.mapped_pages = store.mapped_pages;
  use.tenant_mapped_pages = store.tenant_mapped_pages;
  use.sent_pages = store.sent_pages;
  use.tenant_sent_pages = store.tenant_sent_pages;
  use.caches = store.caches;
  for (const PoolShare& share : holders.store->report().Shares()) {
    if (share.device < 0) use.tenant_pool_bytes = std::max(use.tenant_pool_bytes, share.bytes);
  }
  const Tickets& tickets = holders.incoming->tickets();
  use.waiting_hand_offs = tickets.size();
  use.tenant_waiting_hand_offs = tickets.of_payers().most();
  use.waiting_blob_bytes = tickets.blob_bytes().all();
  use.tenant_waiting_blob_bytes = tickets.blob_bytes().most();
  use.outgoing_hand_offs = holders.outgoing->active().all();
  use.tenant_outgoing_hand_offs = holders.outgoing->active().most();
  use.tenant_to_peer_hand_offs = holders.outgoing->most_to_peer();
  use.listed_tenants = holders.principals->tenants();
  const SessionUse session = holders.sessions->Most();
  use.connection_sequences = session.sequences;
  use.connection_caches = session.caches;
  use.connection_block_leases = session.block_leases;
  use.connection_mapped_pages = session.mapped_pages;
  use.connection_prefetch_names = session.prefetch_names;
  use.connection_arenas = session.arenas;
  use.connection_arena_bytes = session.arena_bytes;
  return use;
}

}  // namespace kvmanager
