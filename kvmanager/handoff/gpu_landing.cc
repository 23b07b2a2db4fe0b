#include "kvmanager/handoff/gpu_landing.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/handoff/offer_digest.h"

namespace kvmanager {

absl::Status OfferFromHost(const absl::Status& why) {
  return FieldError(absl::StatusCode::kFailedPrecondition, "gpu", std::string(why.message()),
                    "a GPU here that can take the pages");
}

bool WantsHostPages(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) && DetailOf(status).field == "gpu";
}

absl::StatusOr<Gpu*> ChooseGpu(const Gpus& gpus, const PeerCopier* copier, PageStore& store, const GpuName& from,
                               const HandOffHeader& header, const Codec& codec) {
  const CacheDigest digest = DigestOfOffer(header, codec);
  Gpu* chosen = nullptr;
  uint64_t most_free = 0;
  for (Gpu* const gpu : gpus) {
    if (copier == nullptr || !copier->Reaches(from, gpu->ordinal())) continue;
    if (store.caches().FindOpen(digest, gpu->ordinal()).has_value()) return gpu;
    const uint64_t free = gpu->pool()->capacity_bytes() - gpu->pool()->used_bytes();
    if (chosen != nullptr && free <= most_free) continue;
    chosen = gpu;
    most_free = free;
  }
  if (chosen == nullptr) {
    return OfferFromHost(
        absl::UnavailableError(gpus.empty() ? "none of this daemon's" : "none that can access the sender's memory"));
  }
  return chosen;
}

}  // namespace kvmanager
