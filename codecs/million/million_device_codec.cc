#include "codecs/million/million_device_codec.h"

#include <cuda_runtime_api.h>

#include <utility>

#include "codecs/million/million_attention_cuda.h"
#include "codecs/million/million_device_format.h"
#include "codecs/million/million_encode_cuda.h"
#include "codecs/million/million_prefill_cuda.h"
#include "kvmanager/memory/device.h"

namespace kvmanager::million {
namespace {

/// Device memory with what a host array has. cudaFree would wait for every stream of the device.
class Uploaded {
 public:
  Uploaded() = default;
  Uploaded(Uploaded&& from) noexcept : data_(std::exchange(from.data_, nullptr)) {}
  ~Uploaded() {
    if (data_ != nullptr) cudaFreeAsync(data_, nullptr);
  }
  /// false: there is no memory, or a call failed.
  template <typename T>
  bool Copy(const std::vector<T>& from) {
    const size_t bytes = from.size() * sizeof(T);
    if (bytes == 0) return true;
    if (cudaMallocAsync(&data_, bytes, nullptr) == cudaSuccess &&
        cudaMemcpy(data_, from.data(), bytes, cudaMemcpyHostToDevice) == cudaSuccess) {
      return true;
    }
    cudaGetLastError();  // the next call that looks would take it for its own
    return false;
  }
  template <typename T>
  const T* as() const {
    return static_cast<const T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

/// All that a codec has on the device.
struct OnDevice {
  Uploaded codebooks, bytes, pairs, any_codes, any_heads, any_layers;
};

class MillionDeviceCodec final : public DeviceCodec {
 public:
  MillionDeviceCodec(const MillionDeviceShape& shape, OnDevice memory, const device::AttendKernels* attention)
      : shape_(shape), memory_(std::move(memory)), attention_(attention) {}

  const device::AttendKernels* attention(int) const override { return attention_; }
  const void* attention_data(int layer) const override {
    if (const auto* const pairs = memory_.pairs.as<MillionPairTables>(); pairs != nullptr) {
      return pairs + size_t(layer) * shape_.kv_heads;
    }
    const auto* const any = memory_.any_layers.as<MillionAnyLayer>();
    return any == nullptr ? nullptr : any + layer;
  }
  device::Prefill prefill(int layer) const override {
    if (memory_.any_layers.as<MillionAnyLayer>() == nullptr || shape_.record_bytes > kPrefillRecordBytesMax) return {};
    return {MillionPrefillKernels(shape_.head_dim), memory_.any_layers.as<MillionAnyLayer>() + layer, nullptr};
  }
  absl::Status Encode(const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                      CUstream_st* stream) const override {
    return CudaStatus(LaunchMillionEncode(shape_, memory_.codebooks.as<uint64_t>(), memory_.bytes.as<uint8_t>(), items,
                                          count, declined, stream),
                      "encoding MILLION pages");
  }
  absl::Status Decode(const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) const override {
    return CudaStatus(LaunchMillionDecode(shape_, memory_.codebooks.as<uint64_t>(), memory_.bytes.as<uint8_t>(), items,
                                          count, stream),
                      "decoding MILLION pages");
  }

 private:
  const MillionDeviceShape shape_;
  const OnDevice memory_;
  const device::AttendKernels* const attention_;
};

}  // namespace

std::unique_ptr<DeviceCodec> MakeMillionDeviceCodec(const MillionFormat& format, const MillionTables& tables) {
  MillionDeviceFormat made = MakeMillionDeviceFormat(format, tables);
  OnDevice memory;
  if (!memory.codebooks.Copy(made.codebooks) || !memory.bytes.Copy(made.bytes) || !memory.pairs.Copy(made.pairs) ||
      !memory.any_codes.Copy(made.any_codes) || !memory.any_heads.Copy(made.any_heads)) {
    return nullptr;
  }
  for (size_t layer = 0; layer < made.any_layers.size(); ++layer) {
    made.any_layers[layer].heads = memory.any_heads.as<MillionAnyHead>() + layer * format.layout.kv_heads;
    made.any_layers[layer].codes = memory.any_codes.as<uint8_t>();
  }
  if (!memory.any_layers.Copy(made.any_layers)) return nullptr;
  return std::make_unique<MillionDeviceCodec>(made.shape, std::move(memory), MillionAttentionKernels(format));
}

}  // namespace kvmanager::million
