#include "kvmanager/memory/stream_words.h"

#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager {

absl::StatusOr<std::unique_ptr<StreamWords>> StreamWords::Create() {
  Region::Options options;
  options.name = "kvmanager-words";
  options.bytes = kBytes;
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Region> region, Region::Create(options));
  return std::unique_ptr<StreamWords>(new StreamWords(std::move(region)));
}

absl::StatusOr<std::unique_ptr<StreamWords>> StreamWords::Import(int fd) {
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Region> region, Region::Map(fd, kBytes, /*writable=*/true));
  return std::unique_ptr<StreamWords>(new StreamWords(std::move(region)));
}

StreamWords::~StreamWords() { Unpin(); }

absl::Status StreamWords::Pin(const Device* device) {
  KV_CHECK(device_ == nullptr);
  KV_RETURN_IF_ERROR(device->PinHost(region_->data(), kBytes));
  device_ = device;
  return absl::OkStatus();
}

void StreamWords::Unpin() {
  if (device_ == nullptr) return;
  device_->UnpinHost(region_->data());
  device_ = nullptr;
}

}  // namespace kvmanager
