// One GPU of the daemon, as the RPC service's objects see it. Owned by Server; outlives them all. The loop's thread.
#pragma once

#include <string>

#include "absl/strings/str_cat.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/device_pool.h"
#include "monitoring/metrics.h"

namespace kvmanager {

class DeviceEncodeQueue;
class DeviceEncodes;
class DeviceIndexes;
class DeviceReads;
class DeviceSends;
class DeviceStreams;
class ReleaseEpochs;

/// Series of one GPU; they exist, at zero, where it is not used.
struct DeviceMetrics {
  DeviceMetrics(Metrics* m, int ordinal) : DeviceMetrics(m, MetricLabels{{"device", absl::StrCat(ordinal)}}) {}
  prometheus::Gauge& capacity_bytes;
  prometheus::Gauge& used_bytes;
  prometheus::Gauge& streams;
  prometheus::Gauge& draining_streams;

 private:
  DeviceMetrics(Metrics* m, const MetricLabels& labels)
      : capacity_bytes(m->Gauge("device_pool_capacity_bytes", "The pool of a GPU", labels)),
        used_bytes(m->Gauge("device_pool_used_bytes", "Bytes of a GPU's pool in use", labels)),
        streams(m->Gauge("device_streams", "Streams that connections have on a GPU", labels)),
        draining_streams(m->Gauge("device_draining_streams",
                                  "Streams of connections that ended, with work that is still to end", labels)) {}
};

struct DeviceContext {
  int ordinal = 0;
  Device* device = nullptr;
  DevicePool* pool = nullptr;
  DeviceStreams* streams = nullptr;
  DeviceMetrics* metrics = nullptr;
  ReleaseEpochs* epochs = nullptr;
  DeviceEncodeQueue* encode_queue = nullptr;  // the store's executor
  DeviceEncodes* encodes = nullptr;
  DeviceIndexes* indexes = nullptr;
  DeviceReads* reads = nullptr;
  DeviceSends* sends = nullptr;  // nullptr: its pages are sent by way of the host
};

}  // namespace kvmanager
