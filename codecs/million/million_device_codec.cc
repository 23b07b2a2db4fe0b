#include "codecs/million/million_device_codec.h"

#include <utility>

#include "codecs/million/million_attention_cuda.h"
#include "codecs/million/million_device_format.h"
#include "codecs/million/million_encode_cuda.h"
#include "codecs/million/million_prefill_cuda.h"
#include "kvmanager/memory/device_memory.h"

namespace kvmanager::million {
namespace {

/// All that a codec has on the device; nullptr: what this format does without.
struct OnDevice {
  DeviceArray<uint64_t> codebooks;
  DeviceArray<uint8_t> bytes;
  DeviceArray<MillionPairTables> pairs;
  DeviceArray<uint8_t> any_codes;
  DeviceArray<MillionAnyHead> any_heads;
  DeviceArray<MillionAnyLayer> any_layers;
};

/// False: there is no memory, or a call failed.
template <typename T>
bool Upload(const std::vector<T>& from, DeviceArray<T>* to) {
  if (from.empty()) return true;
  auto memory = AllocateOnDevice<T>(from.size(), nullptr);
  if (!memory.ok()) return false;
  *to = *std::move(memory);
  return CopyToDevice(from, to->get()).ok();
}

class MillionDeviceCodec final : public DeviceCodec {
 public:
  MillionDeviceCodec(const MillionDeviceShape& shape, OnDevice memory, const device::AttendKernels* attention)
      : shape_(shape), memory_(std::move(memory)), attention_(attention) {}

  const device::AttendKernels* attention(int) const override { return attention_; }
  const void* attention_data(int layer) const override {
    if (memory_.pairs != nullptr) return memory_.pairs.get() + size_t(layer) * shape_.kv_heads;
    return memory_.any_layers == nullptr ? nullptr : memory_.any_layers.get() + layer;
  }
  device::Prefill prefill(int layer) const override {
    if (memory_.any_layers == nullptr || shape_.record_bytes > kPrefillRecordBytesMax) return {};
    return {MillionPrefillKernels(shape_.head_dim), memory_.any_layers.get() + layer, nullptr};
  }
  absl::Status Encode(const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                      CUstream_st* stream) const override {
    return CudaStatus(
        LaunchMillionEncode(shape_, memory_.codebooks.get(), memory_.bytes.get(), items, count, declined, stream),
        "encoding MILLION pages");
  }
  absl::Status Decode(const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) const override {
    return CudaStatus(LaunchMillionDecode(shape_, memory_.codebooks.get(), memory_.bytes.get(), items, count, stream),
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
  if (!Upload(made.codebooks, &memory.codebooks) || !Upload(made.bytes, &memory.bytes) ||
      !Upload(made.pairs, &memory.pairs) || !Upload(made.any_codes, &memory.any_codes) ||
      !Upload(made.any_heads, &memory.any_heads)) {
    return nullptr;
  }
  for (size_t layer = 0; layer < made.any_layers.size(); ++layer) {
    made.any_layers[layer].heads = memory.any_heads.get() + layer * format.layout.kv_heads;
    made.any_layers[layer].codes = memory.any_codes.get();
  }
  if (!Upload(made.any_layers, &memory.any_layers)) return nullptr;
  return std::make_unique<MillionDeviceCodec>(made.shape, std::move(memory), MillionAttentionKernels(format));
}

}  // namespace kvmanager::million
