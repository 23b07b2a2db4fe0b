// The immutable shape of a cache's pages. A plain struct: it copies, and the device can read it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvmanager {

/// Element type of raw K and V (float16, bfloat16), and of queries and outputs (all three).
enum class DType : uint8_t { kFloat16 = 0, kBFloat16 = 1, kFloat32 = 2 };

constexpr size_t DTypeBytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

/// A page is `page_tokens` tokens of one layer, K and V, all KV heads of this shard.
/// Its raw form is [side: K, V][kv_heads][page_tokens][head_dim] of `dtype`, dense: head-major, so that one head's
/// K is one contiguous run, as it is in every encoded form.
struct PageLayout {
  static constexpr int kPageTokensMin = 16;
  static constexpr int kPageTokensMax = 256;
  static constexpr int kKvHeadsMax = 256;
  static constexpr int kHeadDimMin = 16;
  static constexpr int kHeadDimMax = 256;  // a multiple of 16

  DType dtype = DType::kFloat16;  // kFloat16 or kBFloat16
  uint16_t kv_heads = 0;          // 1..kKvHeadsMax
  uint16_t head_dim = 0;          // d
  uint16_t page_tokens = 64;      // kPageTokensMin..kPageTokensMax, a multiple of 16

  /// Bytes of one head's K, or V, of one raw page.
  constexpr size_t raw_head_bytes() const { return size_t{page_tokens} * head_dim * DTypeBytes(dtype); }
  /// Bytes of one raw page.
  constexpr size_t raw_bytes() const { return 2 * kv_heads * raw_head_bytes(); }
  /// Byte offset of (side 0 = K or 1 = V, head, token) in a raw page.
  constexpr size_t raw_offset(int side, int head, int token) const {
    return (size_t(side) * kv_heads + head) * raw_head_bytes() + size_t(token) * head_dim * DTypeBytes(dtype);
  }
  friend bool operator==(const PageLayout&, const PageLayout&) = default;
};

}  // namespace kvmanager
