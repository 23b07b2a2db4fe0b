// float16 and bfloat16 as bits, one value at a time, exact (round to nearest even). Kernels have their own wide
// versions.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>

#include "kvmanager/base/page_layout.h"

namespace kvmanager {

inline float HalfToFloat(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16;
  const uint32_t rest = h & 0x7fff;
  if (rest >= 0x7c00) return std::bit_cast<float>(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest < 0x0400) return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(float(rest) * 0x1p-24f));
  return std::bit_cast<float>(sign | ((rest << 13) + 0x38000000));
}

/// Overflow gives infinity; NaN stays NaN.
inline uint16_t FloatToHalf(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  const uint16_t sign = uint16_t(bits >> 16 & 0x8000);
  const uint32_t rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return sign | 0x7e00;
  if (rest >= 0x477ff000) return sign | 0x7c00;  // at least 65520 rounds to infinity
  if (rest < 0x38800000) {                       // below 2^-14: the float unit rounds to a multiple of 2^-24
    const float shifted = std::bit_cast<float>(rest) + 0.5f;
    return sign | uint16_t(std::bit_cast<uint32_t>(shifted) - 0x3f000000);
  }
  return sign | uint16_t((rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13);
}

inline float BFloat16ToFloat(uint16_t b) { return std::bit_cast<float>(uint32_t(b) << 16); }

inline uint16_t FloatToBFloat16(float f) {
  const uint32_t bits = std::bit_cast<uint32_t>(f);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 0x40);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/// Element `i` of an array of `dtype` at `data`.
inline float LoadElement(const void* data, DType dtype, size_t i) {
  if (dtype == DType::kFloat32) {
    float f;
    std::memcpy(&f, static_cast<const char*>(data) + 4 * i, 4);
    return f;
  }
  uint16_t bits;
  std::memcpy(&bits, static_cast<const char*>(data) + 2 * i, 2);
  return dtype == DType::kFloat16 ? HalfToFloat(bits) : BFloat16ToFloat(bits);
}

inline void StoreElement(void* data, DType dtype, size_t i, float f) {
  if (dtype == DType::kFloat32) {
    std::memcpy(static_cast<char*>(data) + 4 * i, &f, 4);
    return;
  }
  const uint16_t bits = dtype == DType::kFloat16 ? FloatToHalf(f) : FloatToBFloat16(f);
  std::memcpy(static_cast<char*>(data) + 2 * i, &bits, 2);
}

}  // namespace kvmanager
