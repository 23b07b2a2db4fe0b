#include "kvmanager/memory/slab_cleaner.h"

#include <algorithm>
#include <cstring>
#include <optional>

namespace kvmanager {

void SlabCleaner::Look() {
  if (!pool_.shown()->TakeLacking()) return;
  left_ = std::max(kLookBytes, pool_.slab_bytes());
  if (!busy_) CleanNext();
}

void SlabCleaner::CleanNext() {
  busy_ = false;
  if (left_ < pool_.slab_bytes()) return;
  const std::optional<uint32_t> slab = pool_.shown()->BeginCleaning();
  if (!slab.has_value()) return;
  left_ -= pool_.slab_bytes();
  busy_ = true;
  CleanPiece(*slab, 0);
}

void SlabCleaner::CleanPiece(uint32_t slab, uint64_t offset) {
  workers_.Post(WorkerPool::Priority::kEncode, [this, slab, offset] {
    const absl::Span<uint8_t> piece = pool_.SlabData(slab).subspan(offset, kPieceBytes);
    std::memset(piece.data(), 0, piece.size());
    queue_.Post([this, slab, next = offset + piece.size()] {
      if (next < pool_.slab_bytes()) return CleanPiece(slab, next);
      pool_.shown()->EndCleaning(slab);
      CleanNext();
    });
  });
}

}  // namespace kvmanager
