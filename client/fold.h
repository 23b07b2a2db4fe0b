// Folding a codec's way back into an engine's output projection.
//
// A codec with fold=1 leaves attention's outputs in its own space: of a query head, o = A o', A being the factor of its
// KV head (Cache::OutputFactors). What the model computes next is W_O o, and W_O A is a matrix of W_O's shape, so an
// engine that folds its weights once, when it opens the cache, pays nothing per step.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace kvmanager::client {

struct OutputShape {
  int hidden = 0;       // rows of W_O
  int query_heads = 0;  // a multiple of kv_heads; query head h reads KV head h / (query_heads / kv_heads)
  int kv_heads = 0;
  int head_dim = 0;
};

/// W_O' with W_O' o' = W_O o. w_o and the result: [hidden][query_heads][head_dim], row-major. factors:
/// [kv_heads][head_dim][head_dim], as Cache::OutputFactors gives them; empty: the result is w_o. Errors:
/// INVALID_ARGUMENT (a shape, a size, a factor that is not finite).
absl::StatusOr<std::vector<float>> FoldOutputWeights(absl::Span<const float> w_o, const OutputShape& shape,
                                                     absl::Span<const float> factors);

}  // namespace kvmanager::client
