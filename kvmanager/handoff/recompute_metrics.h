// Metrics of what is recomputed from activations. Any thread.
#pragma once

#include "monitoring/metrics.h"

namespace kvmanager {

struct RecomputeMetrics {
  explicit RecomputeMetrics(Metrics* m);

  prometheus::Counter& recomputed_tokens;  // times layers, here and below
  prometheus::Counter& copied_tokens;      // that had activations
  // Plans, one per layer of a hand-off that offers activations.
  prometheus::Counter& all_copy;
  prometheus::Counter& split;
  prometheus::Counter& all_recompute;
  prometheus::Counter& no_weights;
  prometheus::Counter& not_measured;
  prometheus::Counter& not_pinned;  // the host's pool, for a GPU
  prometheus::Counter& failed;      // pages
  prometheus::Histogram& seconds;   // of pages of one layer that are computed together
  prometheus::Gauge& weight_bytes;
  /// Of this GPU's memory. Once for each.
  prometheus::Gauge& DeviceBytes(int ordinal);

 private:
  Metrics* const metrics_;
};

}  // namespace kvmanager
