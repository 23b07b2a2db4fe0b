// The series that one daemon's parts write. Made before, and destroyed after all of them.
#pragma once

#include "kvmanager/daemon/server_memory.h"
#include "kvmanager/disk/disk_metrics.h"
#include "kvmanager/handoff/hand_off_metrics.h"
#include "kvmanager/handoff/recompute_metrics.h"
#include "kvmanager/rpc/message_room.h"
#include "kvmanager/rpc/rpc_metrics.h"
#include "kvmanager/store/encode_executor.h"
#include "kvmanager/store/store_metrics.h"
#include "monitoring/metrics.h"
#include "transport/transport_metrics.h"

namespace kvmanager {

struct ServerMetrics {
  Metrics all;
  StoreMetrics store{&all};
  DiskMetrics disk{&all};
  TransportMetrics transport{&all};
  EncodeMetrics encodes{&all};
  HandOffMetrics hand_offs{&all};
  RecomputeMetrics recompute{&all};
  ConnectionMetrics connections{&all};
  MessageMetrics messages{&all};
  AttendMetrics attends{&all};
  ReadMetrics reads{&all};
  MatchMetrics matches{&all};
  MemoryMetrics memory{&all};
  BlockCallMetrics block_calls{&all};
};

}  // namespace kvmanager
