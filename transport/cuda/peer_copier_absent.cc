#include "transport/cuda/peer_copier.h"

namespace kvmanager {

class PeerCopier::Slab final : public Source {};

absl::StatusOr<std::unique_ptr<PeerCopier>> PeerCopier::Create(absl::Span<const Device* const>, int) {
  return absl::UnavailableError("built without CUDA: nvcc was not on PATH");
}
PeerCopier::~PeerCopier() = default;
bool PeerCopier::Reaches(const GpuName&, int) const { return false; }
std::shared_ptr<DeviceCopier::Source> PeerCopier::Open(const DeviceSlab&) { return std::make_shared<Slab>(); }
void PeerCopier::Copy(int, std::vector<std::shared_ptr<Source>>, std::vector<Page> pages, Copied copied) {
  copied(absl::FailedPreconditionError("built without CUDA"), std::move(pages));
}
void PeerCopier::Expect() {}
void PeerCopier::Sweep() {}

}  // namespace kvmanager
