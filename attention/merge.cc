#include <cmath>
#include <limits>

#include "attention/attention.h"

namespace kvmanager {

// With m = max(m1, m2): sum = sum1 exp(m1 - m) + sum2 exp(m2 - m), and acc alike (the online softmax of
// FlashAttention). A state that is empty (max = -infinity) weighs nothing.
void MergeSoftmax(int rows, int head_dim, const SoftmaxRows& from, const SoftmaxRows& into) {
  constexpr float kEmpty = -std::numeric_limits<float>::infinity();
  for (int r = 0; r < rows; ++r) {
    if (from.max[r] == kEmpty) continue;
    const float max = std::fmax(from.max[r], into.max[r]);
    const float from_weight = std::exp(from.max[r] - max);
    const float into_weight = into.max[r] == kEmpty ? 0.0f : std::exp(into.max[r] - max);
    into.max[r] = max;
    into.sum[r] = into.sum[r] * into_weight + from.sum[r] * from_weight;
    const float* add = from.acc + size_t(r) * head_dim;
    float* acc = into.acc + size_t(r) * head_dim;
    for (int c = 0; c < head_dim; ++c) acc[c] = acc[c] * into_weight + add[c] * from_weight;
  }
}

}  // namespace kvmanager
