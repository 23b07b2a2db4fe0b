#include "codecs/zack_hack/zack_hack_device_codec.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "codecs/hack/hack_codec.h"
#include "codecs/hack/hack_device_format.h"
#include "codecs/hack/hack_encode_cuda.h"
#include "codecs/zack_hack/rotated_device_codec.h"
#include "codecs/zack_hack/zack_hack_attention_cuda.h"
#include "codecs/zack_hack/zack_hack_device.h"
#include "codecs/zack_hack/zack_hack_prefill_cuda.h"
#include "kvmanager/memory/device_memory.h"

namespace kvmanager::zack_hack {
namespace {

using device::AttendKernels;
using device::MappedSpace;

ZackHackHead HeadOf(const hack::HackFormat& format, int head) {
  const hack::HeadLayout& from = format.heads[head];
  const bool last = head + 1 == int(format.heads.size());
  ZackHackHead out{};
  out.offset = from.offset;
  out.bytes = (last ? format.page_bytes : format.heads[head + 1].offset) - from.offset;
  for (int side = 0; side < 2; ++side) {
    for (int s = 0; s < from.side[side].segments; ++s) {
      out.widths[side] |= uint32_t(from.side[side].segment_bits[s]) << 4 * s;
    }
  }
  return out;
}

struct Layer {
  const AttendKernels* kernels = nullptr;
  size_t data = 0;     // a MappedSpace, then a ZackHackHead for each KV head
  size_t prefill = 0;  // a ZackHackPrefillLayer
};

/// Offsets in the device's memory.
struct Offsets {
  std::vector<Layer> layers;
  size_t heads = 0;
  zack::RotationOffsets rotations;
};

class ZackHackDeviceCodec final : public zack::RotatedDeviceCodec {
 public:
  ZackHackDeviceCodec(zack::RotatedMemory memory, const PageLayout& layout, const hack::HackDeviceShape& shape,
                      Offsets offsets, bool folds)
      : RotatedDeviceCodec(layout, std::move(memory), offsets.rotations),
        shape_(shape),
        offsets_(std::move(offsets)),
        prefill_(ZackHackPrefillKernels(layout.head_dim, folds)) {}

  const AttendKernels* attention(int layer) const override { return offsets_.layers[layer].kernels; }
  const void* attention_data(int layer) const override { return memory() + offsets_.layers[layer].data; }
  device::Prefill prefill(int layer) const override {
    return {prefill_, memory() + offsets_.layers[layer].prefill, nullptr};
  }

 private:
  absl::Status EncodeRotated(const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                             CUstream_st* stream) const override {
    return CudaStatus(hack::LaunchHackEncode(shape_, heads(), items, count, declined, stream),
                      "encoding ZACK+HACK pages");
  }
  absl::Status DecodeRotated(const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) const override {
    return CudaStatus(hack::LaunchHackDecode(shape_, heads(), items, count, stream), "decoding ZACK+HACK pages");
  }
  const hack::HackDeviceHead* heads() const {
    return reinterpret_cast<const hack::HackDeviceHead*>(memory() + offsets_.heads);
  }

  const hack::HackDeviceShape shape_;
  const Offsets offsets_;
  const device::PrefillKernels* const prefill_;
};

}  // namespace

std::unique_ptr<DeviceCodec> MakeZackHackDeviceCodec(const zack::RotatedCodec& codec) {
  const PageLayout& layout = codec.layout();
  const int d = layout.head_dim, heads = layout.kv_heads, layers = codec.layers();
  if (layout.page_tokens != hack::kStripTokens || (d != 64 && d != 128)) return nullptr;
  std::vector<const hack::HackFormat*> formats;
  for (int l = 0; l < layers; ++l) {
    formats.push_back(&static_cast<const hack::HackCodec&>(codec.inner(l)).format());
    for (const hack::HeadLayout& head : formats.back()->heads) {
      for (int side = 0; side < 2; ++side) {
        for (int s = 0; s < head.side[side].segments; ++s) {
          const int width = head.side[side].segment_bits[s];
          if (width > kDeviceWidthMax && (side != 0 || width != kDeviceWideWidth)) return nullptr;
        }
      }
    }
  }
  const hack::HackDeviceFormat format = hack::MakeHackDeviceFormat(formats);

  device::DeviceImage image;
  Offsets offsets;
  offsets.layers.resize(layers);
  offsets.heads = image.Place(format.heads.size() * sizeof format.heads[0]);
  std::copy(format.heads.begin(), format.heads.end(), image.At<hack::HackDeviceHead>(offsets.heads));
  offsets.rotations = PlaceRotations(codec, &image);
  for (int l = 0; l < layers; ++l) {
    offsets.layers[l].data = image.Place(sizeof(MappedSpace) + heads * sizeof(ZackHackHead));
    uint32_t record_bytes = 0;
    bool wide = false;
    for (int h = 0; h < heads; ++h) {
      const ZackHackHead head = HeadOf(*formats[l], h);
      image.At<ZackHackHead>(offsets.layers[l].data + sizeof(MappedSpace))[h] = head;
      record_bytes = std::max(record_bytes, RoomOf(head, d));
      wide |= formats[l]->heads[h].side[0].two_byte_q;
    }
    offsets.layers[l].prefill = image.Place(sizeof(ZackHackPrefillLayer));
    offsets.layers[l].kernels = FindZackHackAttention(d, record_bytes, formats[l]->parameters.v_norm, wide);
    if (offsets.layers[l].kernels == nullptr) return nullptr;
  }

  auto memory = zack::AllocateRotated(image.bytes().size());
  if (!memory.ok()) return nullptr;
  uint8_t* const base = memory->data.get();
  for (int l = 0; l < layers; ++l) {
    *image.At<MappedSpace>(offsets.layers[l].data) = SpaceOf(codec, offsets.rotations, base, l);
    const auto* const table = reinterpret_cast<const hack::HackDeviceHead*>(base + offsets.heads);
    *image.At<ZackHackPrefillLayer>(offsets.layers[l].prefill) = {PrefillSpaceOf(codec, offsets.rotations, base, l),
                                                                  format.shape.heads_of(table, uint32_t(l))};
  }
  if (!CopyToDevice(image.bytes(), base).ok()) return nullptr;
  return std::make_unique<ZackHackDeviceCodec>(*std::move(memory), layout, format.shape, std::move(offsets),
                                               codec.folds());
}

}  // namespace kvmanager::zack_hack
