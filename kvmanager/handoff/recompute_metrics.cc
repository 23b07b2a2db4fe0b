#include "kvmanager/handoff/recompute_metrics.h"

#include "absl/strings/str_cat.h"

namespace kvmanager {
namespace {

constexpr char kTokensHelp[] =
    "Tokens of received pages that had activations, counted once per layer, by how they became K and V";
constexpr char kPlansHelp[] =
    "Plans of how many pages to recompute, one per layer of a received hand-off with activations, by answer";

}  // namespace

RecomputeMetrics::RecomputeMetrics(Metrics* m)
    : recomputed_tokens(m->Counter("recompute_tokens_total", kTokensHelp, {{"how", "recomputed"}})),
      copied_tokens(m->Counter("recompute_tokens_total", kTokensHelp, {{"how", "copied"}})),
      all_copy(m->Counter("recompute_plans_total", kPlansHelp, {{"answer", "all_copy"}})),
      split(m->Counter("recompute_plans_total", kPlansHelp, {{"answer", "split"}})),
      all_recompute(m->Counter("recompute_plans_total", kPlansHelp, {{"answer", "all_recompute"}})),
      no_weights(m->Counter("recompute_plans_total", kPlansHelp, {{"answer", "no_weights"}})),
      not_measured(m->Counter("recompute_plans_total", kPlansHelp, {{"answer", "not_measured"}})),
      not_pinned(m->Counter("recompute_plans_total", kPlansHelp, {{"answer", "not_pinned"}})),
      failed(m->Counter("recompute_failed_pages_total", "Pages whose K and V could not be recomputed")),
      seconds(m->Histogram("recompute_seconds", "Recomputing K and V of up to 64 pages of one layer",
                           ExponentialBounds(1e-4, 2, 16))),
      weight_bytes(m->Gauge("recompute_weight_bytes",
                            "Host memory of registered projections, their buffers and waiting copies")),
      metrics_(m) {}

prometheus::Gauge& RecomputeMetrics::DeviceBytes(int ordinal) {
  return metrics_->Gauge("recompute_device_bytes", "Memory of a GPU for registered projections and their buffers",
                         {{"device", absl::StrCat(ordinal)}});
}

}  // namespace kvmanager
