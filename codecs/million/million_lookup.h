// Look-ups of one strip: from indices to the codes of their centroids' components, as int8 products read them.
//
// A strip's codes lie in L1 for as long as the rows of the head's group take to multiply them; that is the look-up
// table of MILLION (section III-C) turned round: the table is the codebook, not the query's products with it, so that
// one look-up serves every row, and no step is common to channels of different size.
//
// Words are of four codes. Tokens of a strip are taken in the order of kTokenOf, in which the permutes leave them:
//   K: [head_dim / 4][64 tokens], a word's bytes four consecutive channels;
//   V: [16][head_dim], a word's bytes four consecutive tokens (of that order).
// Plain functions, any thread. This header is included by kernels of every instruction set: plain structs only.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "codecs/million/million_side.h"

namespace kvmanager::million {

/// Token of the strip at place n.
constexpr int TokenAt(int n) { return n % 16 / 4 * 16 + n / 16 * 4 + n % 4; }

/// words: 64 * head_dim bytes, 64-byte aligned.
using LookUpFunction = void (*)(const SideLayout& side, const SideTable& table, int head_dim, const uint8_t* strip,
                                uint32_t* words);

/// By address: any width and bits; needs SideTable::by_index.
void LookUpKByAddress(const SideLayout& side, const SideTable& table, int head_dim, const uint8_t* strip,
                      uint32_t* words);
void LookUpVByAddress(const SideLayout& side, const SideTable& table, int head_dim, const uint8_t* strip,
                      uint32_t* words);

/// By permutes of whole tables in registers (AVX-512 VBMI), 64 tokens at a time: 2^bits / 128 of them per channel, so
/// beyond these bits loads by address are the faster.
inline constexpr int kPermuteBitsMax = 9;
/// Whether this processor has the permutes and they serve `bits`.
bool PermutesServe(int bits);
/// bits: kBitsMin..kPermuteBitsMax.
LookUpFunction LookUpKByPermute(const SideLayout& side);
LookUpFunction LookUpVByPermute(const SideLayout& side);

}  // namespace kvmanager::million
