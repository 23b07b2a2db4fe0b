#include "codecs/zack_hack/zack_hack_device_codec.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "codecs/device/device_image.h"
#include "codecs/hack/hack_codec.h"
#include "codecs/hack/hack_device_format.h"
#include "codecs/hack/hack_encode_cuda.h"
#include "codecs/zack/rotation_cuda.h"
#include "codecs/zack_hack/zack_hack_attention_cuda.h"
#include "codecs/zack_hack/zack_hack_device.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device.h"

namespace kvmanager::zack_hack {
namespace {

using device::AttendKernels;
using device::MappedSpace;

/// Rotated pages of one launch of the inner codec: few enough to stay in the second-level cache.
constexpr size_t kRotatedBytes = size_t{32} << 20;

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
  size_t data = 0;  // a MappedSpace, then a ZackHackHead for each KV head
};

/// Offsets in the device's memory.
struct Places {
  std::vector<Layer> layers;
  size_t heads = 0, encode = 0, decode = 0;
};

class ZackHackDeviceCodec final : public DeviceCodec {
 public:
  ZackHackDeviceCodec(uint8_t* memory, CUmemPoolHandle_st* pool, const PageLayout& layout,
                      const hack::HackDeviceShape& shape, Places places)
      : memory_(memory), pool_(pool), shape_(shape), places_(std::move(places)) {
    rotation_.layout = layout;
    rotation_.encode = memory + places_.encode;
    rotation_.decode = memory + places_.decode;
  }
  // cudaFree would wait for every stream of the device.
  ~ZackHackDeviceCodec() override {
    cudaFreeAsync(memory_, nullptr);
    cudaMemPoolDestroy(pool_);
  }

  const AttendKernels* attention(int layer) const override { return places_.layers[layer].kernels; }
  const void* attention_data(int layer) const override { return memory_ + places_.layers[layer].data; }

  absl::Status Encode(const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                      CUstream_st* stream) const override {
    return WithScratch<DeviceEncodeItem>(
        count, stream, "encoding ZACK+HACK pages",
        [&](uint32_t first, uint32_t n, uint8_t* rotated, DeviceEncodeItem* inner) {
          const int error = zack::LaunchRotateRaw(rotation_, items + first, n, rotated, inner, stream);
          return error != 0 ? error : hack::LaunchHackEncode(shape_, heads(), inner, n, declined + first, stream);
        });
  }
  absl::Status Decode(const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) const override {
    return WithScratch<DeviceDecodeItem>(
        count, stream, "decoding ZACK+HACK pages",
        [&](uint32_t first, uint32_t n, uint8_t* rotated, DeviceDecodeItem* inner) {
          int error = zack::LaunchNameRotated(rotation_, items + first, n, rotated, inner, stream);
          if (error == 0) error = hack::LaunchHackDecode(shape_, heads(), inner, n, stream);
          return error != 0 ? error : zack::LaunchRotateBack(rotation_, items + first, n, rotated, stream);
        });
  }

 private:
  const hack::HackDeviceHead* heads() const {
    return reinterpret_cast<const hack::HackDeviceHead*>(memory_ + places_.heads);
  }
  /// launch(first, n, rotated pages, items) for all of `count`, as many at once as the scratch memory holds, which
  /// comes and goes in the order of the stream.
  template <typename Item, typename Body>
  absl::Status WithScratch(uint32_t count, CUstream_st* stream, const char* what, Body launch) const {
    if (count == 0) return absl::OkStatus();
    const size_t raw_bytes = rotation_.layout.raw_bytes();
    const uint32_t together = uint32_t(std::clamp<size_t>(kRotatedBytes / raw_bytes, 1, count));
    void* scratch = nullptr;
    KV_RETURN_IF_ERROR(
        CudaStatus(cudaMallocFromPoolAsync(&scratch, together * (raw_bytes + sizeof(Item)), pool_, stream), what));
    uint8_t* const rotated = static_cast<uint8_t*>(scratch);
    Item* const inner = reinterpret_cast<Item*>(rotated + together * raw_bytes);
    int error = 0;
    for (uint32_t first = 0; first < count && error == 0; first += together) {
      error = launch(first, std::min(together, count - first), rotated, inner);
    }
    const int freed = cudaFreeAsync(scratch, stream);
    return CudaStatus(error != 0 ? error : freed, what);
  }

