#include "codecs/zack_million/zack_million_device_codec.h"

#include <utility>
#include <vector>

#include "codecs/million/million_attention_cuda.h"
#include "codecs/million/million_codec.h"
#include "codecs/million/million_device_format.h"
#include "codecs/zack_hack/rotated_device_codec.h"
#include "codecs/zack_million/zack_million_prefill_cuda.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device_memory.h"

namespace kvmanager {
namespace {

using million::MillionSpace;

class ZackMillionDeviceCodec final : public zack::RotatedDeviceCodec {
 public:
  /// data: [layers] of MillionSpace, then ZackMillionPrefillLayer, in `memory`.
  ZackMillionDeviceCodec(zack::RotatedMemory memory, const PageLayout& layout, uint32_t page_bytes,
                         const zack::RotationOffsets& rotations, std::vector<size_t> data,
                         std::unique_ptr<DeviceCodec> inner, const device::AttendKernels* attention,
                         const device::PrefillKernels* prefill)
      : RotatedDeviceCodec(layout, std::move(memory), rotations),
        page_bytes_(page_bytes),
        data_(std::move(data)),
        inner_(std::move(inner)),
        attention_(attention),
        prefill_(prefill) {}

  const device::AttendKernels* attention(int) const override { return attention_; }
  const void* attention_data(int layer) const override { return memory() + data_[layer]; }
  device::Prefill prefill(int layer) const override {
    return {prefill_, memory() + data_[layer] + sizeof(MillionSpace), nullptr};
  }

 private:
  absl::Status EncodeRotated(const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                             CUstream_st* stream) const override {
    KV_RETURN_IF_ERROR(inner_->Encode(items, count, declined, stream));
    return CudaStatus(zack::LaunchDeclineInfinite(layout(), items, count, page_bytes_, declined, stream),
                      "encoding ZACK+MILLION pages");
  }
  absl::Status DecodeRotated(const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) const override {
    return inner_->Decode(items, count, stream);
  }

  const uint32_t page_bytes_;
  const std::vector<size_t> data_;
  const std::unique_ptr<DeviceCodec> inner_;
  const device::AttendKernels* const attention_;
  const device::PrefillKernels* const prefill_;
};

}  // namespace

std::unique_ptr<DeviceCodec> MakeZackMillionDeviceCodec(const zack::RotatedCodec& codec) {
  const auto& million = static_cast<const million::MillionCodec&>(codec.inner(0));
  const device::AttendKernels* const attention = MillionAttentionKernels(million.format(), /*apart=*/true);
  if (attention == nullptr) return nullptr;
  std::unique_ptr<DeviceCodec> inner = million.NewDeviceCodec();
  if (inner == nullptr) return nullptr;

  device::DeviceImage image;
  const zack::RotationOffsets rotations = PlaceRotations(codec, &image);
  std::vector<size_t> data;
  data.reserve(codec.layers());
  for (int l = 0; l < codec.layers(); ++l) {
    data.push_back(image.Place(sizeof(MillionSpace) + sizeof(ZackMillionPrefillLayer)));
  }
  auto memory = zack::AllocateRotated(image.bytes().size());
  if (!memory.ok()) return nullptr;
  uint8_t* const base = memory->data.get();
  for (int l = 0; l < codec.layers(); ++l) {
    *image.At<MillionSpace>(data[l]) = {SpaceOf(codec, rotations, base, l), inner->attention_data(l)};
    *image.At<ZackMillionPrefillLayer>(data[l] + sizeof(MillionSpace)) = {
        PrefillSpaceOf(codec, rotations, base, l),
        static_cast<const million::MillionAnyLayer*>(inner->prefill(l).format)};
  }
  if (!CopyToDevice(image.bytes(), base).ok()) return nullptr;
  const device::PrefillKernels* const prefill = inner->prefill(0).kernels == nullptr
                                                    ? nullptr
                                                    : ZackMillionPrefillKernels(codec.layout().head_dim, codec.folds());
  return std::make_unique<ZackMillionDeviceCodec>(*std::move(memory), codec.layout(), million.format().page_bytes,
                                                  rotations, std::move(data), std::move(inner), attention, prefill);
}

}  // namespace kvmanager
