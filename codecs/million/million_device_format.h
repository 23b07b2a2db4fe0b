// MILLION's format and codebooks as a GPU reads them: plain structs without containers, made once on the host.
//
// MillionDeviceShape is what is the same for all layers and heads; it travels as a kernel's argument. Codebooks lie in
// one piece of device memory, where the caller copies `bytes`. All of it is immutable once made, so any thread and
// stream may read it.
#pragma once

#include <cstdint>
#include <vector>

#include "codecs/million/million_codebooks.h"
#include "codecs/million/million_format.h"
#include "codecs/million/million_side.h"

namespace kvmanager::million {

/// What attention reads beside pages, of one layer and KV head, where MillionPairs(format): head_dim 128 on both sides
/// in 64 subspaces of 8-bit indices.
struct MillionPairTables {
  /// [index][side: K, V][bank 0..31][half][2 codes]: subspace 32 * half + bank of the side. Subspaces have banks of
  /// shared memory of their own.
  uint8_t rows[256][256];
  float step[2][128];  // of K and V, by channel
  float mid[2][128];
};
bool MillionPairs(const MillionFormat& format);

struct MillionDeviceShape {
  SideLayout side[2];
  uint32_t record_bytes;  // of one head
  uint32_t entries[2];    // of a channel's codes
  uint16_t kv_heads;
  uint16_t head_dim;
  uint16_t page_tokens;
  bool bfloat16;
  uint32_t steps_at[2];  // in a side's codebook, which begins with codes [head_dim][entries]: float [head_dim]
  uint32_t mids_at[2];   // likewise
};

struct MillionDeviceFormat {
  MillionDeviceShape shape;
  std::vector<uint64_t> codebooks;       // [layer][kv_head][side], in `bytes`
  std::vector<uint8_t> bytes;            // multiples of 64 apart
  std::vector<MillionPairTables> pairs;  // [layer][kv_head], or empty
};

MillionDeviceFormat MakeMillionDeviceFormat(const MillionFormat& format, const MillionTables& tables);

}  // namespace kvmanager::million
