// Device memory that other processes can map: one address range reserved for a whole pool, slabs of it backed by
// memory.
//
// A slab is one allocation of CUDA's virtual memory management, mapped at a fixed offset of the range. Its owner makes
// slabs and exports them as file descriptors; an importer reserves a range of the same size and maps the descriptors at
// the same offsets, so a slot has one name on both sides: its distance from the range's first byte in kSlotUnitBytes.
// Owns the addresses and what is mapped there. Single-threaded, except data(); memory may be used by kernels of any
// stream while its slab is mapped.
//
// A read-only import protects the owner against the importer's mistakes, not against its malice: CUDA lets whoever
// holds a descriptor map it for writing.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kvmanager/base/needs_cuda.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/slab_memory.h"

namespace kvmanager {

class DeviceRegion : public SlabMemory {
 public:
  /// Of a region of several slabs: smaller ones would mean thousands of descriptors for a GPU's memory.
  static constexpr uint64_t kSlabBytesMin = uint64_t{256} << 20;

  /// What sizes are multiples of; Reserve() checks it against the device's granularity.
  static constexpr uint64_t kGranularityBytes = uint64_t{2} << 20;

  /// Addresses alone. slab_bytes: a multiple of the granularity, and >= kSlabBytesMin unless there is one slab (an
  /// arena); slabs * slab_bytes <= kBytesMax. `device` outlives the region. Errors: INVALID_ARGUMENT, UNAVAILABLE.
  KV_NEEDS_CUDA(static absl::StatusOr<std::unique_ptr<DeviceRegion>> Reserve(const Device* device, uint64_t slab_bytes,
                                                                             uint32_t slabs));

  // Its destructor: nothing uses the memory any more. Unmake is also for an imported slab.
  virtual bool IsMapped(uint32_t slab) const = 0;
  /// Maps a slab that another process exported; takes the descriptor. Not zeroed. Errors: INVALID_ARGUMENT when its
  /// memory is smaller than a slab; UNAVAILABLE.
  virtual absl::Status Import(uint32_t slab, int fd, bool writable) = 0;
};

}  // namespace kvmanager
