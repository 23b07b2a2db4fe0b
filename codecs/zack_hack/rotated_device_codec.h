// What stacks (rotated_codec.h) share on a GPU: their factors there, and Encode and Decode by way of rotated pages,
// which the inner codec's launches take and give.
//
// As DeviceCodec says of itself; a stack's own class says what attends, and launches the inner codec.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "codecs/device/attend_params.h"
#include "codecs/device/device_codec.h"
#include "codecs/device/device_image.h"
#include "codecs/zack/rotation_cuda.h"
#include "codecs/zack/zack_device.h"
#include "codecs/zack_hack/rotated_codec.h"
#include "kvmanager/memory/device_memory.h"

namespace kvmanager::zack {

/// Where a codec's factors lie in its image: offsets.
struct RotationOffsets {
  size_t encode = 0, decode = 0;      // DeviceRotation's
  std::vector<size_t> query, output;  // [layers] MappedSpace's
  // ZackPrefillLayer's; all heads keep all dimensions.
  size_t prefill_heads = 0, prefill_sides = 0;
  std::vector<size_t> packed_query;  // [layers]
};
RotationOffsets PlaceRotations(const RotatedCodec& codec, device::DeviceImage* image);

/// A codec's image on the device, and a pool of scratch memory that keeps what it has.
struct RotatedMemory {
  struct DestroyPool {
    void operator()(cudaMemPool_t pool) const { cudaMemPoolDestroy(pool); }
  };
  std::unique_ptr<std::remove_pointer_t<cudaMemPool_t>, DestroyPool> pool;
  DeviceArray<uint8_t> data;
};
/// For the calling thread's device. Errors: RESOURCE_EXHAUSTED, UNAVAILABLE.
absl::StatusOr<RotatedMemory> AllocateRotated(size_t bytes);

class RotatedDeviceCodec : public DeviceCodec {
 public:
  absl::Status Encode(const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                      CUstream_st* stream) const final;
  absl::Status Decode(const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) const final;

 protected:
  RotatedDeviceCodec(const PageLayout& layout, RotatedMemory memory, const RotationOffsets& offsets);
  const uint8_t* memory() const { return memory_.data.get(); }
  const PageLayout& layout() const { return rotation_.layout; }

 private:
  // The inner codec's, on rotated pages of float16; in them an infinity stands for what does not fit.
  virtual absl::Status EncodeRotated(const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                                     CUstream_st* stream) const = 0;
  virtual absl::Status DecodeRotated(const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) const = 0;
  template <typename Item, typename Body>
  absl::Status WithScratch(uint32_t count, CUstream_st* stream, Body launch) const;

  const RotatedMemory memory_;
  DeviceRotation rotation_;
};

/// On the device, of layer `layer` of a codec whose image begins at `base` there.
device::MappedSpace SpaceOf(const RotatedCodec& codec, const RotationOffsets& offsets, const uint8_t* base, int layer);
ZackPrefillLayer PrefillSpaceOf(const RotatedCodec& codec, const RotationOffsets& offsets, const uint8_t* base,
                                int layer);

}  // namespace kvmanager::zack
