#include "kvmanager/gpu/device_arena.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

constexpr uint64_t kUnitBytes = DeviceRegion::kGranularityBytes;
static_assert(DeviceArena::kBytesMax % kUnitBytes == 0);

absl::StatusOr<uint64_t> DeviceArena::RoundedBytes(uint64_t bytes) {
  if (bytes == 0 || bytes > kBytesMax) return InvalidField("bytes", bytes, absl::StrCat("1..", kBytesMax));
  return (bytes + kUnitBytes - 1) / kUnitBytes * kUnitBytes;
}

DeviceArena::DeviceArena(int ordinal, std::unique_ptr<DeviceRegion> region, int fd)
    : ordinal_(ordinal), region_(std::move(region)), fd_(fd) {}

DeviceArena::~DeviceArena() { close(fd_); }

absl::StatusOr<std::unique_ptr<DeviceArena>> DeviceArena::Make(const Device* device, uint64_t bytes) {
  KV_ASSIGN_OR_RETURN(std::unique_ptr<DeviceRegion> region, DeviceRegion::Reserve(device, bytes, /*slabs=*/1));
  KV_RETURN_IF_ERROR(region->Make(0));
  KV_ASSIGN_OR_RETURN(const int fd, region->Export(0));
  return std::unique_ptr<DeviceArena>(new DeviceArena(device->info().ordinal, std::move(region), fd));
}

}  // namespace kvmanager
