// The choices that an artifact makes for its codecs, measured on calibration text.
#pragma once

#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "codecs/calibrate/plan.h"
#include "codecs/calibrate/tensor_set.h"
#include "examples/engine/calibrate.h"

namespace kvmanager::engine {

/// On the text behind what was trained on, or on its beginning if that is all there is: which mode of zack and of
/// zack+hack loses less at an equal rate; what a unit of energy costs in each layer and side (sensitivity of both
/// modes, put into `set`: a probe's divergence from the raw model, codecs/zack_hack/sensitivity.h); and whether
/// zack+hack's bits are better shared by the whole model. Errors: those of codecs and the backend.
absl::Status ChooseDefaults(const Model& model, absl::Span<const uint8_t> text, const CalibrateOptions& options,
                            const calibrate::CalibrationPlan& plan, CalibrateProgress progress,
                            calibrate::TensorSet* set, TensorMetadata* metadata, std::vector<CalibrateChoice>* choices);

}  // namespace kvmanager::engine
