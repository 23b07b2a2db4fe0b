// Artifacts that were trained on nothing, for tests and benchmarks: valid in every check, of the shapes and the decay
// that real ones have.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "codecs/calibration.h"

namespace kvmanager {

/// Both modes of ZACK (random orthogonal rotations; "balanced" scales their columns, so that left right^T = 1 still),
/// falling weights, energies and ranks, and random codebooks for each million and zack+million among `codec_specs`
/// ("million:m=64,bits=8", "million:k_m=64,k_bits=8,v_m=32,v_bits=8,scope=model", "zack+million:m=64,bits=6"). Equal
/// arguments give equal artifacts. The arguments must be right: a wrong spec or head_dim aborts.
std::shared_ptr<const Calibration> SyntheticCalibration(const CalibrationModel& model, uint32_t seed,
                                                        std::vector<std::string> codec_specs);

}  // namespace kvmanager
