// Finds NaN and Inf in arrays that clients send, by the bits of their exponents.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kvmanager/base/page_layout.h"

namespace kvmanager {

namespace finite_internal {

template <typename Bits>
size_t Find(const uint8_t* data, size_t count, Bits exponent) {
  constexpr size_t kBlock = 1024 / sizeof(Bits);
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t n = std::min(kBlock, count - begin);
    Bits found = 0;
    // No exit inside a block: the loop vectorises.
    for (size_t i = 0; i < n; ++i) {
      Bits bits;
      std::memcpy(&bits, data + (begin + i) * sizeof bits, sizeof bits);
      found |= Bits((bits & exponent) == exponent);
    }
    if (found == 0) continue;
    for (size_t i = 0; i < n; ++i) {
      Bits bits;
      std::memcpy(&bits, data + (begin + i) * sizeof bits, sizeof bits);
      if ((bits & exponent) == exponent) return begin + i;
    }
  }
  return count;
}

}  // namespace finite_internal

/// Index of the first NaN or Inf among the `count` elements of `dtype` at `data` (any alignment), or `count`. Another
/// process may write to `data` meanwhile: the answer is then of some mixture, and no other byte is read.
inline size_t FindNonFinite(DType dtype, const void* data, size_t count) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  switch (dtype) {
    case DType::kFloat16:
      return finite_internal::Find<uint16_t>(bytes, count, 0x7c00);
    case DType::kBFloat16:
      return finite_internal::Find<uint16_t>(bytes, count, 0x7f80);
    case DType::kFloat32:
      return finite_internal::Find<uint32_t>(bytes, count, 0x7f800000);
  }
  return count;
}

}  // namespace kvmanager
