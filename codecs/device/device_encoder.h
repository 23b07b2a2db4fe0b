// Encodes batches of pages on one stream of a GPU, in the order in which they are given.
//
// Owns what the kernels read of a batch: a ring of items in pinned host memory, in which a batch stays until the stream
// has passed it. One thread; the device that is current when it is made stays current. Never waits for the device,
// except when destroyed.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "codecs/device/device_codec.h"
#include "kvmanager/base/needs_cuda.h"

namespace kvmanager {

class DeviceEncoder {
 public:
  /// items_max: of all batches that the stream has not passed. Errors: CUDA's; UNAVAILABLE in builds without it.
  KV_NEEDS_CUDA(static absl::StatusOr<std::unique_ptr<DeviceEncoder>> Create(CUstream_st* stream, uint32_t items_max));
  virtual ~DeviceEncoder() = default;

  /// Enqueues one batch; `codec` stays until the stream has passed it. declined: [items.size()], of memory that the
  /// device writes: 0 where a page is encoded, else not: the codec declines it, or keeps it raw. Items that follow one
  /// another and are of layers of the same codec are one launch. Errors: RESOURCE_EXHAUSTED if the ring has no room for
  /// it now; nothing is then enqueued. CUDA's.
  virtual absl::Status Encode(const DeviceCodec& codec, absl::Span<const DeviceEncodeItem> items,
                              uint32_t* declined) = 0;
};

}  // namespace kvmanager
