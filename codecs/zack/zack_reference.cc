#include "codecs/zack/zack_reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kvmanager/base/half.h"

namespace kvmanager::zack {
namespace {

/// x [d] times factor [d][n].
std::vector<double> Times(const std::vector<double>& x, const std::vector<float>& factor, int n) {
  std::vector<double> out(n);
  for (size_t i = 0; i < x.size(); ++i) {
    for (int c = 0; c < n; ++c) out[c] += x[i] * factor[i * n + c];
  }
  return out;
}

std::vector<double> Load(const uint8_t* data, DType dtype, int count) {
  std::vector<double> out(count);
  for (int i = 0; i < count; ++i) out[i] = LoadElement(data, dtype, i);
  return out;
}

double Dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace

bool ReferenceEncode(const ZackFormat& format, int layer, const uint8_t* raw, uint8_t* page) {
  const PageLayout& layout = format.layout;
  const int d = layout.head_dim;
  for (int h = 0; h < layout.kv_heads; ++h) {
    const ZackHead& head = format.head(layer, h);
    for (int side = 0; side < 2; ++side) {
      const int n = head.rank[side];
      for (int t = 0; t < layout.page_tokens; ++t) {
        for (int c = 0; c < n; ++c) {
          float sum = 0;
          for (int i = 0; i < d; ++i) {
            const float x = LoadElement(raw + layout.raw_offset(side, h, t), layout.dtype, i);
            const float term = x * head.encode[side][size_t(i) * n + c];
            sum = sum + term;
          }
          const uint16_t half = FloatToHalf(sum);
          if ((half & 0x7c00) == 0x7c00) {
            std::memset(page, 0, format.page_bytes[layer]);
            return false;
          }
          std::memcpy(page + head.offset[side] + 2 * (size_t(t) * n + c), &half, 2);
        }
      }
    }
  }
  return true;
}

ReferenceOutput ReferenceAttend(const ZackFormat& format, int layer, int kv_head, const float* q, double scale,
                                absl::Span<const ReferencePage> pages) {
  const PageLayout& layout = format.layout;
  const int d = layout.head_dim;
  const ZackHead& head = format.head(layer, kv_head);
  const std::vector<double> query(q, q + d), mapped = Times(query, head.query, head.rank[0]);
  std::vector<double> scores, projected;
  std::vector<std::vector<double>> values, folded_values;
  for (const ReferencePage& page : pages) {
    for (int t = 0; t < page.tokens; ++t) {
      if (page.encoded == nullptr) {
        scores.push_back(scale * Dot(query, Load(page.raw + layout.raw_offset(0, kv_head, t), layout.dtype, d)));
        values.push_back(Load(page.raw + layout.raw_offset(1, kv_head, t), layout.dtype, d));
        folded_values.push_back(Times(values.back(), head.encode[1], head.rank[1]));
      } else {
        const auto row = [&](int side) {
          const int n = head.rank[side];
          return Load(page.encoded + head.offset[side] + size_t(t) * n * 2, DType::kFloat16, n);
        };
        scores.push_back(scale * Dot(mapped, row(0)));
        folded_values.push_back(row(1));
        values.push_back(Times(folded_values.back(), head.decode[1], d));
      }
    }
  }
  const double max = *std::max_element(scores.begin(), scores.end());
  ReferenceOutput result{std::vector<double>(d), std::vector<double>(d), 0};
  double sum = 0;
  for (double score : scores) sum += std::exp(score - max);
  for (size_t t = 0; t < scores.size(); ++t) {
    const double p = std::exp(scores[t] - max) / sum;
    for (int c = 0; c < d; ++c) result.out[c] += p * values[t][c];
    for (int c = 0; c < head.rank[1]; ++c) result.folded[c] += p * folded_values[t][c];
  }
  result.lse = max + std::log(sum);
  return result;
}

}  // namespace kvmanager::zack
