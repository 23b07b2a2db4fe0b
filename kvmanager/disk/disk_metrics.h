// The disk's metrics: references to series, made once. Made where the disk is used or not, so that they are on the
// page.
#pragma once

#include "absl/strings/string_view.h"
#include "monitoring/metrics.h"

namespace kvmanager {

struct DiskMetrics {
  explicit DiskMetrics(Metrics* metrics);

  /// op: "write", "sync", "index", "read", "loss" (other bytes than were written), "space" (giving bytes back).
  prometheus::Counter& errors(absl::string_view op);

  prometheus::Gauge& capacity_bytes;
  prometheus::Gauge& used_bytes;
  prometheus::Gauge& blocks;
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
