// What million_attention.cc and its kernels, one object file per instruction set, say to each other: plain structs
// only.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "codecs/million/million_lookup.h"
#include "codecs/million/million_side.h"

namespace kvmanager::million {

/// Channels of a row's query that may exceed the range of one byte (million_attention.h).
inline constexpr int kWideMax = 4;

/// Scratch of one call, cut from the caller's workspace; every array is 64-byte aligned.
struct MillionScratch {
  uint32_t* words;   // [kGroupStrips][StripWords(channels)] codes of K, and then of V
  int8_t* q_high;    // [rows][head_dim] q folded with K's steps: 256 q_high + q_low
  int8_t* q_low;     // likewise
  int32_t* q_wide;   // [rows][kWideMax] channels, multiples of 4, where some of four consecutive q_high are not zero
  int32_t* q_wides;  // [rows]: how many
  int32_t* q_start;  // [rows]: -128 sum of 256 q_high + q_low, which K's unsigned codes add
  float* q_unit;     // [rows]: what one unit of the integer product adds to a score
  float* q_offset;   // [rows]: the score's constant, q . mid
  float* scores;     // [kGroupStrips][rows][64], in the order of TokenAt; before that the integer sums of some channels
  uint8_t* p8;       // [kGroupStrips][rows][64]
  float* p_unit;     // [kGroupStrips][rows]: the strip's largest probability / 255; before that its largest score
  float* p_sum;      // [kGroupStrips][rows]: sum of p8
  float* rescale;    // [kGroupStrips][rows]: by which acc is multiplied before the strip's values are added
};

struct MillionArguments {
  const float* q;  // [rows][head_dim]
  int rows;
  int head_dim;
  int strips;  // of a page
  float scale;
  const uint8_t* const* pages;
  size_t page_count;
  size_t record_offset;  // of the head in a page
  // What is attended to after these pages: `next_count` pages (0: unknown) at next_offset.
  const uint8_t* const* next_pages;
  size_t next_count;
  size_t next_offset;
  const SideLayout* k;
  const SideLayout* v;
  const SideTable* k_table;
  const SideTable* v_table;
  LookUpFunction look_up_k;
  LookUpFunction look_up_v;
  int k_channels;  // of one look-up; divide head_dim
  int v_channels;
  float* max;  // as SoftmaxRows
  float* sum;
  float* acc;
  MillionScratch scratch;
};

extern void (*const kMillionAttendPortable)(const MillionArguments& arguments);
extern void (*const kMillionAttendAvx2)(const MillionArguments& arguments);
extern void (*const kMillionAttendAvx512)(const MillionArguments& arguments);

}  // namespace kvmanager::million
