// Products of rows with a factor: raw K and V into the space that a codec stores, queries into it, outputs out of it.
//
// Pure functions of their arguments: any thread may call them; they allocate nothing and lock nothing. Factors are
// row-major [d][n], dense; d and n are multiples of 16, d at most PageLayout::kHeadDimMax.
#pragma once

#include <cstdint>

#include "codecs/cpu_isa.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager::zack {

/// out [tokens][n] = x [tokens][d] (raw elements of `dtype`, dense) times factor [d][n], in fp32. Each element is
/// summed over d in order from 0, multiplication and addition rounded apart, so the bits are equal on every instruction
/// set: for what is encoded. isa: at most what the processor runs.
void RotateRaw(const uint8_t* x, DType dtype, int tokens, int d, const float* factor, int n, float* out,
               Isa isa = BestIsa());

/// out [rows][n], rows `out_stride` floats apart, = x [rows][d], rows `x_stride` floats apart, times factor [d][n], in
/// fp32 with multiply-adds that may be fused: for queries and outputs. A row's bits do not depend on the rows beside
/// it.
void RotateRows(const float* x, int x_stride, int rows, int d, const float* factor, int n, float* out, int out_stride,
                Isa isa = BestIsa());

}  // namespace kvmanager::zack
