#include "kvmanager/disk/disk_metrics.h"

namespace kvmanager {
namespace {

prometheus::Counter& Errors(Metrics* metrics, const char* op) {
  return metrics->Counter("disk_errors_total", "Failures of the disk tier, by what was done", {{"op", op}});
}

}  // namespace

DiskMetrics::DiskMetrics(Metrics* m)
    : capacity_bytes(m->Gauge("disk_capacity_bytes", "Bytes of blocks that the disk tier may hold")),
      used_bytes(m->Gauge("disk_used_bytes", "Bytes of blocks on the disk tier, with those being written")),
      blocks(m->Gauge("disk_blocks", "Blocks that the disk tier has")),
      retained_blocks(m->Gauge("disk_retained_blocks", "Blocks on the disk tier that clients want kept longer")),
      retained_bytes(m->Gauge("disk_retained_bytes", "Bytes of these")),
      written_bytes(m->Counter("disk_written_bytes_total", "Bytes of blocks written to the disk tier")),
      read_bytes(m->Counter("disk_read_bytes_total", "Bytes of blocks read from the disk tier")),
      written_blocks(m->Counter("disk_written_blocks_total", "Blocks written to the disk tier")),
      read_blocks(m->Counter("disk_read_blocks_total", "Blocks read from the disk tier")),
      evicted_blocks(m->Counter("disk_evicted_blocks_total", "Blocks evicted from the disk tier to make room")),
      set_aside(m->Counter("disk_set_aside_total", "Disk tiers that could not be used and were set aside")),
      write_seconds(m->Histogram("disk_write_seconds", "From asking for a block's write until it was durable",
                                 ExponentialBounds(0.0005, 4, 8))),
      read_seconds(m->Histogram("disk_read_seconds", "From asking for a block's read until it was there",
                                ExponentialBounds(0.0001, 4, 9))),
      write_errors_(Errors(m, "write")),
      sync_errors_(Errors(m, "sync")),
      index_errors_(Errors(m, "index")),
      read_errors_(Errors(m, "read")),
      loss_errors_(Errors(m, "loss")),
      space_errors_(Errors(m, "space")) {}

void DiskMetrics::ShowNone() {
  for (prometheus::Gauge* const gauge : {&capacity_bytes, &used_bytes, &blocks, &retained_blocks, &retained_bytes}) {
    gauge->Set(0);
  }
}

void DiskMetrics::ShowRetained(uint64_t blocks, uint64_t bytes) {
  retained_blocks.Set(static_cast<double>(blocks));
  retained_bytes.Set(static_cast<double>(bytes));
}

prometheus::Counter& DiskMetrics::errors(absl::string_view op) {
  if (op == "write") return write_errors_;
  if (op == "sync") return sync_errors_;
  if (op == "index") return index_errors_;
  if (op == "read") return read_errors_;
  if (op == "loss") return loss_errors_;
  return space_errors_;
}

}  // namespace kvmanager
