// MILLION's format and codebooks as a GPU reads them: plain structs without containers, made once on the host.
//
// MillionDeviceShape is what is the same for all layers and heads; it travels as a kernel's argument. Codebooks lie in
// one piece of device memory, where the caller copies `bytes`. All of it is immutable once made, so any thread and
// stream may read it.
#pragma once

#include <cstdint>
#include <vector>

#include "codecs/device/attend_params.h"
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

/// What attention reads beside pages of any format, and attention by many query tokens of those above too, where
/// MillionAny(format): head_dim 64 or 128, 64 tokens to a page.
struct MillionAnySide {
  static constexpr uint32_t kNoPlane = UINT32_MAX;
  uint32_t offset;          // of the strip in a head's record
  uint32_t bytes;           // of it, up to a multiple of 16
  uint32_t plane[kPlanes];  // offset in a strip, or kNoPlane
  uint32_t bits;            // of an index
  uint32_t width_log2;      // channels of a subspace are 1 << width_log2
  uint32_t codes;           // offset in those of the head
};
struct alignas(16) MillionAnyHead {
  float step[2][128];
  float mid[2][128];
  uint64_t codes;  // in MillionAnyLayer::codes: of either side [subspace][2^bits][width], each a code + 128
};
struct MillionAnyLayer {
  MillionAnySide side[2];
  uint32_t record_bytes;
  uint32_t shared_bytes;        // of a head's codes, where shared memory has room for them; else 0
  const MillionAnyHead* heads;  // [kv_heads]; on the device, as `codes`
  const uint8_t* codes;
};
bool MillionAny(const MillionFormat& format);
/// Of a head's record: what attention by many query tokens has room for.
inline constexpr uint32_t kPrefillRecordBytesMax = 8192;

/// AttendParams::codec where pages are of rotated K and V.
struct MillionSpace {
  device::MappedSpace space;
  const void* tables;  // MillionPairTables [kv_heads], or a MillionAnyLayer
};

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
  // Where MillionAny(format), else empty; pointers are the caller's to fill in.
  std::vector<uint8_t> any_codes;
  std::vector<MillionAnyHead> any_heads;    // [layer][kv_head]
  std::vector<MillionAnyLayer> any_layers;  // [layer]
};

MillionDeviceFormat MakeMillionDeviceFormat(const MillionFormat& format, const MillionTables& tables);

}  // namespace kvmanager::million
