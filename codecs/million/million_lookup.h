// Look-ups of a few strips: from indices to the codes of their centroids' components, as int8 products read them.
//
// Strips' codes lie in L1 for as long as the rows of the head's group take to multiply them; that is the look-up table
// of MILLION (section III-C) turned round: the table is the codebook, not the query's products with it, so that one
// look-up serves every row, and no step is common to channels of different size. A head's tables (64 KB for 256
// centroids of 128 channels, K and V) exceed L1, so that each table's load serves several strips; a few channels at a
// time, so that what was looked up stays in L1.
//
// Words are of four codes. Tokens of a strip are taken in the order of TokenAt, in which the permutes leave them:
//   K: [head_dim / 4][64 tokens], a word's bytes four consecutive channels;
//   V: [head_dim / 4][16][4 channels], a word's bytes four consecutive tokens (of that order).
// Plain functions, any thread. This header is included by kernels of every instruction set: plain structs only.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "codecs/million/million_side.h"

namespace kvmanager::million {

/// Token of the strip at place n.
constexpr int TokenAt(int n) { return n % 16 / 4 * 16 + n / 16 * 4 + n % 4; }

/// Strips that one call looks up at most, and channels that one by permutes does (all, where this does not divide
/// head_dim): the tables' loads serve all of the strips, and 8 KB of codes stay in L1.
inline constexpr int kGroupStrips = 4;
inline constexpr int kPermuteChannels = 32;

/// Words of one strip's `channels`.
constexpr size_t StripWords(int channels) { return size_t(kStripTokens) / 4 * channels; }

/// Channels first .. first + channels - 1 (multiples of 4) of `count` strips, 1..kGroupStrips, to words [count]
/// [StripWords(channels)], 64-byte aligned.
using LookUpFunction = void (*)(const SideLayout& side, const SideTable& table, int first, int channels,
                                const uint8_t* const* strips, int count, uint32_t* words);

/// By address: any width and bits; needs SideTable::by_index. All channels at once: first is 0.
void LookUpKByAddress(const SideLayout& side, const SideTable& table, int first, int channels,
                      const uint8_t* const* strips, int count, uint32_t* words);
void LookUpVByAddress(const SideLayout& side, const SideTable& table, int first, int channels,
                      const uint8_t* const* strips, int count, uint32_t* words);

/// By permutes of whole tables in registers (AVX-512 VBMI), 64 tokens at a time: 2^bits / 128 of them per channel, so
/// beyond these bits loads by address are the faster.
inline constexpr int kPermuteBitsMax = 9;
/// Whether this processor has the permutes and they serve `bits`.
bool PermutesServe(int bits);
/// bits: kBitsMin..kPermuteBitsMax.
LookUpFunction LookUpKByPermute(const SideLayout& side);
LookUpFunction LookUpVByPermute(const SideLayout& side);

}  // namespace kvmanager::million
