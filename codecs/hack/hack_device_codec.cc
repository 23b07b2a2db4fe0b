#include "codecs/hack/hack_device_codec.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "codecs/device/device_image.h"
#include "codecs/hack/hack_attention_cuda.h"
#include "codecs/hack/hack_device_format.h"
#include "codecs/hack/hack_encode_cuda.h"
#include "codecs/hack/hack_prefill_cuda.h"
#include "codecs/zack/rotation_cuda.h"
#include "codecs/zack_hack/zack_hack_prefill_cuda.h"
#include "kvmanager/memory/device_memory.h"

namespace kvmanager::hack {
namespace {

/// What lies on the device: offsets from its first byte.
struct Offsets {
  size_t heads = 0;    // HackDeviceHead [kv_heads]
  size_t prefill = 0;  // PrefillParams::format
};

/// The space of rotated pages for attention by many query tokens: every head's factors are one Walsh-Hadamard matrix.
class PrefillSpace {
 public:
  PrefillSpace(const PageLayout& layout, device::DeviceImage* image) {
    const int d = layout.head_dim;
    std::vector<float> matrix(size_t(d) * d);
    const float norm = float(1 / std::sqrt(double(d)));
    for (int i = 0; i < d; ++i) {
      for (int j = 0; j < d; ++j) matrix[size_t(i) * d + j] = __builtin_parity(i & j) ? -norm : norm;
    }
    query_ = image->Place(zack::PackedFactorBytes(d, d, layout.dtype));
    zack::PackFactor(matrix.data(), d, d, layout.dtype, image->At<uint8_t>(query_));
    output_ = image->Place(zack::PackedFactorBytes(d, d, DType::kFloat16));
    zack::PackFactor(matrix.data(), d, d, DType::kFloat16, image->At<uint8_t>(output_));
    heads_ = image->Place(layout.kv_heads * sizeof(zack::ZackDeviceHead));
    std::fill_n(image->At<zack::ZackDeviceHead>(heads_), layout.kv_heads, zack::MakeZackDeviceHead(0, d, d));
    sides_ = image->Place(2 * layout.kv_heads * sizeof(zack::ZackDeviceSide));
    std::fill_n(image->At<zack::ZackDeviceSide>(sides_), 2 * layout.kv_heads,
                zack::ZackDeviceSide{0, uint32_t(d), output_, output_});
  }
  zack::ZackPrefillLayer At(const uint8_t* base) const {
    zack::ZackPrefillLayer space;
    space.heads = reinterpret_cast<const zack::ZackDeviceHead*>(base + heads_);
    space.sides = reinterpret_cast<const zack::ZackDeviceSide*>(base + sides_);
    space.base = base;
    space.query = base + query_;
    space.query_bytes = 0;  // from one head's to the next
    return space;
  }

 private:
  size_t query_, output_, heads_, sides_;
};

class HackDeviceCodec final : public DeviceCodec {
 public:
  HackDeviceCodec(const HackDeviceShape& shape, DeviceArray<uint8_t> memory, const Offsets& offsets,
                  const device::AttendKernels* attention, const device::PrefillKernels* prefill)
      : shape_(shape), memory_(std::move(memory)), offsets_(offsets), attention_(attention), prefill_(prefill) {}

  const device::AttendKernels* attention(int) const override { return attention_; }
  device::Prefill prefill(int) const override { return {prefill_, memory_.get() + offsets_.prefill}; }
  absl::Status Encode(const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                      CUstream_st* stream) const override {
    return CudaStatus(LaunchHackEncode(shape_, heads(), items, count, declined, stream), "encoding HACK pages");
  }
  absl::Status Decode(const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) const override {
    return CudaStatus(LaunchHackDecode(shape_, heads(), items, count, stream), "decoding HACK pages");
  }

 private:
  const HackDeviceHead* heads() const {
    return reinterpret_cast<const HackDeviceHead*>(memory_.get() + offsets_.heads);
  }

  const HackDeviceShape shape_;
  const DeviceArray<uint8_t> memory_;
  const Offsets offsets_;
  const device::AttendKernels* const attention_;
  const device::PrefillKernels* const prefill_;
};

}  // namespace

std::unique_ptr<DeviceCodec> MakeHackDeviceCodec(const HackFormat& format) {
  const HackDeviceFormat made = MakeHackDeviceFormat(format);
  const device::PrefillKernels* const prefill = HackPrefillKernels(made);
  device::DeviceImage image;
  Offsets offsets;
  offsets.heads = image.Place(made.heads.size() * sizeof made.heads[0]);
  std::copy(made.heads.begin(), made.heads.end(), image.At<HackDeviceHead>(offsets.heads));
  std::optional<PrefillSpace> space;
  if (prefill != nullptr && prefill->maps) {
    space.emplace(format.layout, &image);
    offsets.prefill = image.Place(sizeof(zack_hack::ZackHackPrefillLayer));
  } else {
    offsets.prefill = offsets.heads;
  }
  auto memory = AllocateOnDevice<uint8_t>(image.bytes().size(), nullptr);
  if (!memory.ok()) return nullptr;
  uint8_t* const base = memory->get();
  if (space) {
    *image.At<zack_hack::ZackHackPrefillLayer>(offsets.prefill) = {
        space->At(base), reinterpret_cast<const HackDeviceHead*>(base + offsets.heads)};
  }
  if (!CopyToDevice(image.bytes(), base).ok()) return nullptr;
  return std::make_unique<HackDeviceCodec>(made.shape, *std::move(memory), offsets, HackAttentionKernels(format),
                                           prefill);
}

}  // namespace kvmanager::hack
