#include "codecs/zack/rotation.h"

#include "codecs/zack/rotation_kernel.h"
#include "kvmanager/base/status.h"

namespace kvmanager::zack {
namespace {

const RotationKernels& KernelsOf(Isa isa) {
#if defined(__x86_64__)
  if (isa == Isa::kAvx512) return kRotationKernelsAvx512;
  if (isa == Isa::kAvx2) return kRotationKernelsAvx2;
#endif
  return kRotationKernelsPortable;
}

void Check(int d, int n) {
  KV_CHECK(d >= 16 && d % 16 == 0 && d <= PageLayout::kHeadDimMax);
  KV_CHECK(n >= 16 && n % 16 == 0);
}

}  // namespace

void RotateRaw(const uint8_t* x, DType dtype, int tokens, int d, const float* factor, int n, float* out, Isa isa) {
  Check(d, n);
  const RotationArguments arguments{x, size_t(d), tokens, d, factor, n, out, size_t(n)};
  const RotationKernels& kernels = KernelsOf(isa);
  switch (dtype) {
    case DType::kFloat16:
      return kernels.half(arguments);
    case DType::kBFloat16:
      return kernels.bfloat16(arguments);
    case DType::kFloat32:
      return kernels.apart(arguments);
  }
}

void RotateRows(const float* x, int x_stride, int rows, int d, const float* factor, int n, float* out, int out_stride,
                Isa isa) {
  Check(d, n);
  KernelsOf(isa).fused({x, size_t(x_stride), rows, d, factor, n, out, size_t(out_stride)});
}

}  // namespace kvmanager::zack
