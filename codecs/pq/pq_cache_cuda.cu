// Copies of blocks in device memory: BlockCache::Update on a GPU, a block of threads for each KV head of a query, and
// the copying of what was admitted.
#include <cuda_runtime.h>

#include "codecs/pq/pq_device.h"

namespace kvmanager::pq {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32, kCopyThreads = 256;
constexpr unsigned kAll = 0xffffffffu;
constexpr unsigned long long kNone = ~0ull;

/// The least of all threads' keys.
__device__ unsigned long long LeastOfAll(unsigned long long key, unsigned long long* of_warps) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) {
    const unsigned long long other = __shfl_xor_sync(kAll, key, mask);
    key = other < key ? other : key;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = key;
  __syncthreads();
  for (int w = 0; w < kWarps; ++w) key = of_warps[w] < key ? of_warps[w] : key;
  return key;
}

/// Tokens chosen of a block, 0 once it was looked at.
__global__ void __launch_bounds__(kThreads) Update(const __grid_constant__ CacheParams p) {
  extern __shared__ uint32_t tokens_of[];  // [blocks_max]
  __shared__ unsigned long long of_warps[kWarps];
  __shared__ unsigned long long hits;
  const DeviceSelect& query = p.queries[blockIdx.x / p.shape.kv_heads];
  const int head = blockIdx.x % p.shape.kv_heads;
  DeviceCache& cache = p.caches[blockIdx.x];
  const uint32_t call = cache.call + 1;
  for (uint32_t i = threadIdx.x; i < p.blocks_max; i += kThreads) tokens_of[i] = 0;
  if (threadIdx.x == 0) hits = 0;
  __syncthreads();
  const uint32_t* const chosen = p.chosen + query.list + size_t(head) * query.list_stride;
  for (uint32_t i = threadIdx.x; i < query.chosen; i += kThreads) {
    atomicAdd(&tokens_of[chosen[i] / kDeviceBlockTokens], 1u);
  }
  __syncthreads();
  unsigned long long mine = 0;
  for (uint32_t i = threadIdx.x; i < p.slot_count; i += kThreads) {
    DeviceCacheSlot& slot = cache.slots[i];
    if (slot.uses == 0 || tokens_of[slot.block] == 0) continue;
    mine += tokens_of[slot.block];
    ++slot.uses;
    slot.last = call;
  }
  if (mine != 0) atomicAdd(&hits, mine);
  __syncthreads();
  if (threadIdx.x == 0) {
    cache.counts->hits += hits;
    cache.counts->misses += query.chosen - hits;
    cache.call = call;
  }
  // The blocks with the most tokens, ties to the lower; whole ones alone. Admitted ones that are in stay in.
  const uint32_t whole = min(p.blocks_max, (query.sinks + query.middle + query.local) / kDeviceBlockTokens);
  uint32_t copies = 0, evictions = 0;
  // Those that are in are marked first, as none of them may be a victim: twice over the same ranking.
  unsigned long long before = 0;  // the last one of the ranking that was looked at, as a key
  for (int pass = 0; pass < 2; ++pass) {
    before = 0;
    for (uint32_t n = 0; n < p.admitted_max; ++n) {
      unsigned long long key = kNone;
      for (uint32_t i = threadIdx.x; i < whole; i += kThreads) {
        if (tokens_of[i] == 0) continue;
        const unsigned long long of =
            (static_cast<unsigned long long>(kDeviceBlockTokens + 1 - tokens_of[i]) << 32) | i;
        if (of > before && of < key) key = of;
      }
      key = LeastOfAll(key, of_warps);
      if (key == kNone) break;
      before = key;
      const uint32_t block = uint32_t(key);
      if (cache.cached[block] != kNoUnit) {
        if (pass == 0) {
          for (uint32_t i = threadIdx.x; i < p.slot_count; i += kThreads) {
            if (cache.slots[i].uses != 0 && cache.slots[i].block == block) cache.slots[i].admitted = call;
          }
        }
        continue;
      }
      if (pass == 0) continue;
      // An empty slot, the first; or the one with the fewest uses, used longest ago (LFU), or used longest ago (LRU).
      // Keys of the first comparison; of those that are alike the last use, then the block.
      unsigned long long victim = kNone;
      for (uint32_t i = threadIdx.x; i < p.slot_count; i += kThreads) {
        const DeviceCacheSlot slot = cache.slots[i];
        if (slot.uses != 0 && slot.admitted == call) continue;
        const unsigned long long of = slot.uses == 0 ? 0
                                      : p.lru        ? slot.last
                                                     : (static_cast<unsigned long long>(slot.uses) << 32) | slot.last;
        victim = of < victim ? of : victim;
      }
      victim = LeastOfAll(victim, of_warps);
      unsigned long long place = kNone;
      for (uint32_t i = threadIdx.x; i < p.slot_count; i += kThreads) {
        const DeviceCacheSlot slot = cache.slots[i];
        if (slot.uses != 0 && slot.admitted == call) continue;
        const unsigned long long of = slot.uses == 0 ? 0
                                      : p.lru        ? slot.last
                                                     : (static_cast<unsigned long long>(slot.uses) << 32) | slot.last;
        if (of != victim) continue;
        const unsigned long long at = (static_cast<unsigned long long>(slot.uses == 0 ? 0 : slot.block) << 32) | i;
        place = at < place ? at : place;
      }
      place = LeastOfAll(place, of_warps);
      __syncthreads();
      if (threadIdx.x == 0) {
        DeviceCacheSlot& slot = cache.slots[uint32_t(place)];
        if (slot.uses != 0) {
          cache.cached[slot.block] = kNoUnit;
          ++evictions;
        }
        slot = {block, 1, call, call};
        const uint32_t pages = kDeviceBlockTokens / p.shape.page_tokens;
        const size_t page_units = size_t(4) * p.shape.kv_heads * p.shape.page_tokens * p.shape.head_dim / kRowUnitBytes;
        cache.cached[block] = cache.first_unit + uint32_t(uint32_t(place) * pages * page_units);
        cache.copies[1 + 2 * copies] = block;
        cache.copies[2 + 2 * copies] = uint32_t(place);
      }
      ++copies;
      __syncthreads();
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    cache.copies[0] = copies;
    cache.counts->evictions += evictions;
  }
}

/// blockIdx.x: KV head of a query; blockIdx.y: which of the admitted blocks.
__global__ void __launch_bounds__(kCopyThreads) Copy(const __grid_constant__ CacheParams p) {
  const DeviceSelect& query = p.queries[blockIdx.x / p.shape.kv_heads];
  const int head = blockIdx.x % p.shape.kv_heads;
  const DeviceCache& cache = p.caches[blockIdx.x];
  if (blockIdx.y >= cache.copies[0]) return;
  const uint32_t block = cache.copies[1 + 2 * blockIdx.y], place = cache.copies[2 + 2 * blockIdx.y];
  const uint32_t page_tokens = p.shape.page_tokens, pages = kDeviceBlockTokens / page_tokens;
  const size_t side_bytes = size_t(2) * page_tokens * p.shape.head_dim;
  const size_t page_bytes = 2 * p.shape.kv_heads * side_bytes;
  const auto at = [&](size_t unit) -> uint8_t* {
    return unit >= p.second_unit ? p.second + (unit - p.second_unit) * kRowUnitBytes
                                 : const_cast<uint8_t*>(p.pool) + unit * kRowUnitBytes;
  };
  for (uint32_t i = 0; i < pages; ++i) {
    const uint8_t* const from = at(p.slots[query.table + block * pages + i]);
    uint8_t* const to = at(cache.first_unit) + (size_t(place) * pages + i) * page_bytes;
    for (int side = 0; side < 2; ++side) {
      const size_t offset = (size_t(side) * p.shape.kv_heads + head) * side_bytes;
      for (size_t byte = threadIdx.x * size_t{16}; byte < side_bytes; byte += kCopyThreads * size_t{16}) {
        *reinterpret_cast<uint4*>(to + offset + byte) = *reinterpret_cast<const uint4*>(from + offset + byte);
      }
    }
  }
}

}  // namespace

int LaunchPqCacheUpdate(const CacheParams& params, CUstream_st* stream) {
  if (params.count == 0 || params.slot_count == 0) return 0;
  const uint32_t heads = params.count * params.shape.kv_heads;
  const size_t bytes = size_t{params.blocks_max} * 4;
  if (params.blocks_max > kCacheBlocksOfContext) return cudaErrorInvalidValue;
  if (bytes > 48 * 1024 - 1024) {
    const int error = cudaFuncSetAttribute(Update, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
    if (error != 0) return error;
  }
  Update<<<heads, kThreads, bytes, stream>>>(params);
  const int error = cudaPeekAtLastError();
  if (error != 0) return error;
  Copy<<<dim3(heads, params.admitted_max), kCopyThreads, 0, stream>>>(params);
  return cudaPeekAtLastError();
}

}  // namespace kvmanager::pq