  uint8_t* const memory_;           // owned; on the device
  CUmemPoolHandle_st* const pool_;  // owned; of scratch memory, kept between calls
  const hack::HackDeviceShape shape_;
  const Places places_;
  zack::DeviceRotation rotation_;
};

/// A pool that keeps what it has; nullptr: none.
CUmemPoolHandle_st* MakePool() {
  cudaMemPoolProps properties = {};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  cudaMemPool_t pool = nullptr;
  if (cudaGetDevice(&properties.location.id) != cudaSuccess || cudaMemPoolCreate(&pool, &properties) != cudaSuccess) {
    return nullptr;
  }
  uint64_t everything = UINT64_MAX;
  if (cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &everything) != cudaSuccess) {
    cudaMemPoolDestroy(pool);
    return nullptr;
  }
  return pool;
}

}  // namespace

std::unique_ptr<DeviceCodec> MakeZackHackDeviceCodec(const zack::RotatedCodec& codec) {
  const PageLayout& layout = codec.layout();
  const int d = layout.head_dim, heads = layout.kv_heads, layers = codec.layers();
  if (layout.page_tokens != hack::kStripTokens || (d != 64 && d != 128)) return nullptr;
  std::vector<const hack::HackFormat*> formats;
  for (int l = 0; l < layers; ++l) {
    formats.push_back(&static_cast<const hack::HackCodec&>(codec.inner(l)).format());
  }
  const hack::HackDeviceFormat format = hack::MakeHackDeviceFormat(formats);

  device::DeviceImage image;
  Places places;
  places.layers.resize(layers);
  const size_t matrix = size_t(d) * d, matrices = matrix * heads * sizeof(float);
  const size_t encode_bytes = zack::PackedFactorBytes(d, d, layout.dtype);
  const size_t decode_bytes = zack::PackedFactorBytes(d, d, DType::kFloat16);
  places.heads = image.Place(format.heads.size() * sizeof format.heads[0]);
  std::copy(format.heads.begin(), format.heads.end(), image.At<hack::HackDeviceHead>(places.heads));
  places.encode = image.Place(encode_bytes * layers * heads * 2);
  places.decode = image.Place(decode_bytes * layers * heads * 2);
  struct Factors {
    size_t query, output;
  };
  std::vector<Factors> factors(layers);
  for (int l = 0; l < layers; ++l) {
    places.layers[l].data = image.Place(sizeof(MappedSpace) + heads * sizeof(ZackHackHead));
    factors[l] = {image.Place(matrices), image.Place(matrices)};
    uint32_t record_bytes = 0;
    for (int h = 0; h < heads; ++h) {
      const ZackHackHead head = HeadOf(*formats[l], h);
      image.At<ZackHackHead>(places.layers[l].data + sizeof(MappedSpace))[h] = head;
      record_bytes = std::max(record_bytes, head.bytes);
      const zack::HeadRotation& rotation = codec.rotation(l, h);
      const std::vector<float>& output = codec.folds() ? rotation.encode[1] : rotation.decode[1];
      std::copy(rotation.query.begin(), rotation.query.end(), image.At<float>(factors[l].query) + h * matrix);
      std::copy(output.begin(), output.end(), image.At<float>(factors[l].output) + h * matrix);
      for (int side = 0; side < 2; ++side) {
        const size_t at = (size_t(l) * heads + h) * 2 + side;
        zack::PackFactor(rotation.encode[side].data(), d, d, layout.dtype,
                         image.At<uint8_t>(places.encode + at * encode_bytes));
        zack::PackFactor(rotation.decode[side].data(), d, d, DType::kFloat16,
                         image.At<uint8_t>(places.decode + at * decode_bytes));
      }
    }
    places.layers[l].kernels = FindZackHackAttention(d, record_bytes);
  }

  CUmemPoolHandle_st* const pool = MakePool();
  void* memory = nullptr;
  if (pool == nullptr || cudaMallocAsync(&memory, image.bytes().size(), nullptr) != cudaSuccess) {
    cudaGetLastError();  // the next call that looks would take it for its own
    if (pool != nullptr) cudaMemPoolDestroy(pool);
    return nullptr;
  }
  uint8_t* const base = static_cast<uint8_t*>(memory);
  for (int l = 0; l < layers; ++l) {
    MappedSpace& space = *image.At<MappedSpace>(places.layers[l].data);
    space.query = reinterpret_cast<const float*>(base + factors[l].query);
    space.output = reinterpret_cast<const float*>(base + factors[l].output);
    space.folds = codec.folds() ? 1 : 0;
  }
  auto made = std::make_unique<ZackHackDeviceCodec>(base, pool, layout, format.shape, std::move(places));
  if (cudaMemcpy(memory, image.bytes().data(), image.bytes().size(), cudaMemcpyHostToDevice) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return made;
}

}  // namespace kvmanager::zack_hack
