// What callers of raw attention's kernels (raw_attention.cc, and codecs whose pages are 16-bit values too) and the
// kernels, one object file per instruction set, say to each other: plain structs only.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvmanager {

/// Pages hold, of the head, K [page_tokens][k_dim] and V [page_tokens][v_dim], dense: raw's, of head_dim both, or those
/// of a codec that keeps 16-bit values in fewer dimensions. Dimensions are multiples of 16.
struct RawAttentionArguments {
  const float* q;  // [rows], row_floats apart, k_dim of each
  int rows;
  int row_floats;  // from one row of q, or acc, to the next
  int k_dim;
  int v_dim;
  int page_tokens;
  bool bfloat16;
  float scale;
  const uint8_t* const* pages;
  size_t page_count;
  size_t k_offset;  // of the head's K in a page, bytes
  size_t v_offset;
  const uint8_t* next_k;  // the K and V that are attended to after these pages, or nullptr
  const uint8_t* next_v;
  int next_k_dim;
  int next_v_dim;
  int lead_lines;  // of 64 bytes, how far ahead to prefetch: alike in calls that follow one another, at most
                   // RawLeadLines
  bool announced;  // the first lead_lines of the first page were issued by the call before, whose next_k and next_v it
                   // was
  const int* visible;  // [rows] or nullptr
  float* max;          // as SoftmaxRows
  float* sum;
  float* acc;  // [rows], row_floats apart, v_dim of each
};

/// The most that lead_lines may be for heads of these dimensions: a page's lines, as far as they are worth it.
static inline int RawLeadLines(int page_tokens, int k_dim, int v_dim) {
  constexpr int kLeadLinesMax = 256;  // 16 KiB: what memory delivers in several times its latency
  const int lines = page_tokens * (k_dim + v_dim) * 2 / 64;
  return lines < kLeadLinesMax ? lines : kLeadLinesMax;
}

struct RawKernels {
  void (*attend)(const RawAttentionArguments& arguments);
  void (*half_to_float)(const uint16_t* from, size_t count, float* to);
  void (*bfloat16_to_float)(const uint16_t* from, size_t count, float* to);
  void (*float_to_half)(const float* from, size_t count, uint16_t* to);
  void (*float_to_bfloat16)(const float* from, size_t count, uint16_t* to);
};

extern const RawKernels kRawKernelsPortable;
extern const RawKernels kRawKernelsAvx2;
extern const RawKernels kRawKernelsAvx512;

}  // namespace kvmanager
