#include "kvmanager/memory/shared_semaphores.h"

#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager {

absl::StatusOr<std::unique_ptr<SharedSemaphores>> SharedSemaphores::Create() {
  Region::Options options;
  options.name = "kvmanager-words";
  options.bytes = kBytes;
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Region> region, Region::Create(options));
  return std::unique_ptr<SharedSemaphores>(new SharedSemaphores(std::move(region)));
}

absl::StatusOr<std::unique_ptr<SharedSemaphores>> SharedSemaphores::Import(int fd) {
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Region> region, Region::Map(fd, kBytes, /*writable=*/true));
  return std::unique_ptr<SharedSemaphores>(new SharedSemaphores(std::move(region)));
}

SharedSemaphores::~SharedSemaphores() { Unpin(); }

absl::Status SharedSemaphores::Pin(const Device* device) {
  KV_CHECK(device_ == nullptr);
  KV_RETURN_IF_ERROR(device->PinHost(region_->data(), kBytes));
  device_ = device;
  return absl::OkStatus();
}

void SharedSemaphores::Unpin() {
  if (device_ == nullptr) return;
  device_->UnpinHost(region_->data());
  device_ = nullptr;
}

}  // namespace kvmanager
