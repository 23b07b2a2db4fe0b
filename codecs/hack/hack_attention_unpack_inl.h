// Codes of one tile out of a segment's planes (hack_format.h): four bytes of every lane, ready for Dot4.
//
// `at` is a segment's planes of one strip, moved to the first of the kLanes words wanted; j and i as in hack_format.h.
// Where j and i are constants the compiler shares the loads and joins of a word between its tiles.
#pragma once

#include "codecs/simd_inl.h"

namespace kvmanager::hack {
namespace {

constexpr uint32_t Bytes(uint32_t byte) { return byte * 0x01010101u; }

/// AVX-512's vpdpbusd takes any unsigned byte, so that tiles may stay where they are in a word, scaled by a power of
/// two.
#if defined(KVMANAGER_ISA_AVX512)
constexpr bool kInPlace = true;
#else
constexpr bool kInPlace = false;
#endif

/// Bit of tile i in the 1-bit plane, for an even j.
constexpr int OneBitShift(int i) { return (i & 1) + 4 * (i >> 1); }

/// Widths 3 and 4: nibbles of tiles odd and odd + 2 (low and high nibble); bits 3 of width 3's nibbles are to be
/// masked.
template <int kBits>
KVMANAGER_INLINE VecU Nibbles(const uint8_t* at, int j, int odd) {
  const VecU mask = SetU(Bytes(0x33));
  const VecU low = LoadU(at + 64 * j);
  const uint8_t* high_plane = at + 256;
  if constexpr (kBits == 3) {
    const VecU high = LoadU(high_plane + 64 * (j >> 1));
    // Tile bits 0, 4 (even) or 1, 5 (odd), two further for an odd j, go to 2 and 6.
    const int left = 2 - odd - 2 * (j & 1);
    const VecU moved = left > 0 ? high << left : left < 0 ? high >> -left : high;
    return SelectBits(mask, odd ? low >> 2 : low, moved);
  } else {
    const VecU high = LoadU(high_plane + 64 * j);
    return odd ? SelectBits(mask, low >> 2, high) : SelectBits(mask, low, high << 2);
  }
}

/// What the code of tile i is scaled by in UnpackScaled's result, inverted.
template <int kBits>
constexpr float TileUnit(int i) {
  if (!kInPlace) return 1;
  if (kBits == 1) return 1.0f / (1 << OneBitShift(i));
  if (kBits == 2) return 1.0f / (1 << 2 * i);
  return kBits == 8 || i < 2 ? 1.0f : 1.0f / 16;
}

/// Codes of tile i as bytes 0..2^kBits - 1 (8 bits: as stored).
template <int kBits>
KVMANAGER_INLINE VecU Unpack(const uint8_t* at, int j, int i) {
  if constexpr (kBits == 1) {
    return LoadU(at + 64 * (j >> 1)) >> (OneBitShift(i) + 2 * (j & 1)) & SetU(Bytes(1));
  } else if constexpr (kBits == 2) {
    return LoadU(at + 64 * j) >> (2 * i) & SetU(Bytes(3));
  } else if constexpr (kBits == 8) {
    return LoadU(at + 64 * (4 * j + i));
  } else {
    const VecU nibbles = Nibbles<kBits>(at, j, i & 1);
    return (i < 2 ? nibbles : nibbles >> 4) & SetU(Bytes(kBits == 3 ? 7 : 15));
  }
}

/// The same, scaled by 1 / TileUnit: unsigned bytes.
template <int kBits>
KVMANAGER_INLINE VecU UnpackScaled(const uint8_t* at, int j, int i) {
  if constexpr (!kInPlace || kBits == 8) {
    return Unpack<kBits>(at, j, i);
  } else if constexpr (kBits == 1) {
    const VecU word = LoadU(at + 64 * (j >> 1));
    return (j & 1 ? word >> 2 : word) & SetU(Bytes(1u << OneBitShift(i)));
  } else if constexpr (kBits == 2) {
    return LoadU(at + 64 * j) & SetU(Bytes(3u << 2 * i));
  } else {
    return Nibbles<kBits>(at, j, i & 1) & SetU(Bytes((kBits == 3 ? 7u : 15u) << (i < 2 ? 0 : 4)));
  }
}

/// acc + the dot products of u (unsigned) and s (signed), one of which is codes of kBits.
template <int kBits>
KVMANAGER_INLINE VecI DotCodes(VecI acc, VecU u, VecU s) {
  return kBits == 8 ? Dot4(acc, u, s) : Dot4Small(acc, u, s);
}

}  // namespace
}  // namespace kvmanager::hack
