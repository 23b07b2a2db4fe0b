#include <cuda_runtime.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/paged_copy.h"

namespace kvmanager {
namespace {

constexpr uint32_t kThreads = 256;
constexpr uint32_t kWord = sizeof(uint4);

// A block of threads copies the rows of one head of K or V of one page: they lie beside one another in the raw page.
template <bool kIntoCache>
__global__ void __launch_bounds__(kThreads)
    CopyPaged(const PagedShape shape, const PagedLayer* __restrict__ layers, const PagedBlocks blocks) {
  const uint32_t of_head = blockIdx.x, head = of_head % shape.heads, side = of_head / shape.heads % 2;
  const uint32_t page = of_head / shape.heads / 2, layer = page % shape.layers, block = page / shape.layers;
  const PagedLayer& to = layers[layer];
  const int64_t id = blocks.ids[to.group * blocks.ids_stride + block];
  if (id == 0) return;
  const uint32_t words = shape.row_bytes / kWord, all = shape.tokens * words;
  uint4* const raw = reinterpret_cast<uint4*>(blocks.raw) + uint64_t{of_head} * all;
  uint8_t* const cache = to.side[side] + id * shape.block_stride + head * shape.head_stride;
  for (uint32_t i = threadIdx.x; i < all; i += kThreads) {
    const uint32_t token = i / words;
    uint8_t* const row =
        cache + token / shape.piece_tokens * shape.piece_stride + token % shape.piece_tokens * shape.token_stride;
    uint4* const word = reinterpret_cast<uint4*>(row) + i % words;
    if (kIntoCache) {
      *word = raw[i];
    } else {
      raw[i] = *word;
    }
  }
}

bool InWords(int64_t bytes) { return bytes % kWord == 0; }

}  // namespace

absl::Status EnqueuePagedCopy(const PagedShape& shape, const PagedLayer* layers, const PagedBlocks& blocks,
                              bool into_cache, CUstream_st* stream) {
  if (shape.layers == 0 || shape.heads == 0 || shape.tokens == 0 || shape.piece_tokens == 0 || shape.row_bytes == 0 ||
      !InWords(shape.row_bytes) || !InWords(shape.block_stride) || !InWords(shape.piece_stride) ||
      !InWords(shape.token_stride) || !InWords(shape.head_stride)) {
    return InvalidField("paged cache (row and strides)",
                        absl::StrCat(shape.row_bytes, ", ", shape.block_stride, ", ", shape.piece_stride, ", ",
                                     shape.token_stride, ", ", shape.head_stride),
                        "multiples of 16 bytes");
  }
  const uint64_t heads = uint64_t{blocks.count} * shape.layers * 2 * shape.heads;
  if (heads > INT32_MAX) return InvalidField("blocks to copy", blocks.count, "at most 2^31 heads of pages");
  if (heads == 0) return absl::OkStatus();
  PagedShape of = shape;
  PagedBlocks copied = blocks;
  void* arguments[] = {&of, &layers, &copied};
  const void* const kernel =
      into_cache ? reinterpret_cast<const void*>(CopyPaged<true>) : reinterpret_cast<const void*>(CopyPaged<false>);
  return CudaStatus(cudaLaunchKernel(kernel, dim3(static_cast<unsigned>(heads)), dim3(kThreads), arguments, 0, stream),
                    "cudaLaunchKernel of a paged cache");
}

}  // namespace kvmanager
