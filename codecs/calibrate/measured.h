// Adds what was measured elsewhere to an artifact: sensitivities, and the defaults of its codecs.
//
// An engine that runs the model probes it with an artifact's factors (codecs/zack_hack/sensitivity.h says how) and
// writes what it found as safetensors: zack_hack.{mode}.sensitivity F32 [layers, kv_heads, 2] of one mode or both,
// metadata zack.mode, zack_hack.mode, zack_hack.allocation, and "measured.*", which says how it was measured. Nothing
// in it is believed. Pure functions; any thread.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "codecs/calibration.h"
#include "kvmanager/base/safetensors.h"

namespace kvmanager::calibrate {

/// The file of a new artifact: that of `artifact` with what `measured` holds in place of its own. Errors:
/// INVALID_ARGUMENT for a tensor, a shape, an element or a metadata key or value that is not as above.
absl::StatusOr<std::string> WithMeasured(const Calibration& artifact, const Safetensors& measured);

}  // namespace kvmanager::calibrate
