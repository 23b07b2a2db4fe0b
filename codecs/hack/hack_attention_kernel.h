// What hack_attention.cc and its kernels, one object file per instruction set, say to each other: plain structs only.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvmanager::hack {

/// Consecutive segments of one width, inside one partition where partitions run along channels.
struct HackRun {
  int bits;
  int first;  // segment
  int count;
  int partition;  // that the segments belong to, or 0
};

struct HackSide {
  HackRun runs[16];  // width 0 is left out: such a channel is its minimum alone
  int run_count;
  // The same segments for loops over mixed widths: by width, and as runs of a multiple of 4 segments, pairs and a last
  // one. Widths up to 4 alone are mixed (`mixes`); a pair's first is at least as wide as its second. K's segments of 8
  // bits, of which q has two bytes, stand beside them in `wide`; V is mixed only where it has none.
  bool mixes;
  uint8_t of_width[5][16];
  int width_count[5];
  HackRun quads[8];
  int quad_count;
  uint8_t pairs[8][2];
  int pair_count;
  HackRun last;  // of one segment, or of none
  HackRun wide[8];
  int wide_count;
  bool two_byte_q;  // of SideLayout
  uint8_t bits[16];
  uint8_t empty[16];  // segments of width 0
  int empty_count;
  uint32_t segment_offset[16];
  uint32_t strip_bytes;
  int partitions;
  int partition;
  int meta_entries;
  uint32_t codes, tops, steps, minima, sums, norms, norm_top, end;  // offsets in a head's record
};

struct HackHead {
  uint32_t offset;  // in a page
  HackSide k, v;
};

/// Lines of the record that is read next, of which the loops prefetch a few at a time.
struct HackAhead {
  const uint8_t* at;
  int left;
  int k_step_lines;
  int v_step_lines;
};

/// Scratch of one call, cut from the caller's workspace; every array is 64-byte aligned.
struct HackScratch {
  float* steps;     // [max(head_dim, page_tokens)] of one partition of K
  float* minima;    // likewise
  float* v_steps;   // V's, converted while the scores' maxima are waited for
  float* v_minima;  // likewise
  float* v_norms;   // [page_tokens] as stored: 0..255
  float* sums;      // [page_tokens] of K's codes
  int8_t* q8;       // [rows][head_dim]; less 128 with an asymmetric query
  int8_t* q_low;    // [rows][head_dim] with two_byte_q: 254ths of q8's unit that K's segments of 8 bits add
  float* q_step;    // [partitions][rows]: what one unit of q8 * code stands for, scaled as scores are
  float* q_min;     // [partitions][rows]: the score's constant; along channels, the factor of a token's minimum
  float* q_sums;    // [partitions][rows]: along channels, the factor of a token's step * (sum of codes)
  float* scores;    // [rows][page_tokens], then probabilities times norms
  uint8_t* p8;      // [rows][page_tokens]
  float* p_step;    // [partitions][rows]: what one unit of p8 stands for
  float* p_sum;     // [partitions][rows]: sum of p8
};

struct HackArguments {
  const float* q;  // [rows][head_dim]
  int rows;
  int head_dim;
  int page_tokens;
  float scale;
  const uint8_t* const* pages;
  size_t page_count;
  const HackHead* head;
  // What is attended to after these pages: the records at next_offset in `next_count` pages (0: unknown).
  const uint8_t* const* next_pages;
  size_t next_count;
  size_t next_offset;
  HackAhead* ahead;  // the kernel's own
  bool meta8;
  bool along_channels;  // K's partitions
  bool asymmetric;
  float* max;  // as SoftmaxRows
  float* sum;
  float* acc;
  HackScratch scratch;
};

extern void (*const kHackAttendPortable)(HackArguments& arguments);
extern void (*const kHackAttendAvx2)(HackArguments& arguments);
extern void (*const kHackAttendAvx512)(HackArguments& arguments);

/// out = H x / sqrt(d), row by row: the normalised Walsh-Hadamard transform. x, out [rows][d], distinct; d is a power
/// of two from 16 on.
extern void (*const kHackRotatePortable)(const float* x, int rows, int d, float* out);
extern void (*const kHackRotateAvx2)(const float* x, int rows, int d, float* out);
extern void (*const kHackRotateAvx512)(const float* x, int rows, int d, float* out);

}  // namespace kvmanager::hack
