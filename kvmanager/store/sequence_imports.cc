#include "kvmanager/store/sequence_imports.h"

#include <utility>

#include "kvmanager/base/status.h"
#include "kvmanager/store/import_beginning.h"

namespace kvmanager {

absl::StatusOr<std::unique_ptr<Importing>> SequenceImports::Begin(std::shared_ptr<const HandOffHeader> header,
                                                                  std::shared_ptr<const Codec> codec,
                                                                  OwnedRecomputeChoice recompute) {
  KV_ASSIGN_OR_RETURN(std::shared_ptr<Cache> cache,
                      parts_.caches->FindOrOpen(header->config, std::move(codec), &header->codec_version));
  absl::Status may = parts_.sequences->CheckLimit(*cache, 0);
  if (may.ok() && cache->index.chunk_tokens > 0) may = cache->IndexStaysHere();
  if (may.ok()) may = cache->LadderStaysHere();
  if (!may.ok()) {
    if (!cache->wanted) parts_.caches->CloseIfUnused(cache);
    return may;
  }
  return std::make_unique<ImportBeginning>(parts_, std::move(cache), std::move(header), std::move(recompute));
}

void SequenceImports::RoomCame() {
  if (on_room_ == nullptr) return;
  absl::AnyInvocable<void()> fn = std::move(on_room_);
  on_room_ = nullptr;
  fn();
}

}  // namespace kvmanager
