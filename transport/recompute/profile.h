// What a machine does at present: bytes per second and latency of the link that K, V and activations come over, FLOP
// per second of the K and V projections at each shape in use.
//
// Samples come from real reloads (and from a few at start): a Profile keeps the newest kWindow of each kind. An
// estimate is the median of those not older than `age_ns_max`, so that up to half of them may be outliers (a page
// fault, another tenant's burst) without moving it by more than the spread of the others, and a change shows once it
// fills half the window. If all are older, it is the median of all, and says so.
//
// Owned by whoever plans; any thread may call everything: one mutex, taken once per record, none while moving bytes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kvmanager/base/clock.h"
#include "kvmanager/base/mutex.h"
#include "transport/recompute/plan.h"

namespace kvmanager::recompute {

/// Shape of a projection: X [tokens][hidden] times W_K and W_V [hidden][width].
struct ProjectionShape {
  int64_t hidden = 0;
  int64_t width = 0;  // kv_heads * head_dim
  friend bool operator==(const ProjectionShape&, const ProjectionShape&) = default;
};

/// A median of samples.
struct Estimate {
  double value = 0;
  int samples = 0;
  bool stale = false;  // no sample is younger than age_ns_max
};

class Profile {
 public:
  static constexpr int kWindow = 31;
  static constexpr int kShapesMax = 16;                 // the shape that was recorded longest ago gives way
  static constexpr int64_t kLatencyBytesMax = 4096;     // a copy of no more measures latency
  static constexpr int64_t kAgeNsMax = 60'000'000'000;  // default of age_ns_max

  /// clock: outlives this.
  explicit Profile(const Clock* clock, int64_t age_ns_max = kAgeNsMax) : clock_(clock), age_ns_max_(age_ns_max) {}

  /// A copy of `bytes` over the link took `elapsed_ns`. Neither positive: ignored.
  void RecordCopy(int64_t bytes, int64_t elapsed_ns);
  /// A projection of `flops` at `shape` took `elapsed_ns`. Neither positive: ignored.
  void RecordProjection(ProjectionShape shape, double flops, int64_t elapsed_ns);

  /// Bytes per second, the latency being taken off each copy (of which at most nine tenths are taken to be latency).
  std::optional<Estimate> LinkBytesPerSecond() const;
  /// Nanoseconds; nothing was recorded: nothing, which a planner may take for 0.
  std::optional<Estimate> LinkLatencyNs() const;
  /// FLOP per second.
  std::optional<Estimate> FlopsPerSecond(ProjectionShape shape) const;

 private:
  struct Sample {
    int64_t at_ns = 0;
    double amount = 0;  // bytes or FLOP; of a latency, nothing
    double elapsed_ns = 0;
  };
  /// A ring of the newest samples.
  struct Window {
    std::vector<Sample> samples;
    int next = 0;
    void Add(const Sample& sample);
  };
  struct Projections {
    ProjectionShape shape;
    int64_t recorded_at = 0;  // of the counter below
    Window window;
  };
  template <typename Value>
  std::optional<Estimate> Median(const Window& window, Value value) const;
  std::optional<Estimate> LatencyLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Clock* const clock_;
  const int64_t age_ns_max_;
  mutable Mutex mutex_;
  Window copies_ ABSL_GUARDED_BY(mutex_), latencies_ ABSL_GUARDED_BY(mutex_);
  std::vector<Projections> projections_ ABSL_GUARDED_BY(mutex_);
  int64_t recorded_ ABSL_GUARDED_BY(mutex_) = 0;
};

/// What a plan for `shape` needs, cut to MachineRates' bounds. Errors: FAILED_PRECONDITION if the link or this shape
/// was not measured yet.
absl::StatusOr<MachineRates> RatesOf(const Profile& profile, ProjectionShape shape);

}  // namespace kvmanager::recompute
