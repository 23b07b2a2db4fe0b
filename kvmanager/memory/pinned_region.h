// Host memory that a GPU reads and writes at its own addresses, apart from any pool: pinned when made, unpinned when
// destroyed, which waits for every stream of the device (DeviceStreams::Retire).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/region.h"

namespace kvmanager {

class PinnedRegion {
 public:
  /// bytes: rounded up to whole pages. `device` outlives the region. Errors: RESOURCE_EXHAUSTED, UNAVAILABLE.
  static absl::StatusOr<std::unique_ptr<PinnedRegion>> Make(const Device* device, size_t bytes) {
    constexpr size_t kPageBytes = 4096;
    Region::Options options;
    options.name = "kvmanager-pinned";
    options.bytes = (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    options.keep_descriptor = false;
    KV_ASSIGN_OR_RETURN(std::unique_ptr<Region> region, Region::Create(options));
    KV_RETURN_IF_ERROR(device->PinHost(region->data(), region->bytes()));
    return std::unique_ptr<PinnedRegion>(new PinnedRegion(device, std::move(region)));
  }
  ~PinnedRegion() { device_->UnpinHost(region_->data()); }
  PinnedRegion(const PinnedRegion&) = delete;
  PinnedRegion& operator=(const PinnedRegion&) = delete;

  uint8_t* data() const { return region_->data(); }
  size_t bytes() const { return region_->bytes(); }

 private:
  PinnedRegion(const Device* device, std::unique_ptr<Region> region) : device_(device), region_(std::move(region)) {}

  const Device* const device_;
  const std::unique_ptr<Region> region_;
};

}  // namespace kvmanager
