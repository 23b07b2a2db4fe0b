#include "kvmanager/store/sequence_indexes.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/status.h"
#include "kvmanager/store/memory_backend.h"

namespace kvmanager {

void EncodeExecutor::Train(DeviceIndexJob) { KV_CHECK(false && "an executor of a GPU whose caches have indexes"); }

void SequenceIndexes::Make(Sequence& sequence, const IndexFacts& facts, uint64_t tokens) {
  const Cache& cache = *sequence.cache;
  sequence.index = cache.tier->memory().NewIndex(*cache.codec, facts);
  if (sequence.index == nullptr) return;
  KV_CHECK(cache.identity());
  if (cache.index.chunk_tokens > 0) sequence.index_places.resize(cache.layers());
  sequence.index->OnTokens(tokens);
  CountIndexBytes(sequence);
}

void SequenceIndexes::Copy(const Sequence& from, Sequence& to) {
  if (from.index == nullptr) return;
  to.index = from.index->Fork();
  to.index_places = from.index_places;
  KeepFullChunks(*to.cache, to.tokens[0], to);
  CountIndexBytes(to);
}

void SequenceIndexes::Crop(Sequence& sequence, uint64_t tokens) {
  if (sequence.index == nullptr) return;
  sequence.index->Crop(tokens);
  KeepFullChunks(*sequence.cache, tokens, sequence);
  // What was trained on more tokens than are left is trained again.
  const bool keeps_book = sequence.index->SparseFrom(0, 0) <= tokens;
  for (Sequence::IndexPlaces& places : sequence.index_places) {
    if (!keeps_book) places = {};
  }
  CountIndexBytes(sequence);
}

// Codes behind are those of tokens that others do not have.
void SequenceIndexes::KeepFullChunks(const Cache& cache, uint64_t tokens, Sequence& sequence) {
  for (Sequence::IndexPlaces& places : sequence.index_places) {
    const size_t full = tokens / cache.index.chunk_tokens;
    if (places.chunks.size() > full) places.chunks.resize(full);
  }
}

void SequenceIndexes::Drop(Sequence& sequence) {
  parts_.metrics->index_bytes.Decrement(static_cast<double>(sequence.index_bytes));
  sequence.index_bytes = 0;
  sequence.index.reset();
  sequence.index_places.clear();
}

void SequenceIndexes::CountIndexBytes(Sequence& sequence) {
  uint64_t bytes = sequence.index->bytes();
  for (const Sequence::IndexPlaces& places : sequence.index_places) {
    const Cache& cache = *sequence.cache;
    if (places.book != nullptr) bytes += cache.encoded_slots.bytes[cache.book_class()];
    bytes += places.chunks.size() * cache.encoded_slots.bytes[cache.chunk_class()];
  }
  parts_.metrics->index_bytes.Increment(static_cast<double>(bytes) - static_cast<double>(sequence.index_bytes));
  sequence.index_bytes = bytes;
}

void SequenceIndexes::Advance(Sequence& sequence, uint32_t layer) {
  IndexJobs begin;
  sequence.index->NeedNext(static_cast<int>(layer), &begin);
  if (begin.empty()) return;
  BeginJobs(sequence, begin);
  CountIndexBytes(sequence);
}

void SequenceIndexes::AdvanceAll(Sequence& sequence) {
  // An index in slots gets them with the first append or read.
  if (sequence.index == nullptr || !sequence.index_places.empty()) return;
  for (uint32_t layer = 0; layer < sequence.cache->layers(); ++layer) Advance(sequence, layer);
}

void SequenceIndexes::BeginJobs(const Sequence& sequence, const IndexJobs& jobs) {
  const Cache& cache = *sequence.cache;
  for (const std::shared_ptr<IndexJob>& job : jobs) {
    std::vector<PageRef> pins;
    std::vector<const uint8_t*> pages;
    const uint64_t page_tokens = cache.page_tokens();
    for (uint64_t i = 0; i * page_tokens < job->tokens(); ++i) {
      const PageRef ref{sequence.blocks[i], static_cast<uint32_t>(job->layer())};
      parts_.blocks->Pin(ref);
      pins.push_back(ref);
      pages.push_back(RawPageData(cache, ref.page()));
    }
    auto done = [this, alive = parts_.alive, job, pins = std::move(pins)](absl::Status status) {
      if (!alive.expired()) EndJob(*job, pins, std::move(status));
    };
    cache.tier->memory().Train({cache, sequence, job, std::move(pages), std::move(done)});
  }
}

void SequenceIndexes::EndJob(IndexJob& job, absl::Span<const PageRef> pins, absl::Status status) {
  for (const PageRef& ref : pins) parts_.blocks->Unpin(ref);
  if (status.ok()) {
    job.Finish();
    parts_.metrics->index_trainings.Increment();
  } else {
    job.failure = std::move(status);
  }
  parts_.encodes->NotifyWaiters();
}

void SequenceIndexes::TakeBack(Sequence* sequence, TokenSelector& selector) {
  const TokenSelector::Counts counts = selector.counts();
  parts_.metrics->index_selections.Increment(static_cast<double>(counts.selections));
  parts_.metrics->index_cache_hits.Increment(static_cast<double>(counts.cache_hits));
  parts_.metrics->index_cache_misses.Increment(static_cast<double>(counts.cache_misses));
  parts_.metrics->index_cache_evictions.Increment(static_cast<double>(counts.cache_evictions));
  if (sequence != nullptr && sequence->index != nullptr) sequence->index->TakeBack(selector);
}

// ---- slots of indexes, in memory where they take any ----

std::shared_ptr<const IndexMemory> SequenceIndexes::NewIndexMemory(Tier* tier, PageId slot) {
  tier->Count(&Tier::Bytes::index, static_cast<int64_t>(tier->pool()->SlotBytes(slot)));
  return std::shared_ptr<const IndexMemory>(new IndexMemory{slot}, [alive = parts_.alive, tier](IndexMemory* memory) {
    if (!alive.expired()) {
      tier->Count(&Tier::Bytes::index, -static_cast<int64_t>(tier->pool()->SlotBytes(memory->slot)));
      tier->Free(memory->slot);
    }
    delete memory;
  });
}

void SequenceIndexes::CountSlots(const Sequence& sequence, LayerRange layers, uint64_t position, int tokens,
                                 uint64_t end, SlotCounts* wanted) const {
  if (sequence.index_places.empty()) return;
  const Cache& cache = *sequence.cache;
  const uint64_t from = sequence.index->SparseFrom(position, tokens);
  if (from > end) return;
  const uint64_t chunks = from == end ? 0 : (end - 1) / cache.index.chunk_tokens + 1;
  for (int layer = layers.first; layer < layers.end(); ++layer) {
    const Sequence::IndexPlaces& places = sequence.index_places[layer];
    wanted->encoded[cache.book_class()] += places.book == nullptr;
    wanted->encoded[cache.chunk_class()] += chunks - std::min<uint64_t>(chunks, places.chunks.size());
  }
}

void SequenceIndexes::GiveSlots(Sequence& sequence, LayerRange layers, uint64_t position, int tokens, uint64_t end,
                                Reservation* slots) {
  if (sequence.index_places.empty()) return;
  const Cache& cache = *sequence.cache;
  bool given = false;
  for (int layer = layers.first; layer < layers.end(); ++layer) {
    SlotCounts wanted;
    CountSlots(sequence, layer, position, tokens, end, &wanted);
    if (wanted.none()) continue;
    given = true;
    Sequence::IndexPlaces& places = sequence.index_places[layer];
    const auto take = [&](size_t slot_class) { return NewIndexMemory(cache.tier, slots->TakeOfClass(slot_class)); };
    if (wanted.encoded[cache.book_class()] > 0) {
      places.book = take(cache.book_class());
      sequence.NoteIndexChange(static_cast<uint32_t>(layer), 0);
    }
    for (size_t i = 0; i < wanted.encoded[cache.chunk_class()]; ++i) {
      places.chunks.push_back(take(cache.chunk_class()));
      sequence.NoteIndexChange(static_cast<uint32_t>(layer), static_cast<uint32_t>(places.chunks.size()));
    }
  }
  if (given) CountIndexBytes(sequence);
}

void SequenceIndexes::Need(Sequence& sequence, uint32_t layer, uint64_t first, uint64_t last, IndexJobs* wait) {
  IndexJobs begin;
  sequence.index->Need(static_cast<int>(layer), first, last, &begin, wait);
  if (!begin.empty()) BeginJobs(sequence, begin);
}

void SequenceIndexes::AddChanges(const Sequence& sequence, uint32_t layer, Sequence::Changes& changed,
                                 std::vector<PagePlace>* changes) {
  for (const uint32_t place : changed.index) {
    const Sequence::IndexPlaces& places = sequence.index_places[layer];
    if (place > places.chunks.size()) continue;  // given back since
    const std::shared_ptr<const IndexMemory>& memory = place == 0 ? places.book : places.chunks[place - 1];
    if (memory == nullptr) continue;
    PagePlace change{place, PageId(), memory->slot};
    if (place < sequence.blocks.size()) {
      const Page page = sequence.blocks[place]->pages()[layer];
      change.raw = page.raw.valid() ? page.raw : page.encoded;
    }
    changes->push_back(change);
  }
  changed.index.clear();
}

}  // namespace kvmanager
