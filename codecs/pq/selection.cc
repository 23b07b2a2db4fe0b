#include "codecs/pq/selection.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace kvmanager::pq {
namespace {

constexpr int kRowsMax = 64;  // PageAttentionTask::kRowsMax
constexpr float kUnitsPerNat = kUnitsPerOctave * 1.44269504f;
/// What sums may reach before their entries are rounded: of kSubspacesAtOnce, and of all sub-vectors.
constexpr float kPartLimit = kSumMax - kSubspacesAtOnce;
constexpr float kTotalLimit = UINT16_MAX - Parameters::kSubspacesMax;

constexpr size_t RunsOf(size_t middle) { return (middle + kWeightRun - 1) / kWeightRun; }
/// 2^-octaves, of the whole octaves from a run's least sum down to the best one.
float RunFactor(uint32_t least, uint32_t best, int shift) {
  const uint64_t octaves = (uint64_t{least - best} << shift) / kUnitsPerOctave;
  const uint32_t bits = uint32_t(127 - std::min<uint64_t>(octaves, kOctavesKept)) << 23;
  float factor;
  std::memcpy(&factor, &bits, sizeof factor);
  return factor;
}
constexpr size_t AlignUp(size_t n) { return (n + 63) / 64 * 64; }

/// How a row's distances are counted: entry = nats * inverse; one unit is 2^shift / kUnitsPerNat nats.
struct Unit {
  float inverse;
  int shift;
};

/// spreads: of each sub-vector's products. All tokens of a query whose scores leave fp32 are alike.
Unit UnitOf(absl::Span<const float> spreads) {
  float total = 0, widest = 0;
  for (size_t s = 0; s < spreads.size(); s += kSubspacesAtOnce) {
    float part = 0;
    for (size_t i = s; i < std::min(s + kSubspacesAtOnce, spreads.size()); ++i) part += spreads[i];
    total += part;
    widest = std::max(widest, part);
  }
  if (!std::isfinite(total)) return {0, 0};
  Unit unit{kUnitsPerNat, 0};
  for (; unit.shift < kShiftMax && (widest * unit.inverse > kPartLimit || total * unit.inverse > kTotalLimit);
       unit.inverse /= 2) {
    ++unit.shift;
  }
  if (total > 0) unit.inverse = std::min({unit.inverse, kPartLimit / widest, kTotalLimit / total});
  return unit;
}

absl::Span<const uint32_t> Choose(const Kernels& kernels, const SelectionTask& task, const SelectionScratch& scratch,
                                  uint8_t* workspace) {
  uint32_t* chosen = reinterpret_cast<uint32_t*>(workspace + scratch.chosen_at);
  kernels.select(reinterpret_cast<const float*>(workspace + scratch.weights_at), task.middle, task.chosen,
                 uint32_t(task.first), chosen, reinterpret_cast<uint32_t*>(workspace + scratch.candidates_at),
                 reinterpret_cast<uint32_t*>(workspace + scratch.indices_at));
  return {chosen, task.chosen};
}

/// 16 significant bits.
float Shortened(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits &= 0xFFFFFF00;
  std::memcpy(&x, &bits, sizeof x);
  return x;
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
  score_stride = AlignUp(middle_tokens_max) + kPadding;
  scores_at = 0;
  weights_at = AlignUp(rows * score_stride * score_bytes);
  candidates_at = weights_at + AlignUp(middle_tokens_max * sizeof(float));
  indices_at = candidates_at + AlignUp((middle_tokens_max + kPadding) * sizeof(uint32_t));
  chosen_at = indices_at + AlignUp((middle_tokens_max + kPadding) * sizeof(uint32_t));
  tables_at = chosen_at + AlignUp((chosen_max + kPadding) * sizeof(uint32_t));
  runs_at = tables_at + (256 * sizeof(float) + kTableBytes) * size_t(parameters.m) * rows;
  bytes = runs_at + sizeof(RunSum) * rows * RunsOf(middle_tokens_max);
}

absl::Span<const uint32_t> SelectByCodes(const Kernels& kernels, const Codebook& codebook, const SelectionTask& task,
                                         absl::Span<const CodeRun> runs, const SelectionScratch& scratch,
                                         uint8_t* workspace) {
  if (task.chosen == 0) return {};
  const int m = codebook.m, count = codebook.count, width = codebook.width;
  float* values = reinterpret_cast<float*>(workspace + scratch.tables_at);
  uint8_t* tables = workspace + scratch.tables_at + sizeof(float) * 256 * m * task.rows;
  const size_t table_stride = size_t(m) * kTableBytes;
  float low[Parameters::kSubspacesMax][kRowsMax], high[Parameters::kSubspacesMax][kRowsMax];
  // A sub-vector's centroids stay in the cache for all rows.
  for (int s = 0; s < m; ++s) {
    for (int r = 0; r < task.rows; ++r) {
      const size_t at = size_t(r) * m + s;
      kernels.dots(task.q + at * width, width, codebook.centroids_of(task.kv_head, s), count, task.scale,
                   values + at * 256, &low[s][r], &high[s][r]);
    }
  }
  Unit units[kRowsMax];
  for (int r = 0; r < task.rows; ++r) {
    float spreads[Parameters::kSubspacesMax];
    for (int s = 0; s < m; ++s) spreads[s] = high[s][r] - low[s][r];
    units[r] = UnitOf({spreads, size_t(m)});
    for (int s = 0; s < m; ++s) {
      uint8_t* table = tables + r * table_stride + s * kTableBytes;
      if (units[r].inverse == 0) {
        std::fill_n(table, kTableBytes, uint8_t{0});
      } else {
        kernels.pack_table(values + (size_t(r) * m + s) * 256, count, high[s][r], units[r].inverse, table);
      }
    }
  }
  uint16_t* scores = reinterpret_cast<uint16_t*>(workspace + scratch.scores_at);
  LookUpArguments a{};
  a.bits = __builtin_ctz(unsigned(count));
  a.table_stride = table_stride;
  a.rows = task.rows;
  a.sums = scores;
  a.sums_stride = scratch.score_stride;
  for (size_t i = 0; i < runs.size(); ++i) {
    const CodeRun& run = runs[i];
    const bool more = i + 1 < runs.size() && runs[i + 1].stride == run.stride && runs[i + 1].tokens >= run.tokens;
    a.code_stride = run.stride;
    a.n = run.tokens;
    for (int s = 0; s < m; s += kSubspacesAtOnce) {
      a.codes = run.codes + s * run.stride;
      a.ahead = more ? runs[i + 1].codes + s * run.stride : a.codes;
      a.subspaces = std::min(kSubspacesAtOnce, m - s);
      a.tables = tables + size_t(s) * kTableBytes;
      a.first = s == 0;
      kernels.look_up(a);
    }
    a.sums += run.tokens;
  }
  // Each run's weights relative to its own best token; then each row's sum of all, run by run.
  const size_t run_count = RunsOf(task.middle);
  const auto run_tokens = [&](size_t run) { return std::min(kWeightRun, task.middle - run * kWeightRun); };
  RunSum* run_sums = reinterpret_cast<RunSum*>(workspace + scratch.runs_at);
  float factor[kRowsMax];
  uint32_t best[kRowsMax];
  for (int r = 0; r < task.rows; ++r) {
    RunSum* of_row = run_sums + r * run_count;
    const uint32_t whole_octaves = ~uint32_t((kUnitsPerOctave - 1) >> units[r].shift);
    best[r] = UINT16_MAX;
    for (size_t run = 0; run < run_count; ++run) {
      uint16_t* sums = scores + size_t(r) * scratch.score_stride + run * kWeightRun;
      const uint32_t least = kernels.least(sums, run_tokens(run)) & whole_octaves;
      of_row[run] = {kernels.exponentials(sums, run_tokens(run), uint16_t(least), units[r].shift), least};
      best[r] = std::min(best[r], least);
    }
    float sum = 0;
    for (size_t run = 0; run < run_count; ++run) {
      sum += of_row[run].sum * RunFactor(of_row[run].least, best[r], units[r].shift);
    }
    factor[r] = Shortened(1.0f / sum);
  }
  float* weights = reinterpret_cast<float*>(workspace + scratch.weights_at);
  for (size_t run = 0; run < run_count; ++run) {
    const uint16_t* row[kRowsMax];
    float weight[kRowsMax];
    for (int r = 0; r < task.rows; ++r) {
      const uint32_t least = run_sums[r * run_count + run].least;
      weight[r] = factor[r] * RunFactor(least, best[r], units[r].shift);
      row[r] = scores + size_t(r) * scratch.score_stride + run * kWeightRun;
    }
    kernels.weigh(row, task.rows, run_tokens(run), weight, weights + run * kWeightRun);
  }
  return Choose(kernels, task, scratch, workspace);
}

absl::Span<const uint32_t> SelectByScores(const Kernels& kernels, const SelectionTask& task,
                                          const SelectionScratch& scratch, uint8_t* workspace) {
  if (task.chosen == 0) return {};
  const float* scores = reinterpret_cast<const float*>(workspace + scratch.scores_at);
  const float* row[kRowsMax];
  float top[kRowsMax], weight[kRowsMax];
  for (int r = 0; r < task.rows; ++r) {
    row[r] = scores + size_t(r) * scratch.score_stride;
    top[r] = kernels.top32(row[r], task.middle);
    weight[r] = 1.0f / kernels.sum_exp32(row[r], task.middle, top[r]);
  }
  kernels.weigh32(row, task.rows, task.middle, top, weight, reinterpret_cast<float*>(workspace + scratch.weights_at));
  return Choose(kernels, task, scratch, workspace);
}

}  // namespace kvmanager::pq
