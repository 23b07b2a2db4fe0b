// Metrics of GPUs: references to series, made once at start. Any thread may touch them.
#pragma once

#include "absl/strings/str_cat.h"
#include "monitoring/metrics.h"

namespace kvmanager {

/// Series of all GPUs together.
struct GpuMetrics {
  explicit GpuMetrics(Metrics* m)
      : encoded_pages(m->Counter("device_encoded_pages_total", "Pages that the daemon encoded on GPUs")),
        pool_pinned_bytes(m->Gauge("pool_pinned_bytes", "Bytes of the host pool that GPUs can move pages to")) {}

  prometheus::Counter& encoded_pages;
  prometheus::Gauge& pool_pinned_bytes;
};

/// Series of one GPU. They exist, at zero, where the GPU is not used.
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

}  // namespace kvmanager
