#include "client/fold.h"

#include <cmath>
#include <cstddef>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client {

absl::StatusOr<std::vector<float>> FoldOutputWeights(absl::Span<const float> w_o, const OutputShape& shape,
                                                     absl::Span<const float> factors) {
  if (shape.hidden < 1) return InvalidField("hidden", shape.hidden, "at least 1");
  if (shape.head_dim < 1) return InvalidField("head_dim", shape.head_dim, "at least 1");
  if (shape.kv_heads < 1) return InvalidField("kv_heads", shape.kv_heads, "at least 1");
  if (shape.query_heads < 1 || shape.query_heads % shape.kv_heads != 0) {
    return InvalidField("query_heads", shape.query_heads, absl::StrCat("a multiple of kv_heads ", shape.kv_heads));
  }
  const size_t d = shape.head_dim, heads = shape.query_heads, group = heads / shape.kv_heads;
  if (w_o.size() != shape.hidden * heads * d) {
    return InvalidField("w_o elements", w_o.size(), absl::StrCat(shape.hidden * heads * d));
  }
  if (factors.empty()) return std::vector<float>(w_o.begin(), w_o.end());
  if (factors.size() != shape.kv_heads * d * d) {
    return InvalidField("factors elements", factors.size(), absl::StrCat(shape.kv_heads * d * d));
  }
  for (size_t i = 0; i < factors.size(); ++i) {
    if (!std::isfinite(factors[i])) return InvalidField(absl::StrCat("factors[", i, "]"), factors[i], "finite");
  }
  std::vector<float> folded(w_o.size(), 0.0f);
  for (size_t row = 0; row < size_t(shape.hidden); ++row) {
    for (size_t head = 0; head < heads; ++head) {
      const float* const w = &w_o[(row * heads + head) * d];
      const float* const a = &factors[head / group * d * d];
      float* const out = &folded[(row * heads + head) * d];
      for (size_t i = 0; i < d; ++i) {
        for (size_t j = 0; j < d; ++j) out[j] += w[i] * a[i * d + j];
      }
    }
  }
  return folded;
}

}  // namespace kvmanager::client
