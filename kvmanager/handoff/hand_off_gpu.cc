#include "kvmanager/handoff/hand_off_gpu.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "transport/cuda/peer_copier.h"

namespace kvmanager {

absl::Status OfferFromHost(const absl::Status& why) {
  return FieldError(absl::StatusCode::kFailedPrecondition, "gpu", std::string(why.message()),
                    "a GPU here that can take the pages");
}

bool WantsHostPages(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) && DetailOf(status).field == "gpu";
}

absl::StatusOr<const DeviceContext*> ChooseGpu(const DaemonContext& daemon, const GpuName& from,
                                               const HandOffFirst& first, const Codec& codec) {
  // As the store names it.
  CacheConfig config = first.config;
  config.codec = codec.info().spec;
  config.calibration_digest = codec.info().calibration_digest;
  const CacheDigest digest = DigestOf(config, codec.info().version);
  const DeviceContext* chosen = nullptr;
  uint64_t most_free = 0;
  for (const DeviceContext* device : daemon.devices) {
    if (daemon.copier == nullptr || !daemon.copier->Reaches(from, device->ordinal)) continue;
    if (daemon.store->IsOpen(digest, device->ordinal)) return device;
    const uint64_t free = device->pool->capacity_bytes() - device->pool->used_bytes();
    if (chosen != nullptr && free <= most_free) continue;
    chosen = device;
    most_free = free;
  }
  if (chosen == nullptr) {
    return OfferFromHost(absl::UnavailableError(daemon.devices.empty() ? "none of this daemon's"
                                                                       : "none that can access the sender's memory"));
  }
  return chosen;
}

}  // namespace kvmanager
