// What kernels read of ZACK's pages beside the pages: plain structs, the same for host and device.
#pragma once

#include <cstdint>

namespace kvmanager::zack {

constexpr int kDevicePageTokens = 64;
/// What a warp attends to at once has at most these bytes: 16 tokens of a head that keeps 128 dimensions on both sides.
constexpr uint32_t kUnitBytes = 8192;

/// One head of a layer's pages, for attention: K' [64][rank], then V'.
struct alignas(16) ZackDeviceHead {
  uint32_t offset;         // of K' in the page
  uint16_t chunks[2];      // of 16 bytes in a row of K', of V': rank / 8
  uint16_t reciprocal[2];  // 65536 / chunks, rounded up: n / chunks is n * reciprocal >> 16 for n below 4096
  uint32_t unit_log2;      // tokens that a warp attends to at once are 16 << unit_log2
};

constexpr ZackDeviceHead MakeZackDeviceHead(uint32_t offset, int k_rank, int v_rank) {
  ZackDeviceHead head = {};
  head.offset = offset;
  const int ranks[2] = {k_rank, v_rank};
  for (int side = 0; side < 2; ++side) {
    head.chunks[side] = uint16_t(ranks[side] / 8);
    head.reciprocal[side] = uint16_t((65536 + head.chunks[side] - 1) / head.chunks[side]);
  }
  while (head.unit_log2 < 2 && (uint32_t(k_rank + v_rank) * 32 << (head.unit_log2 + 1)) <= kUnitBytes) ++head.unit_log2;
  return head;
}

/// One side of one head of a layer, for encoding and decoding.
struct ZackDeviceSide {
  uint32_t offset;  // in the page
  uint32_t rank;
  uint64_t encode, decode;  // packed factors (rotation_cuda.h), from the codec's first byte on the device
};

/// A layer, for attention by many query tokens; pointers are the device's.
struct ZackPrefillLayer {
  const ZackDeviceHead* heads;  // [kv_heads]
  const ZackDeviceSide* sides;  // [kv_heads][side]
  const uint8_t* base;          // what sides count from
  const uint8_t* query;         // [kv_heads] packed factors of q, of elements of the cache's dtype
  uint64_t query_bytes;         // from one to the next
};

}  // namespace kvmanager::zack
