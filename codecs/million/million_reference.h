// The readable reference of MILLION: encoder, decoder and attention as plain loops.
//
// Tests compare the fast paths with it: encoded bytes bit by bit, attention within rounding. Nothing else uses it. Free
// functions over values, so any thread may call them. The encoder's arithmetic is IEEE fp32 with round to nearest even
// and no contraction (this library is built with -ffp-contract=off), which every fast path repeats exactly.
#pragma once

#include <cstdint>
#include <vector>

#include "codecs/million/million_codebooks.h"
#include "codecs/million/million_format.h"
#include "codecs/page_attention.h"

namespace kvmanager::million {

/// The nearest centroid of x [width], the lowest index of several: the smallest of
///   |y_i|^2 / 2 - x' . y_i,  x'_c = x_c - mid_c,  y_ic = step_c * code_ic,
/// (half the squared distance less what all centroids share; MILLION, section III-A) in fp32: the norm's squares are
/// added in order of channels and halved, then each product is subtracted in that order. Comparisons with NaN are
/// false.
int NearestCentroid(const MillionFormat& format, const SideTable& table, int side, int subspace, const float* x);

void ReferenceEncode(const MillionFormat& format, const MillionTables& tables, const uint8_t* raw, int layer,
                     uint8_t* encoded);

/// What a page's indices of one head and side stand for: [page_tokens][head_dim] of mid + step * code, not rounded
/// further.
std::vector<float> ReferenceValues(const MillionFormat& format, const MillionTables& tables, const uint8_t* encoded,
                                   int layer, int head, int side);

/// What is rounded of q, before and after it is multiplied by K's steps, and of P.
enum class Rounding {
  kNothing,
  kCpu,  // q and P as million_attention.h says
  kGpu,  // P likewise; q to 1 / (127 * 256) of its largest product with a step
};

/// Attention with the kernels' rounding of q and P, and everything else in fp64; with kNothing, attention on
/// ReferenceValues in fp64.
void ReferenceAttend(const MillionFormat& format, const MillionTables& tables, const PageAttentionTask& task,
                     Rounding rounding, const SoftmaxRows& state);

}  // namespace kvmanager::million
