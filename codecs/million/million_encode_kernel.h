// What million_kernels.cc and the encoder's kernels, one object file per instruction set, say to each other: plain
// structs only.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvmanager::million {

/// One subspace of a strip.
struct NearestArguments {
  const uint8_t* codes;  // [width][entries], the subspace's part of SideTable::by_channel
  const float* step;     // [width]
  const float* x;        // [width][64 tokens], less mid; 64-byte aligned
  float* table;          // [width + 1][entries] of scratch: components, then half the squared norms; 64-byte aligned
  uint16_t* indices;     // out: [64]
  int width;
  int centroids;
  int entries;
  uint8_t flip;  // 0x80 where codes are stored with 128 added, else 0
};

/// Rows of raw elements, as floats, less mid: out [channel][64 tokens].
struct CentreArguments {
  const uint8_t* raw;  // [64][channels]
  const float* mid;
  float* out;
  float* row;  // [channels] of scratch
  int channels;
  bool bfloat16;
};

struct EncodeKernels {
  void (*nearest)(const NearestArguments& arguments);
  void (*centre)(const CentreArguments& arguments);
};
extern const EncodeKernels kEncodePortable;
extern const EncodeKernels kEncodeAvx2;
extern const EncodeKernels kEncodeAvx512;

}  // namespace kvmanager::million
