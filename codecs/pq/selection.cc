#include "codecs/pq/selection.h"

#include <algorithm>
#include <cmath>

namespace kvmanager::pq {
namespace {

constexpr int kRowsMax = 64;  // PageAttentionTask::kRowsMax
constexpr uint32_t kSumMax = 65535;

constexpr size_t AlignUp(size_t n) { return (n + 63) / 64 * 64; }

/// Softmax of each row over the middle tokens, summed, and the largest of that.
template <typename T>
absl::Span<const uint32_t> Choose(const Kernels& kernels, const SelectionTask& task, const SelectionScratch& scratch,
                                  const float* steps, uint8_t* workspace) {
  const T* scores = reinterpret_cast<const T*>(workspace + scratch.scores_at);
  float* weights = reinterpret_cast<float*>(workspace + scratch.weights_at);
  uint32_t* chosen = reinterpret_cast<uint32_t*>(workspace + scratch.chosen_at);
  const T* row[kRowsMax];
  float top[kRowsMax], inverse[kRowsMax];
  for (int r = 0; r < task.rows; ++r) {
    row[r] = scores + size_t(r) * scratch.score_stride;
    if constexpr (sizeof(T) == 2) {
      top[r] = kernels.top16(row[r], task.middle);
      inverse[r] = 1.0f / kernels.sum_exp16(row[r], task.middle, top[r], steps[r]);
    } else {
      top[r] = kernels.top32(row[r], task.middle);
      inverse[r] = 1.0f / kernels.sum_exp32(row[r], task.middle, top[r], 1.0f);
    }
  }
  if constexpr (sizeof(T) == 2) {
    kernels.weigh16(row, task.rows, task.middle, top, steps, inverse, weights);
  } else {
    kernels.weigh32(row, task.rows, task.middle, top, steps, inverse, weights);
  }
  kernels.select(weights, task.middle, task.chosen, uint32_t(task.first), chosen,
                 reinterpret_cast<uint32_t*>(workspace + scratch.candidates_at),
                 reinterpret_cast<uint32_t*>(workspace + scratch.histogram_at));
  return {chosen, task.chosen};
}

}  // namespace

const Kernels& KernelsOf(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return __builtin_cpu_supports("avx512vbmi") ? kKernelsVbmi : kKernelsAvx512;
  if (isa == Isa::kAvx2) return kKernelsAvx2;
#endif
  return kKernelsPortable;
}

SelectionScratch::SelectionScratch(const Parameters& parameters, int rows, size_t middle_tokens_max,
                                   size_t chosen_max) {
  const size_t score_bytes = parameters.scores == Parameters::Scores::kExact ? sizeof(float) : sizeof(uint16_t);
  score_stride = AlignUp(middle_tokens_max) + kSumsPadding;
  scores_at = 0;
  weights_at = AlignUp(rows * score_stride * score_bytes);
  candidates_at = weights_at + AlignUp(middle_tokens_max * sizeof(float)) + 64;
  chosen_at = candidates_at + AlignUp(middle_tokens_max * sizeof(uint32_t)) + 64;
  histogram_at = chosen_at + AlignUp(chosen_max * sizeof(uint32_t)) + 64;
  tables_at = histogram_at + sizeof(uint32_t) * kHistograms * kHistogramBins;
  bytes = tables_at + 256 * sizeof(float) * size_t(parameters.m) + size_t(parameters.m) * kTableBytes;
}

absl::Span<const uint32_t> SelectByCodes(const Kernels& kernels, const Codebook& codebook, const SelectionTask& task,
                                         absl::Span<const CodeRun> runs, const SelectionScratch& scratch,
                                         uint8_t* workspace) {
  if (task.chosen == 0) return {};
  const int m = codebook.m, count = codebook.count, width = codebook.width;
  const int bits = __builtin_ctz(unsigned(count));
  uint16_t* scores = reinterpret_cast<uint16_t*>(workspace + scratch.scores_at);
  float* values = reinterpret_cast<float*>(workspace + scratch.tables_at);
  uint8_t* tables = workspace + scratch.tables_at + sizeof(float) * 256 * m;
  float steps[kRowsMax], low[Parameters::kSubspacesMax], high[Parameters::kSubspacesMax];
  for (int r = 0; r < task.rows; ++r) {
    float range = 0;
    for (int s = 0; s < m; ++s) {
      kernels.dots(task.q + (size_t(r) * m + s) * width, width, codebook.centroids_of(task.kv_head, s), count,
                   task.scale, values + size_t(s) * 256, &low[s], &high[s]);
      range = std::max(range, high[s] - low[s]);
    }
    const float entry_max = float(kSumMax / unsigned(m));
    steps[r] = range / entry_max;
    float inverse = steps[r] > 0 ? 1.0f / steps[r] : 0.0f;
    // A query so large, or so small, that its scores leave fp32: all tokens score alike.
    if (!std::isfinite(steps[r]) || !std::isfinite(inverse)) steps[r] = inverse = 0;
    for (int s = 0; s < m; ++s) {
      if (inverse == 0) {
        std::fill_n(tables + size_t(s) * kTableBytes, kTableBytes, uint8_t{0});
      } else {
        kernels.pack_table(values + size_t(s) * 256, count, low[s], inverse, tables + size_t(s) * kTableBytes);
      }
    }
    uint16_t* out = scores + size_t(r) * scratch.score_stride;
    for (const CodeRun& run : runs) {
      for (int s = 0; s < m; ++s) {
        kernels.look_up(run.codes + s * run.stride, run.tokens, tables + size_t(s) * kTableBytes, bits, s == 0,
                        s == m - 1, out);
      }
      out += run.tokens;
    }
  }
  return Choose<uint16_t>(kernels, task, scratch, steps, workspace);
}

absl::Span<const uint32_t> SelectByScores(const Kernels& kernels, const SelectionTask& task,
                                          const SelectionScratch& scratch, uint8_t* workspace) {
  if (task.chosen == 0) return {};
  const float steps[kRowsMax] = {};
  return Choose<float>(kernels, task, scratch, steps, workspace);
}

}  // namespace kvmanager::pq
