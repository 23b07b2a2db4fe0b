#include "attention/exact_attention.h"

#include <algorithm>
#include <cmath>

namespace kvmanager {

ExactResult ExactAttention(const PageLayout& layout, int query_heads, double scale, uint64_t first_position, int tokens,
                           const std::vector<double>& q, const ContextRow& row_of) {
  const int d = layout.head_dim, group = query_heads / layout.kv_heads;
  ExactResult result;
  result.out.assign(q.size(), 0);
  result.lse.assign(size_t(tokens) * query_heads, 0);
  for (int i = 0; i < tokens; ++i) {
    const uint64_t own = first_position + i;
    for (int kv = 0; kv < layout.kv_heads; ++kv) {
      std::vector<std::vector<double>> scores(group, std::vector<double>(own + 1));
      for (uint64_t t = 0; t <= own; ++t) {
        const float* x = row_of(0, kv, t, own);
        for (int g = 0; g < group; ++g) {
          const double* row = &q[(size_t(i) * query_heads + kv * group + g) * d];
          double dot = 0;
          for (int c = 0; c < d; ++c) dot += row[c] * x[c];
          scores[g][t] = dot * scale;
        }
      }
      std::vector<double> max(group), sum(group);
      for (int g = 0; g < group; ++g) max[g] = *std::max_element(scores[g].begin(), scores[g].end());
      for (uint64_t t = 0; t <= own; ++t) {
        const float* x = row_of(1, kv, t, own);
        for (int g = 0; g < group; ++g) {
          const double p = std::exp(scores[g][t] - max[g]);
          sum[g] += p;
          double* out = &result.out[(size_t(i) * query_heads + kv * group + g) * d];
          for (int c = 0; c < d; ++c) out[c] += p * x[c];
        }
      }
      for (int g = 0; g < group; ++g) {
        const size_t row = size_t(i) * query_heads + kv * group + g;
        for (int c = 0; c < d; ++c) result.out[row * d + c] /= sum[g];
        result.lse[row] = max[g] + std::log(sum[g]);
      }
    }
  }
  return result;
}

double LargestRowError(const std::vector<double>& expected, const std::vector<double>& got, int head_dim) {
  double largest = 0;
  for (size_t row = 0; row < expected.size(); row += head_dim) {
    double error = 0, norm = 1e-30;
    for (int c = 0; c < head_dim; ++c) {
      error += (expected[row + c] - got[row + c]) * (expected[row + c] - got[row + c]);
      norm += expected[row + c] * expected[row + c];
    }
    const double relative = std::sqrt(error / norm);
    largest = relative > largest || std::isnan(relative) ? relative : largest;
    if (std::isnan(largest)) return largest;
  }
  return largest;
}

}  // namespace kvmanager
