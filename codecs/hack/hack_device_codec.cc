#include "codecs/hack/hack_device_codec.h"

#include <cuda_runtime_api.h>

#include <utility>

#include "codecs/hack/hack_attention_cuda.h"
#include "codecs/hack/hack_device_format.h"
#include "codecs/hack/hack_encode_cuda.h"
#include "codecs/hack/hack_prefill_cuda.h"
#include "kvmanager/memory/device.h"

namespace kvmanager::hack {
namespace {

class HackDeviceCodec final : public DeviceCodec {
 public:
  HackDeviceCodec(const HackDeviceShape& shape, HackDeviceHead* heads, const device::AttendKernels* attention,
                  const device::PrefillKernels* prefill)
      : shape_(shape), heads_(heads), attention_(attention), prefill_(prefill) {}
  // cudaFree would wait for every stream of the device.
  ~HackDeviceCodec() override { cudaFreeAsync(heads_, nullptr); }

  const device::AttendKernels* attention(int) const override { return attention_; }
  device::Prefill prefill(int) const override { return {prefill_, heads_}; }
  absl::Status Encode(const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                      CUstream_st* stream) const override {
    return CudaStatus(LaunchHackEncode(shape_, heads_, items, count, declined, stream), "encoding HACK pages");
  }
  absl::Status Decode(const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) const override {
    return CudaStatus(LaunchHackDecode(shape_, heads_, items, count, stream), "decoding HACK pages");
  }

 private:
  const HackDeviceShape shape_;
  HackDeviceHead* const heads_;  // owned; on the device
  const device::AttendKernels* const attention_;
  const device::PrefillKernels* const prefill_;
};

}  // namespace

std::unique_ptr<DeviceCodec> MakeHackDeviceCodec(const HackFormat& format) {
  const HackDeviceFormat made = MakeHackDeviceFormat(format);
  const size_t bytes = made.heads.size() * sizeof made.heads[0];
  void* heads = nullptr;
  if (cudaMallocAsync(&heads, bytes, nullptr) != cudaSuccess) {
    cudaGetLastError();  // the next call that looks would take it for its own
    return nullptr;
  }
  if (cudaMemcpy(heads, made.heads.data(), bytes, cudaMemcpyHostToDevice) != cudaSuccess) {
    cudaGetLastError();
    cudaFreeAsync(heads, nullptr);
    return nullptr;
  }
  return std::make_unique<HackDeviceCodec>(made.shape, static_cast<HackDeviceHead*>(heads),
                                           HackAttentionKernels(format), HackPrefillKernels(made));
}

}  // namespace kvmanager::hack
