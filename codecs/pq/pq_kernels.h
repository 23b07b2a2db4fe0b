// The inner loops of PQ: nearest centroids, scores from codes, the choice of tokens, attention over chosen rows. Plain
// structs only: what pq's sources and its kernels, one object file per instruction set, say to each other.
//
// Functions of their arguments alone; any thread; nothing is allocated. Codes and centroids come out with equal bits on
// every instruction set; what has an exp in it may differ in the last bits.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvmanager::pq {

constexpr int kBitsMin = 4, kBitsMax = 8;
constexpr int kTableBytes = 512;      // low bytes of up to 256 entries, then high bytes
constexpr size_t kSumsPadding = 64;   // values beyond the last that look_up may write
constexpr int kHistogramBins = 2048;  // of kHistograms counters each
constexpr int kHistograms = 4;

/// Attention of a few query rows over tokens given by the addresses of their K and V.
struct RowArguments {
  const float* q;  // [rows][head_dim]
  int rows;
  int head_dim;
  bool bfloat16;
  float scale;
  const uint8_t* const* k;  // [tokens] each at [head_dim] 16-bit values
  const uint8_t* const* v;
  size_t tokens;
  float* max;  // as SoftmaxRows
  float* sum;
  float* acc;
};

struct Kernels {
  /// codes[i] = argmin over c of |x_i - c|^2, ties to the lowest, for n vectors [width], dense. centroids:
  /// [width][count] (transposed), half_norms: [count] of |c|^2 / 2; count a multiple of 16.
  void (*nearest)(const float* x, size_t n, int width, const float* centroids, const float* half_norms, int count,
                  uint8_t* codes);
  /// out [count] = scale * (x . c); *low and *high are their bounds.
  void (*dots)(const float* x, int width, const float* centroids, int count, float scale, float* out, float* low,
               float* high);
  /// table: entry i = round((values[i] - low) * inverse_step) as low and high bytes.
  void (*pack_table)(const float* values, int count, float low, float inverse_step, uint8_t* table);
  /// sums[i] += table[codes[i]], of a table of 2^bits entries; the first subspace sets, and between the first and the
  /// last the order within 64 values is the kernel's own. Writes up to kSumsPadding values beyond n.
  void (*look_up)(const uint8_t* codes, size_t n, const uint8_t* table, int bits, bool first, bool last,
                  uint16_t* sums);

  // Scores of two kinds: 16-bit sums (score = (sum - top) * step), and fp32 (score = value - top; step is unused).
  float (*top16)(const uint16_t* s, size_t n);
  float (*top32)(const float* s, size_t n);
  float (*sum_exp16)(const uint16_t* s, size_t n, float top, float step);
  float (*sum_exp32)(const float* s, size_t n, float top, float step);
  /// out[i] = sum over rows r of exp(score of s[r][i]) * weight[r].
  void (*weigh16)(const uint16_t* const* s, int rows, size_t n, const float* top, const float* step,
                  const float* weight, float* out);
  void (*weigh32)(const float* const* s, int rows, size_t n, const float* top, const float* step, const float* weight,
                  float* out);

  /// The k largest of n values >= 0, ties to the lower index: out = first + index, ascending. k <= n. candidates: [n];
  /// histogram: [kHistograms * kHistogramBins].
  void (*select)(const float* values, size_t n, size_t k, uint32_t first, uint32_t* out, uint32_t* candidates,
                 uint32_t* histogram);

  /// scores [rows][stride] = scale * (q . k).
  void (*score_rows)(const RowArguments& a, float* scores, size_t stride);
  /// Adds the tokens to the rows' softmax state.
  void (*attend_rows)(const RowArguments& a);
};

extern const Kernels kKernelsPortable;
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;
extern const Kernels kKernelsVbmi;  // AVX-512 with byte permutations: tables stay in registers

}  // namespace kvmanager::pq
