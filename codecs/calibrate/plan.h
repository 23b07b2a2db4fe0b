// What to train, from the codecs that somebody named: the names of an artifact's tensors and their shapes.
//
// Values; any thread. Codecs find their tensors under the names that are made here (docs/calibration.md).
#pragma once

#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmanager::calibrate {

/// A product quantiser: M sub-vectors, 2^bits centroids each.
struct PqShape {
  static constexpr int kBitsMin = 4, kBitsMax = 12;
  int m = 64, bits = 8;  // m by default: as million's (million_format.h)
  friend auto operator<=>(const PqShape&, const PqShape&) = default;
};

/// Both factorisations of ZACK; an artifact holds the two.
enum class ZackMode { kJoint, kBalanced };
constexpr ZackMode kZackModes[] = {ZackMode::kJoint, ZackMode::kBalanced};
absl::string_view Name(ZackMode mode);  // "joint", "balanced"

enum class Side { kK = 0, kV = 1 };
constexpr Side kSides[] = {Side::kK, Side::kV};
absl::string_view Name(Side side);  // "k", "v"

struct CalibrationPlan {
  bool zack = false;       // factors and ranks; also what zack+hack and zack+million stand on
  bool zack_hack = false;  // importance of the rotated channels
  // Per side: codebooks of K or V as they are, per layer and KV head (million) or one for the model, and of rotated K
  // or V.
  std::set<PqShape> million[2], million_model[2], zack_million[2];

  /// What `specs` ("million:m=64,bits=8", "zack", "zack+hack:...", "zack+million:...", "default") need for heads of
  /// head_dim. Values that say nothing about training are left to the codec. Errors: INVALID_ARGUMENT naming the codec
  /// (with those that can be calibrated) or the parameter (with the codec's), its value and its bound.
  static absl::StatusOr<CalibrationPlan> Make(absl::Span<const std::string> specs, int head_dim);
};

/// "million.k.m64.b8"; prefix: "million", "million_model" or "zack_million.joint".
std::string CodebookName(absl::string_view prefix, Side side, PqShape shape);
/// "zack.joint.qk.left"; prefix: "zack" or "zack_hack".
std::string ZackName(absl::string_view prefix, ZackMode mode, absl::string_view tensor);

}  // namespace kvmanager::calibrate
