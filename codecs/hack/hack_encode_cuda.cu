#include <cuda_runtime_api.h>

#include "codecs/hack/hack_encode_cuda.h"
#include "codecs/hack/hack_encode_general_device.cuh"
#include "codecs/hack/hack_encode_strip_device.cuh"

namespace kvmanager::hack {
namespace {

constexpr int kZeroThreads = 256;
constexpr size_t kDefaultSharedBytes = 48 * 1024;  // a kernel that wants more asks for it

/// Declined pages become zeros, once all their blocks have ended. Blocks: [item].
__global__ void __launch_bounds__(kZeroThreads)
    ZeroDeclinedKernel(const HackDeviceShape shape, const HackDeviceHead* __restrict__ heads,
                       const DeviceEncodeItem* __restrict__ items, const uint32_t* __restrict__ declined) {
  if (declined[blockIdx.x] == 0) return;
  const uint32_t page_bytes = shape.bytes_of(shape.heads_of(heads, items[blockIdx.x].layer));
  uint8_t* const page = items[blockIdx.x].encoded;
  for (uint32_t at = 16 * threadIdx.x; at < page_bytes; at += 16 * kZeroThreads) {
    *reinterpret_cast<uint4*>(page + at) = {0, 0, 0, 0};
  }
}

struct EncodeLaunch {
  const HackDeviceShape& shape;
  const HackDeviceHead* heads;
  const DeviceEncodeItem* items;
  uint32_t count;
  uint32_t* declined;
  cudaStream_t stream;

  template <int kDim, bool kBFloat16, bool kFit, bool kInRows>
  cudaError_t Strips(int first_side, int sides) const {
    const auto kernel = device::EncodeStripKernel<kDim, kBFloat16, kFit, kInRows>;
    size_t bytes = shape.strip_bytes_max;
    if constexpr (kInRows) {
      bytes += sizeof(float) * device::StripRows<kDim>::kFloats;
      const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(bytes));
      if (error != cudaSuccess) return error;
    }
    kernel<<<count * shape.kv_heads * sides, kDim, bytes, stream>>>(shape, heads, items, declined, first_side, sides);
    return cudaGetLastError();
  }
  template <int kDim, bool kBFloat16>
  cudaError_t Strips(bool fit, int first_side, int sides) const {
    if (shape.in_rows[first_side]) {
      return fit ? Strips<kDim, kBFloat16, true, true>(first_side, sides)
                 : Strips<kDim, kBFloat16, false, true>(first_side, sides);
    }
    return fit ? Strips<kDim, kBFloat16, true, false>(first_side, sides)
               : Strips<kDim, kBFloat16, false, false>(first_side, sides);
  }

  cudaError_t General(int side) const {
    const device::GeneralShape g(shape, side);
    const auto kernel = shape.is_bfloat16 ? device::EncodeGeneralKernel<true> : device::EncodeGeneralKernel<false>;
    if (g.shared_bytes() > kDefaultSharedBytes) {
      const cudaError_t error =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(g.shared_bytes()));
      if (error != cudaSuccess) return error;
    }
    kernel<<<count * shape.kv_heads * g.chunks, device::kGeneralThreads, g.shared_bytes(), stream>>>(
        shape, heads, items, declined, side);
    return cudaGetLastError();
  }

  cudaError_t Sides(HackDevicePath path, int first_side, int sides) const {
    if (path == HackDevicePath::kGeneral) {
      for (int side = first_side; side < first_side + sides; ++side) {
        if (const cudaError_t error = General(side); error != cudaSuccess) return error;
      }
      return cudaSuccess;
    }
    const bool fit = path == HackDevicePath::kFitted;
    if (shape.head_dim == 128) {
      return shape.is_bfloat16 ? Strips<128, true>(fit, first_side, sides) : Strips<128, false>(fit, first_side, sides);
    }
    return shape.is_bfloat16 ? Strips<64, true>(fit, first_side, sides) : Strips<64, false>(fit, first_side, sides);
  }
};

}  // namespace

int LaunchHackEncode(const HackDeviceShape& shape, const HackDeviceHead* heads, const DeviceEncodeItem* items,
                     uint32_t count, uint32_t* declined, CUstream_st* stream) {
  if (count == 0) return cudaSuccess;
  cudaError_t error = cudaMemsetAsync(declined, 0, count * sizeof(uint32_t), stream);
  if (error != cudaSuccess) return error;
  const EncodeLaunch launch = {shape, heads, items, count, declined, stream};
  if (shape.encode[0] == shape.encode[1] && shape.in_rows[0] == shape.in_rows[1]) {
    error = launch.Sides(shape.encode[0], 0, 2);
  } else {
    error = launch.Sides(shape.encode[0], 0, 1);
    if (error == cudaSuccess) error = launch.Sides(shape.encode[1], 1, 1);
  }
  if (error != cudaSuccess) return error;
  ZeroDeclinedKernel<<<count, kZeroThreads, 0, stream>>>(shape, heads, items, declined);
  return cudaGetLastError();
}

}  // namespace kvmanager::hack
