// HackFormat as a GPU reads it: plain structs without containers, made once per cache on the host.
//
// HackDeviceShape is what is the same for all heads; it travels as a kernel's argument. HackDeviceHead is one head's
// record; a table of them lies in device memory, where the caller copies it. Both are immutable once made, so any
// thread and stream may read them. Offsets and widths mean what they mean in hack_format.h.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "codecs/hack/hack_format.h"

#if defined(__CUDACC__)
#define KV_HACK_HOST_DEVICE __host__ __device__
#else
#define KV_HACK_HOST_DEVICE
#endif

namespace kvmanager::hack {

/// One side of one head. Offsets are bytes from the start of the head's record.
struct HackDeviceSide {
  uint8_t segment_bits[kSegmentsMax];
  uint16_t segment_offset[kSegmentsMax];  // from the start of the strip's codes
  uint32_t least_squares;                 // bit s: segment s takes the least-squares range
  uint32_t strip_bytes;
  uint32_t begin;  // of what this side writes: its arrays, and the padding behind them up to `end`
  uint32_t codes;
  uint32_t tops;  // of 8-bit metadata, or norm_top alone
  uint32_t steps;
  uint32_t minima;
  uint32_t sums;      // 0: not stored
  uint32_t norms;     // likewise
  uint32_t norm_top;  // likewise
  uint32_t end;       // the next side's begin, or the end of the record: a multiple of 16
};

struct HackDeviceHead {
  uint64_t offset;  // of the record in the page
  HackDeviceSide side[2];
};

/// Which kernel encodes, or decodes, a side.
enum class HackDevicePath : uint8_t {
  kGeneral,  // any parameters
  kStrip,    // partitions of 64 tokens in pages of 64, head_dim 64 or 128, rounded to nearest
  kFitted,   // the same, and some range is a least-squares one
};

struct HackDeviceShape {
  uint32_t page_bytes;
  uint32_t strip_bytes_max;  // what one side of one head writes at most
  uint16_t kv_heads;
  uint16_t head_dim;
  uint16_t page_tokens;
  uint16_t partition;
  float rotation_norm;  // 1 / sqrt(head_dim)
  bool is_bfloat16;
  bool k_along_tokens;  // k_axis=channel
  bool meta8;
  bool stochastic;
  bool hadamard;             // K and V are rotated
  HackDevicePath encode[2];  // per side
  bool decode_by_strip[2];   // the fast decoder's conditions hold
  bool in_rows[2];           // a side's rows are rotated, or have norms: the fast paths work on them as floats
  /// Heads of a layer in the table, where layers differ in their widths: it is then [layers][kv_heads]. 0: all are
  /// alike.
  uint32_t layer_heads;

  KV_HACK_HOST_DEVICE const HackDeviceHead* heads_of(const HackDeviceHead* table, uint32_t layer) const {
    return table + size_t{layer} * layer_heads;
  }
  KV_HACK_HOST_DEVICE uint32_t bytes_of(const HackDeviceHead* of_layer) const {
    return layer_heads == 0 ? page_bytes : uint32_t(of_layer[kv_heads - 1].offset + of_layer[kv_heads - 1].side[1].end);
  }
  KV_HACK_HOST_DEVICE uint32_t side_raw_bytes() const { return 2u * page_tokens * head_dim; }
  /// Bytes of (side, head) from the start of a raw page.
  KV_HACK_HOST_DEVICE uint64_t raw_offset(int side, int head) const {
    return (uint64_t(side) * kv_heads + head) * side_raw_bytes();
  }
};

struct HackDeviceFormat {
  HackDeviceShape shape;
  std::vector<HackDeviceHead> heads;  // [kv_heads]; on the host: the caller copies them to the device
};

HackDeviceFormat MakeHackDeviceFormat(const HackFormat& format);
/// Of a codec whose layers differ in nothing but widths: heads are [layers][kv_heads].
HackDeviceFormat MakeHackDeviceFormat(absl::Span<const HackFormat* const> layers);

}  // namespace kvmanager::hack
