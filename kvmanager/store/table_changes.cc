#include "kvmanager/store/table_changes.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager {

absl::Status TableChanges::TakeChanges(SequenceId id, int layer, std::vector<PagePlace>* changes, TableKeeper keeper) {
  KV_ASSIGN_OR_RETURN(Sequence * sequence, parts_.sequences->Find(id));
  KV_CHECK(layer >= 0 && static_cast<uint32_t>(layer) < sequence->cache->layers());
  const auto add = [&](uint32_t index) {
    const Page page = sequence->blocks[index]->pages()[layer];
    if (page.state == PageState::kFree) return;
    // Of an identity codec the raw form is the one there is.
    if (sequence->cache->identity()) {
      changes->push_back({index, page.raw.valid() ? page.raw : page.encoded, PageId()});
      return;
    }
    // The raw form of an aged page goes when its other holders let go, unannounced: it is not offered.
    const bool offered = sequence->HoldsRaw(index, layer) || page.declined;
    changes->push_back({index, offered ? page.raw : PageId(), page.encoded});
  };
  std::vector<Sequence::Changes>& layers = sequence->changed[static_cast<size_t>(keeper)];
  if (layers.empty()) layers.resize(sequence->cache->layers());
  Sequence::Changes& changed = layers[layer];
  const uint32_t pages = static_cast<uint32_t>(sequence->blocks.size());
  if (!std::exchange(changed.followed, true)) {
    for (uint32_t i = 0; i < pages; ++i) add(i);
    if (sequence->index_places.empty()) return absl::OkStatus();
    for (uint32_t i = 0; i <= sequence->index_places[layer].chunks.size(); ++i) changed.index.push_back(i);
    SequenceIndexes::AddChanges(*sequence, static_cast<uint32_t>(layer), changed, changes);
    return absl::OkStatus();
  }
  std::sort(changed.pages.begin(), changed.pages.end());
  changed.pages.erase(std::unique(changed.pages.begin(), changed.pages.end()), changed.pages.end());
  for (const uint32_t index : changed.pages) {
    if (index < pages) add(index);
  }
  changed.pages.clear();
  SequenceIndexes::AddChanges(*sequence, static_cast<uint32_t>(layer), changed, changes);
  return absl::OkStatus();
}

uint64_t TableChanges::ChangedPages(SequenceId id, TableKeeper keeper) const {
  const auto sequence = parts_.sequences->Find(id);
  uint64_t pages = 0;
  if (!sequence.ok()) return pages;
  const std::vector<Sequence::Changes>& layers = (*sequence)->changed[static_cast<size_t>(keeper)];
  if (layers.empty()) pages += (*sequence)->cache->layers() * (*sequence)->blocks.size();
  for (const Sequence::Changes& layer : layers) {
    pages += layer.followed ? layer.pages.size() + layer.index.size() : (*sequence)->blocks.size();
  }
  // Of the index a place at most for each chunk of its tokens, and one.
  if (const uint64_t chunk_tokens = (*sequence)->cache->index.chunk_tokens; chunk_tokens > 0) {
    for (const uint64_t tokens : (*sequence)->tokens) pages += tokens / chunk_tokens + 3;
  }
  return pages;
}

bool TableChanges::OwnsSlab(CacheId id, int device, uint32_t slab) const {
  const auto cache = parts_.caches->Find(id);
  if (!cache.ok() || (*cache)->config.device != device) return false;
  const SlotPool& pool = *(*cache)->tier->pool();
  return slab < pool.slabs() && pool.IsOf(slab, (*cache)->tenant);
}

uint64_t TableChanges::SparseFrom(SequenceId id, uint64_t position, int tokens) const {
  const auto sequence = parts_.sequences->Find(id);
  if (!sequence.ok() || (*sequence)->index == nullptr) return SequenceIndex::kNever;
  return (*sequence)->index->SparseFrom(position, tokens);
}

bool TableChanges::AwaitsRelease(int device) const {
  const Tier* const tier = parts_.caches->TierOf(device);
  return tier != nullptr && tier->awaits_release();
}

}  // namespace kvmanager
