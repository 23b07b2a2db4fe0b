#include "kvmanager/handoff/recompute_device.h"

#include <utility>

#include "kvmanager/base/status.h"
#include "kvmanager/gpu/device_stream.h"

namespace kvmanager {

absl::StatusOr<std::unique_ptr<CudaRecomputeDevice>> CudaRecomputeDevice::Create(const Device* device) {
  KV_ASSIGN_OR_RETURN(std::shared_ptr<recompute::CudaLanes> lanes, recompute::MakeCudaLanes(device));
  return std::unique_ptr<CudaRecomputeDevice>(new CudaRecomputeDevice(device, std::move(lanes)));
}

bool CudaRecomputeDevice::CanMake(const recompute::ProjectionModel& model) const {
  return HasMet(*lanes_, model) || streams_ == nullptr || streams_->Quiet();
}

absl::StatusOr<absl::Span<uint8_t>> CudaRecomputeDevice::Scratch(size_t bytes) {
  if (scratch_bytes() < bytes) {
    KV_ASSIGN_OR_RETURN(std::unique_ptr<PinnedRegion> region, PinnedRegion::Make(device_, bytes));
    scratch_.push_back(std::move(region));
  }
  return absl::Span<uint8_t>(scratch_.back()->data(), scratch_.back()->bytes());
}

}  // namespace kvmanager
