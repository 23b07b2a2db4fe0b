// A ReloadExecutor of a machine that does not exist, in time that does not pass: copies and projections take what rates
// say and touch nothing. For what the order of a reload is worth, to the nanosecond. One thread.
#pragma once

#include <algorithm>
#include <vector>

#include "kvmanager/base/clock.h"
#include "kvmanager/base/status.h"
#include "transport/recompute/executor.h"
#include "transport/recompute/plan.h"

namespace kvmanager::recompute {

/// What an executor says of itself.
struct VirtualOptions {
  int chunk_rows = 1024, buffers = 2;
  int first_chunk_rows = 0;   // 0: chunk_rows
  size_t kv_piece_bytes = 0;  // 0: the seam's default
};

class VirtualExecutor final : public ReloadExecutor, public Clock {
 public:
  VirtualExecutor(const ProjectionModel& model, const MachineRates& rates, const VirtualOptions& options)
      : model_(model), rates_(rates), options_(options), staged_(options.buffers), rows_(options.buffers) {}

  int64_t NowNs() const override { return int64_t(now_ns_); }
  const ProjectionModel& model() const override { return model_; }
  int buffers() const override { return options_.buffers; }
  int chunk_rows() const override { return options_.chunk_rows; }
  int first_chunk_rows() const override {
    return options_.first_chunk_rows == 0 ? options_.chunk_rows : options_.first_chunk_rows;
  }
  size_t kv_piece_bytes() const override {
    return options_.kv_piece_bytes == 0 ? ReloadExecutor::kv_piece_bytes() : options_.kv_piece_bytes;
  }
  absl::Status RegisterWeights(int, const LayerWeights&) override { return absl::OkStatus(); }
  bool HasWeights(int) const override { return true; }

  void Begin(const std::atomic<bool>*) override {
    KV_CHECK(posted_.empty());
    link_free_ns_ = compute_free_ns_ = now_ns_;
  }
  void PostActivations(int buffer, absl::Span<const ActivationRows> rows) override {
    KV_CHECK(staged_[buffer] <= now_ns_ && rows_[buffer] == 0);  // its last projection is over
    size_t bytes = 0;
    for (const ActivationRows& r : rows) bytes += r.bytes;
    staged_[buffer] = Copy(Done::What::kActivations, buffer, bytes);
  }
  void PostProjection(int buffer, int, absl::Span<const PageRows> pages) override {
    for (const PageRows& page : pages) rows_[buffer] += page.tokens;
    KV_CHECK(rows_[buffer] <= options_.chunk_rows);
    const double ns = 4e9 * rows_[buffer] * model_.hidden * model_.width() / double(rates_.compute_flops_per_second);
    compute_free_ns_ = std::max({compute_free_ns_, staged_[buffer], now_ns_}) + ns;
    posted_.push_back({compute_free_ns_, {Done::What::kProjection, buffer, int64_t(ns)}});
  }
  void PostKv(absl::Span<const CopyPiece> pieces) override {
    size_t bytes = 0;
    for (const CopyPiece& piece : pieces) bytes += piece.bytes;
    Copy(Done::What::kKv, -1, bytes);
  }
  Done Wait() override {
    KV_CHECK(!posted_.empty());
    const auto first = std::min_element(posted_.begin(), posted_.end(),
                                        [](const Posted& a, const Posted& b) { return a.at_ns < b.at_ns; });
    now_ns_ = std::max(now_ns_, first->at_ns);
    Done done = std::move(first->done);
    posted_.erase(first);
    if (done.what == Done::What::kProjection) {
      rows_[done.buffer] = 0;
      staged_[done.buffer] = 0;
    }
    return done;
  }
  void Abort() override {}

 private:
  struct Posted {
    double at_ns;
    Done done;
  };
  double Copy(Done::What what, int buffer, size_t bytes) {
    const double ns = 1e9 * double(bytes) / double(rates_.link_bytes_per_second);
    link_free_ns_ = std::max(link_free_ns_, now_ns_) + ns;
    posted_.push_back({link_free_ns_, {what, buffer, int64_t(ns)}});
    return link_free_ns_;
  }

  const ProjectionModel model_;
  const MachineRates rates_;
  const VirtualOptions options_;
  double now_ns_ = 0, link_free_ns_ = 0, compute_free_ns_ = 0;
  std::vector<double> staged_;  // when a buffer's activations have arrived
  std::vector<int> rows_;       // that it holds
  std::vector<Posted> posted_;
};

}  // namespace kvmanager::recompute
