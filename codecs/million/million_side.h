// One side's layout and codebook as plain structs, which kernels compiled for other instruction sets may include.
//
// million_format.h says what lies where in a page; million_codebooks.h what a table's bytes stand for and who owns it.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvmanager::million {

inline constexpr int kStripTokens = 64;
inline constexpr int kPlanes = 4;
inline constexpr int kPlaneBits[kPlanes] = {8, 4, 2, 1};

/// Where one side lies in a head's record.
struct SideLayout {
  int subspaces = 0;
  int width = 0;  // channels of a subspace
  int bits = 0;
  int centroids = 0;             // 2^bits
  uint32_t offset = 0;           // of the first strip in the record
  uint32_t strip_bytes = 0;      // 8 * subspaces * bits
  uint32_t end = 0;              // of the last strip; zeros follow up to a multiple of 64
  uint32_t plane[kPlanes] = {};  // offset in a strip of the plane of kPlaneBits[i] bits, if `bits` has it
};

/// One side's codebook. Codes are stored as code ^ kFlip[side]: K's are the unsigned operand of an int8 product.
struct SideTable {
  const uint8_t* by_channel = nullptr;  // [head_dim][entries], 64-byte aligned
  const uint8_t* by_index = nullptr;    // [M][2^bits][width], or nullptr (TableOrder)
  const float* mid = nullptr;           // [head_dim], 64-byte aligned
  const float* step = nullptr;          // likewise
  int entries = 0;                      // 2^bits, at least 64; those beyond the centroids are 0
};

}  // namespace kvmanager::million
