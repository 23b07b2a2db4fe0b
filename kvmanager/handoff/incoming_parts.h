// What receiving hand-offs uses. Everything outlives it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "codecs/registry.h"
#include "codecs/waiting_codec.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/gpu/gpu.h"
#include "kvmanager/handoff/drain_switch.h"
#include "kvmanager/handoff/gpu_landing.h"
#include "kvmanager/handoff/hand_off_metrics.h"
#include "kvmanager/handoff/recomputer.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/store_metrics.h"

namespace kvmanager {

struct IncomingParts {
  PageStore* store = nullptr;
  const StoreMetrics* store_metrics = nullptr;
  const CodecRegistry* registry = nullptr;
  WorkerPool* workers = nullptr;
  WorkerPool* background = nullptr;             // for what takes long in one piece
  const CodecWorkers* codec_workers = nullptr;  // where codecs that wait are made; nullptr: there are none
  MessageQueue* queue = nullptr;
  const Clock* clock = nullptr;
  Recomputer* recomputer = nullptr;
  const DrainSwitch* drain = nullptr;
  HandOffMetrics* metrics = nullptr;
  Gpus gpus;
  const PeerCopier* copier = nullptr;  // of pages of other daemons' GPUs; nullptr: none are taken
  uint64_t host_pool_bytes = 0;
  int64_t lease_ms = 0;                             // how long a received sequence waits to be claimed
  std::vector<std::string> peer_tenants = {"any"};  // whose sequences peers may bring; "any" alone: whose ever
};

}  // namespace kvmanager
