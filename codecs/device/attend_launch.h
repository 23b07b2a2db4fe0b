// A kernel of paged attention, as a codec gives it: a plain table of functions, without CUDA's types.
#pragma once

#include "codecs/device/attend_params.h"

struct CUstream_st;  // a stream of CUDA's runtime

namespace kvmanager::device {

/// Blocks of threads that a plan is made for (attention/device_plan.h).
struct AttendGrid {
  int warps = 0;          // of a block
  int blocks_per_sm = 0;  // that run at once
};

/// Where pages cost other than AttendKernels::encoded_cost, as heads are of different sizes. A plan serves many layers,
/// whose costly heads are not the same ones, but whose costs in descending order are alike: so plans number heads by
/// their place in that order.
struct HeadCosts {
  /// [kv_heads] of an encoded page, by place, on the host; nullptr: encoded_cost. The same for all layers that share
  /// plans.
  const uint32_t* costs = nullptr;
  /// AttendParams::heads of a layer.
  const uint16_t* heads = nullptr;
};

struct AttendKernels {
  AttendGrid grid;
  /// What one head of an encoded page costs beside raw pages, which cost their bytes.
  uint32_t encoded_cost = 0;
  /// Starts `blocks` blocks on params.items; allocates nothing and does not wait. rows_max: of a tile, 1..kTileRows.
  /// Returns a cudaError_t: 0 if it was started.
  int (*launch)(const AttendParams& params, int rows_max, int blocks, CUstream_st* stream) = nullptr;
  /// Once per device, before the first launch. Returns a cudaError_t.
  int (*prepare)() = nullptr;
  /// Encoded pages stand in a space of their own: params.tokens and mapped are set, and `partial` is twice as large. A
  /// launch then writes all of `out`: other kernels' part of it comes behind.
  bool maps = false;
  /// Units (attend_device.cuh) of an encoded page, about.
  int encoded_units = 1;
};

}  // namespace kvmanager::device
