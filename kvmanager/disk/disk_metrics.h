// The disk's metrics: references to series, made once. Made where the disk is used or not, so that they are on the
// page.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"
#include "monitoring/metrics.h"

namespace kvmanager {

struct DiskMetrics {
  explicit DiskMetrics(Metrics* metrics);

  /// op: "write", "sync", "index", "read", "loss" (other bytes than were written), "space" (giving bytes back).
  prometheus::Counter& errors(absl::string_view op);
  /// Gauges of a disk that is no more.
  void ShowNone();
  void ShowRetained(uint64_t blocks, uint64_t bytes);

  prometheus::Gauge& capacity_bytes;
  prometheus::Gauge& used_bytes;
  prometheus::Gauge& blocks;
  prometheus::Gauge& retained_blocks;  // looked at once a second
  prometheus::Gauge& retained_bytes;
  prometheus::Counter& written_bytes;
  prometheus::Counter& read_bytes;
  prometheus::Counter& written_blocks;
  prometheus::Counter& read_blocks;
  prometheus::Counter& evicted_blocks;
  prometheus::Counter& set_aside;
  prometheus::Histogram& write_seconds;
  prometheus::Histogram& read_seconds;

 private:
  prometheus::Counter& write_errors_;
  prometheus::Counter& sync_errors_;
  prometheus::Counter& index_errors_;
  prometheus::Counter& read_errors_;
  prometheus::Counter& loss_errors_;
  prometheus::Counter& space_errors_;
};

}  // namespace kvmanager
