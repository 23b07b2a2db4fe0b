#include "codecs/zack_hack/rotated_device_codec.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager::zack {
namespace {

/// Rotated pages of one launch of the inner codec: as many as an engine's connector moves at once, so that a layer's
/// factors, which are four pages' bytes for each head and side, serve several pages of all layers.
constexpr size_t kRotatedBytes = size_t{64} << 20;

}  // namespace

RotationOffsets PlaceRotations(const RotatedCodec& codec, device::DeviceImage* image) {
  const PageLayout& layout = codec.layout();
  const int d = layout.head_dim, heads = layout.kv_heads, layers = codec.layers();
  const size_t matrix = size_t(d) * d, matrices = matrix * heads * sizeof(float);
  const size_t encode_bytes = PackedFactorBytes(d, d, layout.dtype);
  const size_t decode_bytes = PackedFactorBytes(d, d, DType::kFloat16);
  RotationOffsets offsets;
  offsets.encode = image->Place(encode_bytes * layers * heads * 2);
  offsets.decode = image->Place(decode_bytes * layers * heads * 2);
  offsets.prefill_heads = image->Place(heads * sizeof(ZackDeviceHead));
  std::fill_n(image->At<ZackDeviceHead>(offsets.prefill_heads), heads, MakeZackDeviceHead(0, d, d));
  offsets.prefill_sides = image->Place(size_t(layers) * heads * 2 * sizeof(ZackDeviceSide));
  for (int l = 0; l < layers; ++l) {
    offsets.query.push_back(image->Place(matrices));
    offsets.output.push_back(image->Place(matrices));
    offsets.packed_query.push_back(image->Place(heads * encode_bytes));
    for (int h = 0; h < heads; ++h) {
      const HeadRotation& rotation = codec.rotation(l, h);
      const std::vector<float>& output = codec.folds() ? rotation.encode[1] : rotation.decode[1];
      std::copy(rotation.query.begin(), rotation.query.end(), image->At<float>(offsets.query[l]) + h * matrix);
      std::copy(output.begin(), output.end(), image->At<float>(offsets.output[l]) + h * matrix);
      PackFactor(rotation.query.data(), d, d, layout.dtype,
                 image->At<uint8_t>(offsets.packed_query[l] + h * encode_bytes));
      for (int side = 0; side < 2; ++side) {
        const size_t at = (size_t(l) * heads + h) * 2 + side;
        image->At<ZackDeviceSide>(offsets.prefill_sides)[at] = {0, uint32_t(d), offsets.encode + at * encode_bytes,
                                                                offsets.decode + at * decode_bytes};
        PackFactor(rotation.encode[side].data(), d, d, layout.dtype,
                   image->At<uint8_t>(offsets.encode + at * encode_bytes));
        PackFactor(rotation.decode[side].data(), d, d, DType::kFloat16,
                   image->At<uint8_t>(offsets.decode + at * decode_bytes));
      }
    }
  }
  return offsets;
}

absl::StatusOr<RotatedMemory> AllocateRotated(size_t bytes) {
  cudaMemPoolProps properties = {};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.location.type = cudaMemLocationTypeDevice;
  KV_RETURN_IF_ERROR(TakeCudaError(cudaGetDevice(&properties.location.id), "cudaGetDevice"));
  cudaMemPool_t pool = nullptr;
  KV_RETURN_IF_ERROR(TakeCudaError(cudaMemPoolCreate(&pool, &properties), "cudaMemPoolCreate"));
  RotatedMemory memory;
  memory.pool.reset(pool);
  uint64_t everything = UINT64_MAX;
  KV_RETURN_IF_ERROR(TakeCudaError(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &everything),
                                   "cudaMemPoolSetAttribute"));
  KV_ASSIGN_OR_RETURN(memory.data, AllocateOnDevice<uint8_t>(bytes, nullptr));
  return memory;
}

