// Which codec policy is the smallest that loses no more than a bound: candidates, their measurement, the choice.
//
// Plain functions over values; the measuring is the caller's, so that this file knows no model. One thread.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmanager::engine {

/// "0.5%" or "0.005" -> 0.005. Errors: INVALID_ARGUMENT (field --max-loss) unless in 0..1.
absl::StatusOr<double> ParseLoss(absl::string_view text);

/// A policy as measured: what a page costs, and what reading through it costs the model.
struct RatePoint {
  std::string codec;                // spec or policy, as a cache is opened with
  std::string family;               // of the table and the plot: "hack", "zack+hack", ...
  double bytes_per_token_head = 0;  // codes, metadata and sums; K and V together; mean over layers
  double bpb = 0;                   // bits per byte
  double loss = 0;                  // change of per-byte perplexity against raw: 2^(bpb - raw bpb) - 1
};

/// What Tune asks and tells its caller.
struct TuneHooks {
  /// Whether a policy can be measured at all; cheap. Empty: every one can.
  std::function<absl::Status(const std::string& codec)> check;
  /// Bytes and bits per byte of a policy; loss and names are filled in by Tune.
  std::function<absl::StatusOr<RatePoint>(const std::string& codec)> measure;
  std::function<void(int done, int total, const std::string& what)> progress;
  /// A candidate that `check` or `measure` refused, and that is left out.
  std::function<void(const std::string& codec, const absl::Status& why)> dropped;
};

struct TuneOptions {
  static constexpr int kCandidatesMax = 1000;
  double max_loss = 0.005;
  int layers = 0;
  /// Candidates besides the built-in grid.
  std::vector<std::string> more_codecs;
  /// ",calibration=NAME" is added to those of the grid that need an artifact; empty: they are left out.
  std::string calibration;
  /// Sub-spaces and bits for which the artifact has MILLION's codebooks for K and V: "m=64,bits=8", ...
  std::vector<std::string> million;
  bool has_zack = false, has_zack_hack = false;
};

struct TuneResult {
  RatePoint raw;
  std::vector<RatePoint> points;  // by bytes, then loss
  int best = -1;                  // index in points: the fewest bytes with loss <= max_loss; -1: none
};

/// The grid: every family at several rates.
std::vector<std::string> TuneGrid(const TuneOptions& options);
/// Policies derived from a measured point: the first, the last, or both layers finer and the others coarser, as far as
/// the others have bytes to give and `check` (empty: every one) takes the policy.
std::vector<std::string> FinerEnds(const RatePoint& point, const TuneOptions& options,
                                   const std::function<absl::Status(const std::string&)>& check);

/// Measures raw, the grid, and the finer ends of the points on the frontier nearest to the bound. Every candidate is
/// checked before any is measured. Errors: the check's of one of more_codecs; the measurement's of raw; any of theirs
/// if no candidate is left.
absl::StatusOr<TuneResult> Tune(const TuneOptions& options, const TuneHooks& hooks);

/// No other point has as few bytes and as little loss.
bool OnFrontier(absl::Span<const RatePoint> points, size_t index);

/// The rate-distortion table, a line per point, the frontier marked, ending with the best policy and how to use it.
std::string TuneTable(const TuneResult& result, double max_loss);
/// A plot: bytes per token and KV head against loss, a colour per family, the bound as a line. Self-contained SVG.
std::string TuneSvg(const TuneResult& result, double max_loss, absl::string_view title);

}  // namespace kvmanager::engine
