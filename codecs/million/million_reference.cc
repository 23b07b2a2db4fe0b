#include "codecs/million/million_reference.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "kvmanager/base/half.h"

namespace kvmanager::million {
namespace {

constexpr double kNegligible = 0x1p-100;  // as in million_attention_inl.h

const uint8_t* StripOf(const MillionFormat& format, int head, int side, int strip, const uint8_t* encoded) {
  const SideLayout& s = format.side[side];
  return encoded + size_t(head) * format.record_bytes + s.offset + size_t(strip) * s.strip_bytes;
}

}  // namespace

int NearestCentroid(const MillionFormat& format, const SideTable& table, int side, int subspace, const float* x) {
  const SideLayout& s = format.side[side];
  int nearest = 0;
  float best = std::numeric_limits<float>::infinity();
  for (int i = 0; i < s.centroids; ++i) {
    float norm = 0;
    for (int k = 0; k < s.width; ++k) {
      const int c = subspace * s.width + k;
      const float y = table.step[c] * float(CodeOf(side, table.by_channel[size_t(c) * table.entries + i]));
      norm = norm + y * y;
    }
    float key = norm * 0.5f;
    for (int k = 0; k < s.width; ++k) {
      const int c = subspace * s.width + k;
      const float y = table.step[c] * float(CodeOf(side, table.by_channel[size_t(c) * table.entries + i]));
      key = key - (x[k] - table.mid[c]) * y;
    }
    if (key < best) {
      best = key;
      nearest = i;
    }
  }
  return nearest;
}

void ReferenceEncode(const MillionFormat& format, const MillionTables& tables, const uint8_t* raw, int layer,
                     uint8_t* encoded) {
  const PageLayout& layout = format.layout;
  std::memset(encoded, 0, format.page_bytes);
  std::vector<float> x(layout.head_dim);
  for (int head = 0; head < layout.kv_heads; ++head) {
    for (int side = 0; side < 2; ++side) {
      const SideLayout& s = format.side[side];
      for (int t = 0; t < layout.page_tokens; ++t) {
        uint8_t* strip = const_cast<uint8_t*>(StripOf(format, head, side, t / kStripTokens, encoded));
        for (int m = 0; m < s.subspaces; ++m) {
          for (int k = 0; k < s.width; ++k) {
            x[k] = LoadElement(raw + layout.raw_offset(side, head, t), layout.dtype, m * s.width + k);
          }
          const int index = NearestCentroid(format, tables.at(side, layer, head), side, m, x.data());
          PutIndex(s, strip, m, t % kStripTokens, index);
        }
      }
    }
  }
}

std::vector<float> ReferenceValues(const MillionFormat& format, const MillionTables& tables, const uint8_t* encoded,
                                   int layer, int head, int side) {
  const PageLayout& layout = format.layout;
  const SideLayout& s = format.side[side];
  const SideTable& table = tables.at(side, layer, head);
  std::vector<float> values(size_t(layout.page_tokens) * layout.head_dim);
  for (int t = 0; t < layout.page_tokens; ++t) {
    const uint8_t* strip = StripOf(format, head, side, t / kStripTokens, encoded);
    for (int c = 0; c < layout.head_dim; ++c) {
      const int index = IndexAt(s, strip, c / s.width, t % kStripTokens);
      const int code = CodeOf(side, table.by_channel[size_t(c) * table.entries + index]);
      values[size_t(t) * layout.head_dim + c] = table.mid[c] + table.step[c] * float(code);
    }
  }
  return values;
}

void ReferenceAttend(const MillionFormat& format, const MillionTables& tables, const PageAttentionTask& task,
                     Rounding rounding, const SoftmaxRows& state) {
  const bool rounded = rounding != Rounding::kNothing;
  const int d = format.layout.head_dim, tokens = format.layout.page_tokens;
  const SideTable& k_table = tables.at(kSideK, task.layer, task.kv_head);
  // What the rounded query stands for.
  std::vector<double> q(size_t(task.rows) * d);
  for (int r = 0; r < task.rows; ++r) {
    float largest = 0;
    for (int c = 0; c < d; ++c) largest = std::max(largest, std::abs(task.q[size_t(r) * d + c] * k_table.step[c]));
    int shift = 0;
    for (int wider = 2; wider <= 8; ++wider) {
      int above = 0;
      for (int c = 0; c < d; ++c) {
        above += std::abs(task.q[size_t(r) * d + c] * k_table.step[c]) > largest / float(1 << wider);
      }
      if (above > 4) break;
      shift = wider;
    }
    if (rounding == Rounding::kGpu) shift = 8;
    const float levels = 127.0f * float(1 << shift);
    const float inverse = largest > kNegligible ? levels / largest : 0.0f;
    for (int c = 0; c < d; ++c) {
      const float x = task.q[size_t(r) * d + c];
      q[size_t(r) * d + c] = !rounded ? x : std::nearbyint(x * k_table.step[c] * inverse) * (double(largest) / levels);
    }
  }
  std::vector<double> max(state.max, state.max + task.rows), sum(state.sum, state.sum + task.rows);
  std::vector<double> acc(state.acc, state.acc + size_t(task.rows) * d);
  for (const uint8_t* page : task.pages) {
    const std::vector<float> k = ReferenceValues(format, tables, page, task.layer, task.kv_head, kSideK);
    const std::vector<float> v = ReferenceValues(format, tables, page, task.layer, task.kv_head, kSideV);
    for (int r = 0; r < task.rows; ++r) {
      for (int begin = 0; begin < tokens; begin += kStripTokens) {
        double scores[kStripTokens], top = -std::numeric_limits<double>::infinity();
        for (int t = 0; t < kStripTokens; ++t) {
          double score = 0;
          for (int c = 0; c < d; ++c) {
            const double value = k[size_t(begin + t) * d + c], x = q[size_t(r) * d + c];
            if (!rounded) {
              score += x * value;
            } else {
              const double code = k_table.step[c] > 0 ? std::nearbyint((value - k_table.mid[c]) / k_table.step[c]) : 0;
              score += x * code + double(task.q[size_t(r) * d + c]) * k_table.mid[c];
            }
          }
          scores[t] = score * task.scale;
          top = std::max(top, scores[t]);
        }
        if (top > max[r]) {
          const double factor = std::exp(max[r] - top);
          max[r] = top;
          sum[r] *= factor;
          for (int c = 0; c < d; ++c) acc[size_t(r) * d + c] *= factor;
        }
        const double p_max = std::exp(top - max[r]);
        for (int t = 0; t < kStripTokens; ++t) {
          double p = std::exp(scores[t] - max[r]);
          sum[r] += p;
          if (rounded) p = p_max > kNegligible ? std::nearbyint(p * (255 / p_max)) * (p_max / 255) : 0;
          for (int c = 0; c < d; ++c) acc[size_t(r) * d + c] += p * v[size_t(begin + t) * d + c];
        }
      }
    }
  }
  for (int r = 0; r < task.rows; ++r) {
    state.max[r] = float(max[r]);
    state.sum[r] = float(sum[r]);
    for (int c = 0; c < d; ++c) state.acc[size_t(r) * d + c] = float(acc[size_t(r) * d + c]);
  }
}

}  // namespace kvmanager::million