RotatedDeviceCodec::RotatedDeviceCodec(const PageLayout& layout, RotatedMemory memory, const RotationOffsets& offsets)
    : memory_(std::move(memory)) {
  rotation_.layout = layout;
  rotation_.layers = static_cast<uint32_t>(offsets.query.size());
  rotation_.encode = memory_.data.get() + offsets.encode;
  rotation_.decode = memory_.data.get() + offsets.decode;
}

/// launch(first, n, pages, items) for all of `count`, as many at once as the scratch memory holds, which comes and goes
/// in the order of the stream.
template <typename Item, typename Body>
absl::Status RotatedDeviceCodec::WithScratch(uint32_t count, CUstream_st* stream, Body launch) const {
  if (count == 0) return absl::OkStatus();
  const size_t raw_bytes = rotation_.layout.raw_bytes();
  const uint32_t together = uint32_t(std::clamp<size_t>(kRotatedBytes / raw_bytes, 1, count));
  KV_ASSIGN_OR_RETURN(
      const DeviceArray<uint8_t> scratch,
      AllocateOnDevice<uint8_t>(together * (raw_bytes + sizeof(Item) + sizeof(uint32_t)), stream, memory_.pool.get()));
  uint8_t* const rotated = scratch.get();
  Item* const inner = reinterpret_cast<Item*>(rotated + together * raw_bytes);
  const RotatedPages pages = {rotated, reinterpret_cast<uint32_t*>(inner + together)};
  for (uint32_t first = 0; first < count; first += together) {
    KV_RETURN_IF_ERROR(launch(first, std::min(together, count - first), pages, inner));
  }
  return absl::OkStatus();
}

absl::Status RotatedDeviceCodec::Encode(const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                                        CUstream_st* stream) const {
  return WithScratch<DeviceEncodeItem>(
      count, stream,
      [&](uint32_t first, uint32_t n, const RotatedPages& pages, DeviceEncodeItem* inner) -> absl::Status {
        KV_RETURN_IF_ERROR(
            CudaStatus(LaunchRotateRaw(rotation_, pages, items + first, n, inner, stream), "rotating pages"));
        return EncodeRotated(inner, n, declined + first, stream);
      });
}

absl::Status RotatedDeviceCodec::Decode(const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) const {
  return WithScratch<DeviceDecodeItem>(
      count, stream,
      [&](uint32_t first, uint32_t n, const RotatedPages& pages, DeviceDecodeItem* inner) -> absl::Status {
        KV_RETURN_IF_ERROR(
            CudaStatus(LaunchNameRotated(rotation_, pages, items + first, n, inner, stream), "rotating pages"));
        KV_RETURN_IF_ERROR(DecodeRotated(inner, n, stream));
        return CudaStatus(LaunchRotateBack(rotation_, pages, items + first, n, stream), "rotating pages");
      });
}

ZackPrefillLayer PrefillSpaceOf(const RotatedCodec& codec, const RotationOffsets& offsets, const uint8_t* base,
                                int layer) {
  const PageLayout& layout = codec.layout();
  ZackPrefillLayer space;
  space.heads = reinterpret_cast<const ZackDeviceHead*>(base + offsets.prefill_heads);
  space.sides =
      reinterpret_cast<const ZackDeviceSide*>(base + offsets.prefill_sides) + size_t(layer) * layout.kv_heads * 2;
  space.base = base;
  space.query = base + offsets.packed_query[layer];
  space.query_bytes = PackedFactorBytes(layout.head_dim, layout.head_dim, layout.dtype);
  return space;
}

device::MappedSpace SpaceOf(const RotatedCodec& codec, const RotationOffsets& offsets, const uint8_t* base, int layer) {
  device::MappedSpace space;
  space.query = reinterpret_cast<const float*>(base + offsets.query[layer]);
  space.output = reinterpret_cast<const float*>(base + offsets.output[layer]);
  space.folds = codec.folds() ? 1 : 0;
  return space;
}

}  // namespace kvmanager::zack
