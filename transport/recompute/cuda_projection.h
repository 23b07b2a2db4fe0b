// What is done to the products of activations and weights on a GPU: bias, rotation of K, one rounding, the way to the
// pages, and a look at whether all is finite.
//
// Enqueues only; any thread for which the stream's device is current. Lists are taken over at once, device memory stays
// until the stream has passed.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "transport/recompute/executor.h"

struct CUstream_st;

namespace kvmanager::recompute {

/// Device memory of these shapes; rows are those of all pages, one page behind the other.
struct StoreBuffers {
  const double* frequencies = nullptr;  // [rotary_dims / 2], as RopeFacts has them
  float* angles = nullptr;              // [rows][rotary_dims / 2][cos, sin]: scratch
  const float* products = nullptr;      // [rows][side: K, V][kv_heads * head_dim]
  const float* bias = nullptr;          // [side][kv_heads * head_dim], or nullptr
};

/// Loads the kernels, which would else wait for the device at their first launch. Errors: UNAVAILABLE.
absl::Status LoadStoreKernels();

/// Fills buffers.angles for the rows of `pages`. model: checked. Errors: UNAVAILABLE.
absl::Status EnqueueAngles(const ProjectionModel& model, absl::Span<const PageRows> pages, const StoreBuffers& buffers,
                           CUstream_st* stream);

/// Writes K and V to the pages, in memory that the device can write, aligned to elements. *not_finite (pinned host
/// memory) becomes a NotFiniteCode of one of the elements that are not finite, if there are any. Errors: UNAVAILABLE.
absl::Status EnqueueStore(const ProjectionModel& model, absl::Span<const PageRows> pages, const StoreBuffers& buffers,
                          int64_t* not_finite, CUstream_st* stream);

/// Of an element: its row among those of all pages, side and head.
struct NotFiniteCode {
  static constexpr int64_t kRow = 2 * int64_t{PageLayout::kKvHeadsMax};
  static int64_t row(int64_t code) { return code / kRow; }
  static int side(int64_t code) { return int(code % kRow) / PageLayout::kKvHeadsMax; }
  static int head(int64_t code) { return int(code % kRow) % PageLayout::kKvHeadsMax; }
};

}  // namespace kvmanager::recompute
