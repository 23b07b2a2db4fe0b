// F_p of ZACK: from an overall rate of removed dimensions to the rank of every head and side.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace kvmanager::calibrate {

constexpr int kRankMultiple = 16;   // of every rank, and the least rank
constexpr int kRankStepsMax = 256;  // of a table; more are thinned to rates evenly apart

/// The smallest multiple of 16, at least 16, that removes at most `removed` of the total (paper eq. 6). weights [d],
/// descending, not negative, d a multiple of 16. squared: their squares (energy) are what counts.
int RankFor(absl::Span<const float> weights, bool squared, double removed);

struct RankTable {
  std::vector<float> rates;    // [steps], ascending: removed fraction of all dimensions
  std::vector<int32_t> ranks;  // [steps][heads], each falling or equal from step to step
};

/// Every step that one shared bound on the removed weight can give, over all its values from 0 up. weights
/// [heads][d].
RankTable MakeRankTable(absl::Span<const float> weights, int d, bool squared);

}  // namespace kvmanager::calibrate
