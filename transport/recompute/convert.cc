#include "transport/recompute/convert.h"

#include <cstdint>
#include <cstring>

#include "kvmanager/base/f16c.h"
#include "kvmanager/base/half.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvmanager::recompute {
namespace {

constexpr size_t kLanes = 8;

#if defined(__x86_64__)
bool HasF16c() {
  static const bool has = __builtin_cpu_supports("avx2") && CpuHasF16c();
  return has;
}

// Both return how many elements they have converted: all whole vectors.
__attribute__((target("avx2,f16c"))) size_t WidenF16c(const uint8_t* from, size_t count, float* to) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i))));
  }
  return i;
}

__attribute__((target("avx2,f16c"))) size_t NarrowF16c(const float* from, size_t count, uint8_t* to) {
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + 2 * i),
                     _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  }
  return i;
}
#else
bool HasF16c() { return false; }
size_t WidenF16c(const uint8_t*, size_t, float*) { return 0; }
size_t NarrowF16c(const float*, size_t, uint8_t*) { return 0; }
#endif

}  // namespace

void Widen(const void* from, DType dtype, size_t count, float* to) {
  const auto* bytes = static_cast<const uint8_t*>(from);
  size_t i = dtype == DType::kFloat16 && HasF16c() ? WidenF16c(bytes, count, to) : 0;
  if (dtype == DType::kFloat32) {
    if (count > 0) std::memcpy(to, from, 4 * count);
    return;
  }
  if (dtype == DType::kBFloat16) {  // its own loop: it vectorises
    for (; i < count; ++i) {
      uint16_t bits;
      std::memcpy(&bits, bytes + 2 * i, 2);
      to[i] = BFloat16ToFloat(bits);
    }
    return;
  }
  for (; i < count; ++i) to[i] = LoadElement(from, dtype, i);
}

void Narrow(const float* from, size_t count, DType dtype, void* to) {
  size_t i = dtype == DType::kFloat16 && HasF16c() ? NarrowF16c(from, count, static_cast<uint8_t*>(to)) : 0;
  for (; i < count; ++i) StoreElement(to, dtype, i, from[i]);
}

}  // namespace kvmanager::recompute
