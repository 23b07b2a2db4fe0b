// Indexes of sequences: made, copied, cropped and dropped with them; their jobs.
#include <algorithm>
#include <utility>

#include "kvmanager/store/page_store_impl.h"

namespace kvmanager {

void EncodeExecutor::Train(DeviceIndexJob) { KV_CHECK(false && "an executor of a GPU whose caches have indexes"); }

void PageStoreImpl::MakeIndex(Sequence& sequence, const IndexFacts& facts, uint64_t tokens) {
  const Cache& cache = *sequence.cache;
  sequence.index = cache.tier->memory().NewIndex(*cache.codec, facts);
  if (sequence.index == nullptr) return;
  KV_CHECK(cache.identity());
  if (cache.index.chunk_tokens > 0) sequence.index_places.resize(cache.layers());
  sequence.index->OnTokens(tokens);
  CountIndexBytes(sequence);
}

void PageStoreImpl::CopyIndex(const Sequence& from, Sequence& to) {
  if (from.index == nullptr) return;
  to.index = from.index->Fork();
  to.index_places = from.index_places;
  KeepFullChunks(*to.cache, to.tokens[0], to);
  CountIndexBytes(to);
}

void PageStoreImpl::CropIndex(Sequence& sequence, uint64_t tokens) {
  if (sequence.index == nullptr) return;
  sequence.index->Crop(tokens);
  KeepFullChunks(*sequence.cache, tokens, sequence);
  // What was trained on more tokens than are left is trained again.
  const bool keeps_book = sequence.index->ChoosesFrom(0, 0) <= tokens;
  for (Sequence::IndexPlaces& places : sequence.index_places) {
    if (!keeps_book) places = {};
  }
  CountIndexBytes(sequence);
}

// Codes behind are those of tokens that others do not have.
void PageStoreImpl::KeepFullChunks(const Cache& cache, uint64_t tokens, Sequence& sequence) {
  for (Sequence::IndexPlaces& places : sequence.index_places) {
    const size_t full = tokens / cache.index.chunk_tokens;
    if (places.chunks.size() > full) places.chunks.resize(full);
  }
}

void PageStoreImpl::DropIndex(Sequence& sequence) {
  metrics_->index_bytes.Decrement(static_cast<double>(sequence.index_bytes));
  sequence.index_bytes = 0;
  sequence.index.reset();
  sequence.index_places.clear();
}

void PageStoreImpl::CountIndexBytes(Sequence& sequence) {
  uint64_t bytes = sequence.index->bytes();
  for (const Sequence::IndexPlaces& places : sequence.index_places) {
    const Cache& cache = *sequence.cache;
    if (places.book != nullptr) bytes += cache.encoded_slots.bytes[cache.book_class()];
    bytes += places.chunks.size() * cache.encoded_slots.bytes[cache.chunk_class()];
  }
  metrics_->index_bytes.Increment(static_cast<double>(bytes) - static_cast<double>(sequence.index_bytes));
  sequence.index_bytes = bytes;
}

void PageStoreImpl::AdvanceIndex(Sequence& sequence, uint32_t layer) {
  IndexJobs begin;
  sequence.index->NeedNext(static_cast<int>(layer), &begin);
  if (begin.empty()) return;
  BeginJobs(sequence, begin);
  CountIndexBytes(sequence);
}

void PageStoreImpl::AdvanceIndexes(Sequence& sequence) {
  // An index in slots gets them with the first append or read.
  if (sequence.index == nullptr || !sequence.index_places.empty()) return;
  for (uint32_t layer = 0; layer < sequence.cache->layers(); ++layer) AdvanceIndex(sequence, layer);
}

void PageStoreImpl::BeginJobs(const Sequence& sequence, const IndexJobs& jobs) {
  const Cache& cache = *sequence.cache;
  for (const std::shared_ptr<IndexJob>& job : jobs) {
    std::vector<PageRef> pins;
    std::vector<const uint8_t*> pages;
    const uint64_t page_tokens = cache.page_tokens();
    for (uint64_t i = 0; i * page_tokens < job->tokens(); ++i) {
      const PageRef ref{sequence.blocks[i], static_cast<uint32_t>(job->layer())};
      Pin(ref);
      pins.push_back(ref);
      pages.push_back(RawData(cache, ref.page()));
    }
    auto done = [this, alive = alive(), job, pins = std::move(pins)](absl::Status status) {
      if (!alive.expired()) EndJob(*job, pins, std::move(status));
    };
    cache.tier->memory().Train({cache, sequence, job, std::move(pages), std::move(done)});
  }
}

void PageStoreImpl::EndJob(IndexJob& job, absl::Span<const PageRef> pins, absl::Status status) {
  for (const PageRef& ref : pins) Unpin(ref);
  if (status.ok()) {
    job.Finish();
    metrics_->index_trainings.Increment();
  } else {
    job.failure = std::move(status);
  }
  NotifyWaiters();
}

void PageStoreImpl::TakeBack(SequenceId id, TokenSelector& selector) {
  const TokenSelector::Counts counts = selector.counts();
  metrics_->index_selections.Increment(static_cast<double>(counts.selections));
  metrics_->index_cache_hits.Increment(static_cast<double>(counts.cache_hits));
  metrics_->index_cache_misses.Increment(static_cast<double>(counts.cache_misses));
  metrics_->index_cache_evictions.Increment(static_cast<double>(counts.cache_evictions));
  const auto found = sequences_.find(id);
  if (found != sequences_.end() && found->second->index != nullptr) found->second->index->TakeBack(selector);
}

// ---- slots of indexes, in memory where they take any ----

uint64_t PageStoreImpl::ChoosesFrom(SequenceId id, uint64_t position, int tokens) const {
  const auto sequence = FindSequence(id);
  if (!sequence.ok() || (*sequence)->index == nullptr) return SequenceIndex::kNever;
  return (*sequence)->index->ChoosesFrom(position, tokens);
}

std::shared_ptr<const IndexMemory> PageStoreImpl::NewIndexMemory(Tier* tier, PageId slot) {
  tier->CountIndexBytes(static_cast<int64_t>(tier->pool()->SlotBytes(slot)));
  return std::shared_ptr<const IndexMemory>(new IndexMemory{slot}, [this, alive = alive(), tier](IndexMemory* memory) {
    if (!alive.expired()) {
      tier->CountIndexBytes(-static_cast<int64_t>(tier->pool()->SlotBytes(memory->slot)));
      tier->Free(memory->slot);
    }
    delete memory;
  });
}

void PageStoreImpl::CountIndexSlots(const Sequence& sequence, LayerRange layers, uint64_t position, int tokens,
                                    uint64_t end, SlotCounts* wanted) const {
  if (sequence.index_places.empty()) return;
  const Cache& cache = *sequence.cache;
  const uint64_t from = sequence.index->ChoosesFrom(position, tokens);
  if (from > end) return;
  const uint64_t chunks = from == end ? 0 : (end - 1) / cache.index.chunk_tokens + 1;
  for (int layer = layers.first; layer < layers.end(); ++layer) {
    const Sequence::IndexPlaces& places = sequence.index_places[layer];
    wanted->encoded[cache.book_class()] += places.book == nullptr;
    wanted->encoded[cache.chunk_class()] += chunks - std::min<uint64_t>(chunks, places.chunks.size());
  }
}

void PageStoreImpl::GiveIndexSlots(Sequence& sequence, LayerRange layers, uint64_t position, int tokens, uint64_t end,
                                   Reservation* slots) {
  if (sequence.index_places.empty()) return;
  const Cache& cache = *sequence.cache;
  bool given = false;
  for (int layer = layers.first; layer < layers.end(); ++layer) {
    SlotCounts wanted;
    CountIndexSlots(sequence, layer, position, tokens, end, &wanted);
    if (wanted.none()) continue;
    given = true;
    Sequence::IndexPlaces& places = sequence.index_places[layer];
    const auto take = [&](size_t slot_class) { return NewIndexMemory(cache.tier, slots->TakeOfClass(slot_class)); };
    if (wanted.encoded[cache.book_class()] > 0) {
      places.book = take(cache.book_class());
      NoteIndexChange(sequence, static_cast<uint32_t>(layer), 0);
    }
    for (size_t i = 0; i < wanted.encoded[cache.chunk_class()]; ++i) {
      places.chunks.push_back(take(cache.chunk_class()));
      NoteIndexChange(sequence, static_cast<uint32_t>(layer), static_cast<uint32_t>(places.chunks.size()));
    }
  }
  if (given) CountIndexBytes(sequence);
}

void PageStoreImpl::NeedIndex(Sequence& sequence, uint32_t layer, uint64_t first, uint64_t last, IndexJobs* wait) {
  IndexJobs begin;
  sequence.index->Need(static_cast<int>(layer), first, last, &begin, wait);
  if (!begin.empty()) BeginJobs(sequence, begin);
}

void PageStoreImpl::NoteIndexChange(Sequence& sequence, uint32_t layer, uint32_t place) {
  for (auto& keeper : sequence.changed) {
    if (!keeper.empty() && keeper[layer].followed) keeper[layer].index.push_back(place);
  }
}

void PageStoreImpl::AddIndexChanges(const Sequence& sequence, uint32_t layer, Sequence::Changes& changed,
                                    std::vector<PagePlace>* changes) {
  for (const uint32_t place : changed.index) {
    const Sequence::IndexPlaces& places = sequence.index_places[layer];
    if (place > places.chunks.size()) continue;  // given back since
    const std::shared_ptr<const IndexMemory>& memory = place == 0 ? places.book : places.chunks[place - 1];
    if (memory == nullptr) continue;
    PagePlace change{place, PageId(), memory->slot};
    if (place < sequence.blocks.size()) {
      const Page& page = sequence.blocks[place]->pages[layer];
      change.raw = page.raw.valid() ? page.raw : page.encoded;
    }
    changes->push_back(change);
  }
  changed.index.clear();
}

}  // namespace kvmanager
