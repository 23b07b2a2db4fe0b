// attention_gpu_bench --check: the kernels' results at the benchmark's own shapes against attention in double precision
// (gpu_oracle.h): relative L2 of a shape's rows.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "attention/gpu_bench_batch.h"

namespace kvmanager {

/// What is done wrong on purpose, in the double-precision side, to see that the comparison notices.
enum class Spoil { kNothing, kLag, kCodes };

/// Compares every shape of `grid` with the codecs, and some with bfloat16, head_dim 64, several queries and the other
/// codecs that have kernels; prints the worst of each class of shapes. The number of bounds that were broken.
int CheckAttention(absl::Span<const BenchShape> grid, absl::Span<const BenchCodec> codecs, absl::Span<uint8_t> pool,
                   int multiprocessors, Spoil spoil);

}  // namespace kvmanager
