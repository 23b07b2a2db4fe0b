// What stacks (rotated_codec.h) share on a GPU: their factors there, and Encode and Decode by way of rotated pages,
// which the inner codec's launches take and give.
//
// As DeviceCodec says of itself; a stack's own class says what attends, and launches the inner codec.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "codecs/device/attend_params.h"
#include "codecs/device/device_codec.h"
#include "codecs/device/device_image.h"
#include "codecs/zack/rotation_cuda.h"
#include "codecs/zack/zack_device.h"
#include "codecs/zack_hack/rotated_codec.h"

struct CUmemPoolHandle_st;

namespace kvmanager::zack {

/// Where a codec's factors lie in its image: offsets.
struct RotationPlaces {
  size_t encode = 0, decode = 0;      // DeviceRotation's
  std::vector<size_t> query, output;  // [layers] MappedSpace's
  // ZackPrefillLayer's; all heads keep all dimensions.
  size_t prefill_heads = 0, prefill_sides = 0;
  std::vector<size_t> packed_query;  // [layers]
};
RotationPlaces PlaceRotations(const RotatedCodec& codec, device::DeviceImage* image);

/// Device memory with an image, and a pool of scratch memory that keeps what it has. cudaFree would wait for every
/// stream of the device.
class RotatedMemory {
 public:
  /// For the calling thread's device. False: there is no memory.
  bool Allocate(size_t bytes);
  /// False: the copy failed.
  bool Fill(const device::DeviceImage& image);
  RotatedMemory() = default;
  RotatedMemory(RotatedMemory&& from) noexcept;
  ~RotatedMemory();
  uint8_t* data() const { return data_; }
  CUmemPoolHandle_st* pool() const { return pool_; }

 private:
  uint8_t* data_ = nullptr;
  CUmemPoolHandle_st* pool_ = nullptr;
};

class RotatedDeviceCodec : public DeviceCodec {
 public:
  absl::Status Encode(const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                      CUstream_st* stream) const final;
  absl::Status Decode(const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) const final;

 protected:
  RotatedDeviceCodec(const PageLayout& layout, RotatedMemory memory, const RotationPlaces& places);
  const uint8_t* memory() const { return memory_.data(); }
  const PageLayout& layout() const { return rotation_.layout; }

 private:
  // The inner codec's, on rotated pages of float16; in them an infinity stands for what does not fit.
  virtual absl::Status EncodeRotated(const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                                     CUstream_st* stream) const = 0;
  virtual absl::Status DecodeRotated(const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) const = 0;
  template <typename Item, typename Body>
  absl::Status WithScratch(uint32_t count, CUstream_st* stream, const char* what, Body launch) const;

  const RotatedMemory memory_;
  DeviceRotation rotation_;
};

/// On the device, of layer `layer` of a codec whose image begins at `base` there.
device::MappedSpace SpaceOf(const RotatedCodec& codec, const RotationPlaces& places, const uint8_t* base, int layer);
ZackPrefillLayer PrefillSpaceOf(const RotatedCodec& codec, const RotationPlaces& places, const uint8_t* base,
                                int layer);

}  // namespace kvmanager::zack
