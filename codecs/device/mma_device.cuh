// A warp's product of 16-bit floats on matrix units: d += a b, 16 x 16 and 16 x 8 elements, in fp32.
#pragma once

#include <cstdint>

namespace kvmanager::device {

template <bool kBFloat16>
__device__ __forceinline__ void Multiply(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (kBFloat16) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}
template <bool kBFloat16>
__device__ __forceinline__ void Multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Multiply<kBFloat16>(d, a, b[0], b[1]);
}

}  // namespace kvmanager::device
