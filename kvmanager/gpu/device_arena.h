// GPU memory of a connection, for its tensors: made by the daemon, mapped by both.
//
// Made on any thread; then the loop's thread alone. Goes when nobody uses it: the session, its capability, and the
// stream that was given work with it (DeviceStream::Keep) share it. A client that mapped it may keep the memory longer,
// in its own process.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/device_region.h"

namespace kvmanager {

class DeviceArena {
 public:
  static constexpr uint64_t kBytesMax = uint64_t{1} << 30;  // of one arena

  /// Up to whole pieces of GPU memory. Errors: INVALID_ARGUMENT (0, or more than kBytesMax).
  static absl::StatusOr<uint64_t> RoundedBytes(uint64_t bytes);
  /// Zeroed; `bytes` as RoundedBytes gave it. Errors: RESOURCE_EXHAUSTED, UNAVAILABLE.
  static absl::StatusOr<std::unique_ptr<DeviceArena>> Make(const Device* device, uint64_t bytes);
  ~DeviceArena();
  DeviceArena(const DeviceArena&) = delete;
  DeviceArena& operator=(const DeviceArena&) = delete;

  int ordinal() const { return ordinal_; }
  /// Addresses of the device, in this process.
  absl::Span<uint8_t> data() const { return {region_->data(), region_->slab_bytes()}; }
  int fd() const { return fd_; }  // stays the arena's; a receiver gets a duplicate
  /// `charge` is destroyed with the arena: what its bytes count against.
  void SetCharge(std::shared_ptr<const void> charge) { charge_ = std::move(charge); }

 private:
  DeviceArena(int ordinal, std::unique_ptr<DeviceRegion> region, int fd);

  const int ordinal_;
  const std::unique_ptr<DeviceRegion> region_;  // of one slab
  const int fd_;
  std::shared_ptr<const void> charge_;  // a shared_ptr, since its type is the owner's
};

}  // namespace kvmanager
