// The launches of attention by many query tokens where encoded pages stand in a space of their own: q is mapped before,
// outputs are brought together behind (zack_prefill_device.cuh).
#pragma once

#include "codecs/zack/zack_prefill_device.cuh"

namespace kvmanager::zack {

/// Pages: of PrefillLaunch; PrefillParams::format begins with a ZackPrefillLayer.
template <int kHeadDim, template <bool> class Pages>
struct MappedPrefill {
  template <bool kBFloat16>
  static constexpr auto kMap = device::ZackMapKernel<kHeadDim, kBFloat16>;
  template <bool kBFloat16, bool kFolds>
  static constexpr auto kExpand = device::ZackExpandKernel<kHeadDim, kBFloat16, kFolds>;
  template <bool kBFloat16>
  static constexpr int kFactorBytes = FactorBytes<kBFloat16>(kHeadDim, kHeadDim);

  template <bool kBFloat16, bool kFolds>
  static int Launch(const device::PrefillParams& params, int blocks, CUstream_st* stream) {
    const int rows = int(params.tokens) * (params.query_heads / params.kv_heads);
    const dim3 row_blocks(params.kv_heads, (rows + kRotatedTokens - 1) / kRotatedTokens);
    kMap<kBFloat16><<<row_blocks, kRotateThreads, kFactorBytes<kBFloat16>, stream>>>(params);
    int error = cudaPeekAtLastError();
    if (error == cudaSuccess) error = device::PrefillLaunch<kHeadDim, Pages>::Launch(params, blocks, stream);
    if (error != cudaSuccess) return error;
    kExpand<kBFloat16, kFolds><<<row_blocks, kRotateThreads, kFactorBytes<kFolds && kBFloat16>, stream>>>(params);
    return cudaPeekAtLastError();
  }
  template <bool kFolds>
  static int LaunchOf(const device::PrefillParams& params, int blocks, CUstream_st* stream) {
    return params.bfloat16 ? Launch<true, kFolds>(params, blocks, stream)
                           : Launch<false, kFolds>(params, blocks, stream);
  }
  template <bool kBFloat16>
  static int PrepareMaps() {
    const auto allow = [](auto kernel, int bytes) {
      return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    };
    cudaError_t error = allow(kMap<kBFloat16>, kFactorBytes<kBFloat16>);
    if (error == cudaSuccess) error = allow(kExpand<kBFloat16, false>, kFactorBytes<false>);
    if (error == cudaSuccess) error = allow(kExpand<kBFloat16, true>, kFactorBytes<kBFloat16>);
    return error;
  }
  static int Prepare() {
    int error = device::PrefillLaunch<kHeadDim, Pages>::Prepare();
    if (error == 0) error = PrepareMaps<false>();
    return error != 0 ? error : PrepareMaps<true>();
  }
  template <bool kFolds>
  static constexpr device::PrefillKernels kKernels = {LaunchOf<kFolds>, Prepare, true};
};

}  // namespace kvmanager::zack
