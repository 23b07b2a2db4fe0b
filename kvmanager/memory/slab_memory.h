// The memory behind the slabs of a DevicePool: equal pieces at fixed places of one address range.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

namespace kvmanager {

class SlabMemory {
 public:
  /// Plans name slots by their distance from data() in these units (codecs/device/attend_params.h has the same): 32
  /// bits of it reach kBytesMax.
  static constexpr uint64_t kSlotUnitBytes = 64;
  static constexpr uint64_t kBytesMax = kSlotUnitBytes << 32;

  virtual ~SlabMemory() = default;

  /// The range's first byte; slab i begins at data() + i * slab_bytes().
  virtual uint8_t* data() const = 0;
  virtual uint64_t slab_bytes() const = 0;
  virtual uint32_t slabs() const = 0;

  /// Gives a slab that has none memory of its own, zeroed. Errors: RESOURCE_EXHAUSTED; the slab then has none.
  virtual absl::Status Make(uint32_t slab) = 0;
  /// Takes a slab's memory away. Nothing of this process uses it any more; others that imported it keep the old memory.
  virtual void Unmake(uint32_t slab) = 0;
  /// Zeroes a slab that nothing uses; done when it returns.
  virtual absl::Status Zero(uint32_t slab) = 0;
  /// A descriptor, the caller's, by which another process maps the slab's memory. It cannot be taken back.
  virtual absl::StatusOr<int> Export(uint32_t slab) = 0;
};

}  // namespace kvmanager
