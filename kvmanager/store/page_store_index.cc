// Indexes of sequences: made, copied, cropped and dropped with them; their jobs.
#include <utility>

#include "kvmanager/store/page_store_impl.h"

namespace kvmanager {

void PageStoreImpl::MakeIndex(Sequence& sequence, const IndexFacts& facts, uint64_t tokens) {
  sequence.index = sequence.cache->codec->NewIndex(facts);
  if (sequence.index == nullptr) return;
  KV_CHECK(sequence.cache->identity());
  sequence.index->OnTokens(tokens);
  CountIndexBytes(sequence);
}

void PageStoreImpl::CopyIndex(const Sequence& from, Sequence& to) {
  if (from.index == nullptr) return;
  to.index = from.index->Fork();
  CountIndexBytes(to);
}

void PageStoreImpl::CropIndex(Sequence& sequence, uint64_t tokens) {
  if (sequence.index == nullptr) return;
  sequence.index->Crop(tokens);
  CountIndexBytes(sequence);
}

void PageStoreImpl::DropIndex(Sequence& sequence) {
  metrics_->index_bytes.Decrement(static_cast<double>(sequence.index_bytes));
  sequence.index_bytes = 0;
  sequence.index.reset();
}

void PageStoreImpl::CountIndexBytes(Sequence& sequence) {
  const uint64_t bytes = sequence.index->bytes();
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
  if (sequence.index == nullptr) return;
  for (uint32_t layer = 0; layer < sequence.cache->layers(); ++layer) AdvanceIndex(sequence, layer);
}

std::unique_ptr<TokenSelector> PageStoreImpl::SelectorFor(Sequence& sequence, uint32_t layer, uint64_t first,
                                                          uint64_t last, IndexJobs* wait) {
  IndexJobs begin;
  sequence.index->Need(static_cast<int>(layer), first, last, &begin, wait);
  if (!begin.empty()) BeginJobs(sequence, begin);
  return sequence.index->Select(static_cast<int>(layer), first, last);
}

void PageStoreImpl::BeginJobs(const Sequence& sequence, const IndexJobs& jobs) {
  for (const std::shared_ptr<IndexJob>& job : jobs) {
    // Shared by the job's tasks and its completion: the last of them ends it.
    struct Work {
      std::shared_ptr<IndexJob> job;
      std::vector<const uint8_t*> pages;
    };
    auto work = std::make_shared<Work>();
    work->job = job;
    std::vector<PageRef> pins;
    const uint64_t page_tokens = sequence.cache->page_tokens();
    for (uint64_t i = 0; i * page_tokens < job->tokens(); ++i) {
      const PageRef ref{sequence.blocks[i], static_cast<uint32_t>(job->layer())};
      Pin(ref);
      pins.push_back(ref);
      work->pages.push_back(RawData(*sequence.cache, ref.page()));
    }
    std::vector<absl::AnyInvocable<void()>> tasks;
    for (int task = 0; task < job->tasks(); ++task) {
      tasks.push_back([work, task] { work->job->RunTask(task, work->pages); });
    }
    sequence.cache->tier->executor->Run(std::move(tasks), [this, alive = alive(), work, pins = std::move(pins)] {
      if (alive.expired()) return;
      for (const PageRef& ref : pins) Unpin(ref);
      work->job->Finish();
      metrics_->index_trainings.Increment();
      NotifyWaiters();
    });
  }
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

}  // namespace kvmanager
