// What rotation.cc and its kernels, one object file per instruction set, say to each other: plain structs only.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kvmanager::zack {

struct RotationArguments {
  const void* x;  // [rows][d], of the kernel's type
  size_t x_stride;
  int rows;
  int d;
  const float* factor;  // [d][n]
  int n;
  float* out;  // [rows][n]
  size_t out_stride;
};

struct RotationKernels {
  void (*half)(const RotationArguments& arguments);      // multiply and add apart
  void (*bfloat16)(const RotationArguments& arguments);  // likewise
  void (*apart)(const RotationArguments& arguments);     // fp32 rows, likewise
  void (*fused)(const RotationArguments& arguments);     // fp32 rows
};

extern const RotationKernels kRotationKernelsPortable;
extern const RotationKernels kRotationKernelsAvx2;
extern const RotationKernels kRotationKernelsAvx512;

}  // namespace kvmanager::zack
