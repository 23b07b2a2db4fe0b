// The inner loops of PQ: nearest centroids, scores from codes, sparse selection of tokens, attention over selected
// rows. Plain structs only: what pq's sources and its kernels, one object file per instruction set, say to each other.
//
// Functions of their arguments alone; any thread; nothing is allocated. Codes, and what is chosen by codes, come out
// equal on every instruction set; the rest may differ in the last bits.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvmanager::pq {

constexpr int kBitsMin = 4, kBitsMax = 8;
constexpr int kTableBytes = 512;     // bits 0..5 of up to 256 entries, then bits 6..13
constexpr int kTableLowBits = 6;     // four of them add up to no more than a byte
constexpr int kSubspacesAtOnce = 4;  // whose entries add up to at most kSumMax
constexpr int kSumMax = 256 * 64 - 1;
constexpr size_t kPadding = 64;  // values beyond the last that look_up and select may write

// Sums of table entries are distances from the best score possible. One unit is 2^shift / 128 of an octave (a factor
// of 2): shift is 0 but for scores that spread wider than 16 bits tell apart.
constexpr int kUnitsPerOctave = 128;
constexpr int kShiftMax = 15;
/// Weights are summed in runs of so many middle tokens, so that runs need not know of one another; each is relative to
/// its own best token, rounded down to a whole octave, so that what brings them together is a power of two.
constexpr size_t kWeightRun = 512;
/// Tokens this far below the best of their run are all alike, and so are runs this far below the best one: 2^-40. Every
/// product of a weight and a factor is then a normal number.
constexpr int kOctavesKept = 40;

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

/// Scores of a run of tokens for a few query rows.
struct LookUpArguments {
  const uint8_t* codes;  // [subspaces][code_stride]
  const uint8_t* ahead;  // as many codes, to be fetched meanwhile; `codes` if there are none
  size_t code_stride;
  size_t n;
  int bits;  // of a code
  int subspaces;
  const uint8_t* tables;  // [rows][table_stride] of [subspaces][kTableBytes]
  size_t table_stride;
  int rows;
  bool first;  // sets the sums
  uint16_t* sums;
  size_t sums_stride;
};

struct Kernels {
  /// codes[i] = argmin over c of |x_i - c|^2, ties to the lowest, for n vectors [width], dense. centroids:
  /// [width][count] (transposed), half_norms: [count] of |c|^2 / 2; count a multiple of 16.
  void (*nearest)(const float* x, size_t n, int width, const float* centroids, const float* half_norms, int count,
                  uint8_t* codes);
  /// out [count] = scale * (x . c); *low and *high are their bounds.
  void (*dots)(const float* x, int width, const float* centroids, int count, float scale, float* out, float* low,
               float* high);
  /// table: entry i = round((high - values[i]) * inverse_unit), at most kSumMax.
  void (*pack_table)(const float* values, int count, float high, float inverse_unit, uint8_t* table);
  /// sums [rows][sums_stride] (+)= sum over `subspaces`, up to kSubspacesAtOnce, of table[code], for n tokens.
  void (*look_up)(const LookUpArguments& a);
  /// The least of n sums.
  uint16_t (*least)(const uint16_t* sums, size_t n);
  /// sums[i] becomes the bits of a bfloat16: 2^(-(sums[i] - least) * 2^shift / 128), within 0.9%. Returns their sum: of
  /// 32 in fp32, the j-th of tokens j, j + 32, ... in order, whose neighbours are added, then neighbours of those, and
  /// so on.
  float (*exponentials)(uint16_t* sums, size_t n, uint16_t least, int shift);
  /// out[i] = sum over rows r of e[r][i] * weight[r]; weights of 16 significant bits, so that products are exact.
  void (*weigh)(const uint16_t* const* e, int rows, size_t n, const float* weight, float* out);

  // The same of fp32 scores: sum of exp(s - top), and out[i] = sum over r of exp(s[r][i] - top[r]) * weight[r].
  float (*top32)(const float* s, size_t n);
  float (*sum_exp32)(const float* s, size_t n, float top);
  void (*weigh32)(const float* const* s, int rows, size_t n, const float* top, const float* weight, float* out);

  /// The k largest of n values >= 0, ties to the lower index: out [k + kPadding] = first + index, ascending. k <= n.
  /// candidates, indices: [n + kPadding].
  void (*select)(const float* values, size_t n, size_t k, uint32_t first, uint32_t* out, uint32_t* candidates,
                 uint32_t* indices);

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
