#include <cuda_runtime_api.h>

#include <algorithm>

#include "codecs/zack/rotation_device.cuh"
#include "codecs/zack/zack_encode_cuda.h"

namespace kvmanager::zack {
namespace {

constexpr int kBlocksWanted = 132 * 6;  // that run at once, at most: a factor of 128 x 64 takes 32 KiB
constexpr int kZeroThreads = 256;
constexpr float kBeyondHalf = 65520;  // rounded to float16, this and more is infinite

/// A block's side of a head goes through its share of the pages, with the factor of the layer at hand in shared memory.
/// Blocks: [side][kv_head] x shares. body(item, side of the head, offset of raw rows, factor).
template <bool kBFloat16, class Item, class Body>
__device__ __forceinline__ void ForPages(const ZackDeviceShape& shape, const Item* items, uint32_t count, bool encodes,
                                         Body body) {
  extern __shared__ __align__(16) uint8_t factor[];
  const int heads = shape.layout.kv_heads, d = shape.layout.head_dim;
  const int side = blockIdx.x / heads, head = blockIdx.x % heads;
  const size_t raw_at = (size_t(side) * heads + head) * kRotatedTokens * d * 2;
  uint32_t loaded = UINT32_MAX;
  ZackDeviceSide of = {};
  for (uint32_t i = blockIdx.y; i < count; i += gridDim.y) {
    const Item item = items[i];
    if (item.layer != loaded) {
      loaded = item.layer;
      of = shape.sides[(size_t{loaded} * heads + head) * 2 + side];
      const int rank = static_cast<int>(of.rank);
      __syncthreads();
      LoadFactor(factor, shape.factors + (encodes ? of.encode : of.decode),
                 encodes ? FactorBytes<kBFloat16>(d, rank) : FactorBytes<kBFloat16>(rank, d));
      __syncthreads();
    }
    body(i, item, of, raw_at, factor);
  }
}

template <int kDim, bool kBFloat16>
__global__ void __launch_bounds__(kRotateThreads)
    EncodeKernel(const ZackDeviceShape shape, const DeviceEncodeItem* items, uint32_t count, uint32_t* declined) {
  ForPages<kBFloat16>(
      shape, items, count, true,
      [&](uint32_t i, const DeviceEncodeItem& item, const ZackDeviceSide& side, size_t raw_at, const uint8_t* factor) {
        const float most = RotateRows<kDim, kBFloat16, Out::kHalfOrInfinity>(
            item.raw + raw_at, kDim, item.encoded + side.offset, static_cast<int>(side.rank), factor);
        if (most >= kBeyondHalf) declined[i] = 1;
      });
}

template <int kDim, bool kToBFloat16>
__global__ void __launch_bounds__(kRotateThreads)
    DecodeKernel(const ZackDeviceShape shape, const DeviceDecodeItem* items, uint32_t count) {
  ForPages<false>(
      shape, items, count, false,
      [&](uint32_t, const DeviceDecodeItem& item, const ZackDeviceSide& side, size_t raw_at, const uint8_t* factor) {
        RotateRows<kDim, false, kToBFloat16 ? Out::kBFloat16 : Out::kHalf>(
            item.encoded + side.offset, static_cast<int>(side.rank), item.raw + raw_at, kDim, factor);
      });
}

/// Declined pages become zeros, once all their blocks have ended. Blocks: [item].
__global__ void __launch_bounds__(kZeroThreads)
    ZeroDeclinedKernel(const uint32_t* page_bytes, const DeviceEncodeItem* items, const uint32_t* declined) {
  if (declined[blockIdx.x] == 0) return;
  const DeviceEncodeItem item = items[blockIdx.x];
  for (uint32_t at = 16 * threadIdx.x; at < page_bytes[item.layer]; at += 16 * kZeroThreads) {
    *reinterpret_cast<uint4*>(item.encoded + at) = {0, 0, 0, 0};
  }
}

template <typename Kernel, typename... Arguments>
cudaError_t Launch(Kernel kernel, int shared_bytes, const ZackDeviceShape& shape, uint32_t count, cudaStream_t stream,
                   Arguments... arguments) {
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  if (error != cudaSuccess) return error;
  const uint32_t sides = 2u * shape.layout.kv_heads, shares = (kBlocksWanted + sides - 1) / sides;
  kernel<<<dim3(sides, std::min(count, shares)), kRotateThreads, shared_bytes, stream>>>(shape, arguments...);
  return cudaGetLastError();
}

template <int kDim>
cudaError_t Encode(const ZackDeviceShape& shape, const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                   cudaStream_t stream) {
  return shape.layout.dtype == DType::kBFloat16
             ? Launch(EncodeKernel<kDim, true>, shape.encode_bytes_max, shape, count, stream, items, count, declined)
             : Launch(EncodeKernel<kDim, false>, shape.encode_bytes_max, shape, count, stream, items, count, declined);
}
template <int kDim>
cudaError_t Decode(const ZackDeviceShape& shape, const DeviceDecodeItem* items, uint32_t count, cudaStream_t stream) {
  return shape.layout.dtype == DType::kBFloat16
             ? Launch(DecodeKernel<kDim, true>, shape.decode_bytes_max, shape, count, stream, items, count)
             : Launch(DecodeKernel<kDim, false>, shape.decode_bytes_max, shape, count, stream, items, count);
}

}  // namespace

int LaunchZackEncode(const ZackDeviceShape& shape, const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                     CUstream_st* stream) {
  if (count == 0) return cudaSuccess;
  cudaError_t error = cudaMemsetAsync(declined, 0, count * sizeof(uint32_t), stream);
  if (error != cudaSuccess) return error;
  error = shape.layout.head_dim == 128 ? Encode<128>(shape, items, count, declined, stream)
                                       : Encode<64>(shape, items, count, declined, stream);
  if (error != cudaSuccess) return error;
  ZeroDeclinedKernel<<<count, kZeroThreads, 0, stream>>>(shape.page_bytes, items, declined);
  return cudaGetLastError();
}

int LaunchZackDecode(const ZackDeviceShape& shape, const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) {
  if (count == 0) return cudaSuccess;
  return shape.layout.head_dim == 128 ? Decode<128>(shape, items, count, stream)
                                      : Decode<64>(shape, items, count, stream);
}

}  // namespace kvmanager::zack
