#include "transport/recompute/profile.h"

#include <algorithm>

#include "kvmanager/base/status.h"

namespace kvmanager::recompute {
namespace {

constexpr double kLatencyShareMax = 0.9;

}  // namespace

void Profile::Window::Add(const Sample& sample) {
  if (int(samples.size()) < kWindow) {
    samples.push_back(sample);
    return;
  }
  samples[next] = sample;
  next = (next + 1) % kWindow;
}

template <typename Value>
std::optional<Estimate> Profile::Median(const Window& window, Value value) const {
  if (window.samples.empty()) return std::nullopt;
  const int64_t oldest_ns = clock_->NowNs() - age_ns_max_;
  std::vector<double> values;
  values.reserve(window.samples.size());
  for (const Sample& sample : window.samples) {
    if (sample.at_ns >= oldest_ns) values.push_back(value(sample));
  }
  Estimate estimate{.stale = values.empty()};
  if (estimate.stale) {
    for (const Sample& sample : window.samples) values.push_back(value(sample));
  }
  estimate.samples = int(values.size());
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  estimate.value = *middle;
  if (values.size() % 2 == 0) estimate.value = (estimate.value + *std::max_element(values.begin(), middle)) / 2;
  return estimate;
}

void Profile::RecordCopy(int64_t bytes, int64_t elapsed_ns) {
  if (bytes <= 0 || elapsed_ns <= 0) return;
  MutexLock lock(mutex_);
  (bytes <= kLatencyBytesMax ? latencies_ : copies_).Add({clock_->NowNs(), double(bytes), double(elapsed_ns)});
}

void Profile::RecordProjection(ProjectionShape shape, double flops, int64_t elapsed_ns) {
  if (!(flops > 0) || elapsed_ns <= 0) return;
  MutexLock lock(mutex_);
  auto at = std::find_if(projections_.begin(), projections_.end(), [&](const auto& p) { return p.shape == shape; });
  if (at == projections_.end()) {
    if (int(projections_.size()) == kShapesMax) {
      projections_.erase(std::min_element(projections_.begin(), projections_.end(),
                                          [](const auto& a, const auto& b) { return a.recorded_at < b.recorded_at; }));
    }
    at = projections_.insert(projections_.end(), Projections{shape});
  }
  at->recorded_at = ++recorded_;
  at->window.Add({clock_->NowNs(), flops, double(elapsed_ns)});
}

std::optional<Estimate> Profile::LatencyLocked() const {
  return Median(latencies_, [](const Sample& s) { return s.elapsed_ns; });
}

std::optional<Estimate> Profile::LinkBytesPerSecond() const {
  MutexLock lock(mutex_);
  const auto latency = LatencyLocked();
  const double latency_ns = latency.has_value() ? latency->value : 0;
  return Median(copies_, [&](const Sample& s) {
    return s.amount * 1e9 / (s.elapsed_ns - std::min(latency_ns, kLatencyShareMax * s.elapsed_ns));
  });
}

std::optional<Estimate> Profile::LinkLatencyNs() const {
  MutexLock lock(mutex_);
  return LatencyLocked();
}

std::optional<Estimate> Profile::FlopsPerSecond(ProjectionShape shape) const {
  MutexLock lock(mutex_);
  for (const Projections& p : projections_) {
    if (p.shape == shape) return Median(p.window, [](const Sample& s) { return s.amount * 1e9 / s.elapsed_ns; });
  }
  return std::nullopt;
}

absl::StatusOr<MachineRates> RatesOf(const Profile& profile, ProjectionShape shape) {
  const auto bytes = profile.LinkBytesPerSecond(), latency = profile.LinkLatencyNs();
  const auto flops = profile.FlopsPerSecond(shape);
  if (!bytes.has_value()) return absl::FailedPreconditionError("no copy over the link was measured yet");
  if (!flops.has_value()) {
    return absl::FailedPreconditionError(
        absl::StrCat("no projection of ", shape.hidden, " to ", shape.width, " was measured yet"));
  }
  const auto within = [](double value, int64_t min, int64_t max) {
    return value < double(max) ? std::max(int64_t(value), min) : max;
  };
  return MachineRates{
      .link_bytes_per_second = within(bytes->value, 1, MachineRates::kLinkBytesPerSecondMax),
      .link_latency_ns = latency.has_value() ? within(latency->value, 0, MachineRates::kLatencyNsMax) : 0,
      .compute_flops_per_second = within(flops->value, 1, MachineRates::kFlopsPerSecondMax)};
}

}  // namespace kvmanager::recompute
