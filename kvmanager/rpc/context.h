// What the parts of one daemon share, wired by Server. Pointers to objects that outlive every RPC object; plain fields
// are the loop thread's.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "codecs/registry.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/event_loop.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/daemon/options.h"
#include "kvmanager/gpu/device_context.h"
#include "kvmanager/memory/host_pinner.h"
#include "kvmanager/memory/page_pool.h"
#include "kvmanager/rpc/server_metrics.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/store_metrics.h"
#include "monitoring/recent_errors.h"
#include "transport/transport.h"

namespace kvmanager {

class HandOffDesk;
class InProcess;
class PeerCopier;
class PollList;
class QualityMonitor;
class Recomputer;
class Session;

struct DaemonContext {
  const Options* options = nullptr;
  const Clock* clock = nullptr;
  const CodecRegistry* registry = nullptr;
  PagePool* pool = nullptr;
  PageStore* store = nullptr;
  WorkerPool* workers = nullptr;
  Transport* transport = nullptr;
  const PeerCopier* copier = nullptr;  // of pages of other daemons' GPUs; nullptr: none are taken
  MessageQueue* queue = nullptr;
  ServerMetrics* metrics = nullptr;
  const Metrics* all_metrics = nullptr;
  RecentErrors* errors = nullptr;
  const StoreMetrics* store_metrics = nullptr;
  HandOffDesk* desk = nullptr;
  Recomputer* recomputer = nullptr;
  QualityMonitor* quality = nullptr;  // nullptr: no page is sampled
  EventLoop* loop = nullptr;          // while Run() runs

  std::vector<const DeviceContext*> devices;  // GPUs with a pool; empty: none
  const HostPinner* pinner = nullptr;         // of the host pool's slabs, in their order; nullptr: no GPU
  PollList* polls = nullptr;
  std::vector<std::shared_ptr<InProcess>> departed;  // of connections that ended before their processes
  std::function<std::string()> ucx_summary;          // whether pages go through UCX, or why not
  std::string gpu_summary;                           // what GPUs this process sees, or why none

  uint64_t boot_epoch = 0;
  int64_t start_ns = 0;
  std::string listen, peer_listen, metrics_listen, http_listen;  // as bound

  bool draining = false;
  uint64_t held_sequences = 0;                              // by clients
  absl::flat_hash_map<SequenceId, const Session*> holders;  // of those
  uint64_t sends_active = 0;                                // hand-offs being sent
  uint32_t connections = 0;
  uint64_t arena_bytes = 0;  // of all connections, at most Options::arena_bytes

  void SetDraining(bool on) {
    draining = on;
    metrics->draining.Set(on ? 1 : 0);
  }
};

}  // namespace kvmanager
