// Caches on a GPU: the same books as for host memory, while kernels touch the bytes.
//
// A query's pages are not pinned: the slots that a plan names stay until every plan of that time is released
// (ReleaseEpochs), so a step costs as much as it changes, however long its sequences are. Only pages that a step waits
// for are pinned, until they are encoded.
#include <algorithm>
#include <utility>

#include "kvmanager/store/own_page.h"
#include "kvmanager/store/page_store_impl.h"

namespace kvmanager {
namespace {

class DeviceLeaseImpl final : public DeviceLease, private EncodeWaiter {
 public:
  DeviceLeaseImpl(PageStoreImpl* store, std::shared_ptr<Cache> cache, std::vector<uint32_t> aged,
                  std::vector<uint64_t> chooses_from)
      : EncodeWaiter(store), cache_(std::move(cache)), aged_(std::move(aged)), chooses_from_(std::move(chooses_from)) {
    ++cache_->leases;
    store->metrics()->attend_leases.Increment();
  }
  ~DeviceLeaseImpl() override {
    PageStoreImpl* store = this->store();
    if (store == nullptr) return;
    for (const PageRef& ref : pins_) store->Unpin(ref);
    store->attend_pages -= pins_.size();
    --cache_->leases;
    store->metrics()->attend_leases.Decrement();
  }
  /// pages, jobs: to wait for.
  void Start(std::vector<PageRef> pages, IndexJobs jobs) {
    if (!pages.empty() || !jobs.empty()) store()->metrics()->attend_waits.Increment();
    for (const PageRef& ref : pages) store()->Pin(ref);
    store()->attend_pages += pages.size();
    pins_ = pages;
    WaitFor(std::move(pages), std::move(jobs));
  }

  bool ready() const override { return is_ready(); }
  void OnReady(absl::AnyInvocable<void()> fn) override { CallWhenReady(std::move(fn)); }
  uint32_t aged(size_t entry) const override {
    KV_CHECK(entry < aged_.size());
    return aged_[entry];
  }
  uint64_t chooses_from(size_t entry) const override {
    KV_CHECK(entry < chooses_from_.size());
    return chooses_from_[entry];
  }

 private:
  void Resolve() override {}

  std::shared_ptr<Cache> cache_;  // shared: see Block
  const std::vector<uint32_t> aged_;
  const std::vector<uint64_t> chooses_from_;
  std::vector<PageRef> pins_;
};

}  // namespace

absl::Status PageStoreImpl::WrongMemory(const Cache& cache) {
  return FieldError(absl::StatusCode::kFailedPrecondition, "device", absl::StrCat(cache.config.device),
                    cache.on_device() ? "host memory: this call touches pages itself"
                                      : "a GPU: this call leaves pages to its kernels");
}

absl::Status PageStoreImpl::Extend(CacheId id, int first_layer, int layers, absl::Span<const AppendEntry> entries) {
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<Cache> cache, FindCache(id));
  const auto refuse = [this](absl::Status status) {
    metrics_->refused_appends.Increment();
    return status;
  };
  if (!cache->on_device()) return refuse(WrongMemory(*cache));
  std::vector<Sequence*> sequences;
  sequences.reserve(entries.size());
  SlotCounts wanted;
  uint64_t pages = 0, tokens = 0;
  absl::Status status = CheckAppend(*cache, first_layer, layers, entries, &sequences, &wanted, &pages);
  for (size_t i = 0; i < sequences.size() && status.ok(); ++i) {
    const AppendEntry& entry = entries[i];
    CountIndexSlots(*sequences[i], first_layer, layers, entry.position, entry.tokens, entry.position + entry.tokens,
                    &wanted);
  }
  Reservation slots(cache->tier->pool());
  if (status.ok()) status = cache->tier->Reserve(*cache, wanted, &slots);
  if (!status.ok()) return refuse(std::move(status));
  for (size_t i = 0; i < sequences.size(); ++i) {
    const AppendEntry& entry = entries[i];
    GiveIndexSlots(*sequences[i], first_layer, layers, entry.position, entry.tokens, entry.position + entry.tokens,
                   &slots);
  }
  std::vector<PageRef> to_encode;
  for (int layer = first_layer; layer < first_layer + layers; ++layer) {
    CommitAppend(cache, static_cast<uint32_t>(layer), entries, sequences, &slots, &to_encode);
  }
  for (const AppendEntry& entry : entries) tokens += static_cast<uint64_t>(entry.tokens) * layers;
  metrics_->appended_tokens.Increment(static_cast<double>(tokens));
  PostEncodes(cache, std::move(to_encode));
  for (Sequence* sequence : sequences) {
    for (int layer = first_layer; sequence->index != nullptr && layer < first_layer + layers; ++layer) {
      AdvanceIndex(*sequence, static_cast<uint32_t>(layer));
    }
  }
  return absl::OkStatus();
}

void PageStoreImpl::Settle(Sequence& sequence, uint32_t layer, uint32_t end, std::vector<PageRef>* pending) {
  uint32_t& settled = sequence.settled[layer];
  for (uint32_t i = settled; i < end; ++i) {
    const PageRef ref{sequence.blocks[i], layer};
    if (Awaits(ref)) {
      pending->push_back(ref);
    } else if (i == settled) {
      if (ref.page().declined) NoteChange(sequence, layer, i);
      ++settled;
    }
  }
}

// The rule of OwnPageIsEncoded, for pages that are aged. The raw slot of such a page may be another's by now: its
// tables are told again, without.
absl::Status PageStoreImpl::CheckOwnPages(Sequence& sequence, uint32_t layer, size_t i, const AttendEntry& entry) {
  const uint64_t page_tokens = sequence.cache->page_tokens(), end = entry.position + entry.tokens;
  for (uint64_t begin = entry.position; begin < end;) {
    const uint32_t index = static_cast<uint32_t>(begin / page_tokens);
    if (sequence.HoldsRaw(index, layer)) break;
    const uint64_t page_end = (index + uint64_t{1}) * page_tokens;
    const Page& page = sequence.blocks[index]->pages[layer];
    // What the codec keeps raw is read raw as soon as it is here.
    const bool raw = page.declined || sequence.cache->keeps_raw(index, layer);
    if (!page.awaits_encoding() && !raw) {
      if (begin + 1 != page_end) {
        return OwnPageIsEncoded(i, entry.position, page_end);
      }
      NoteChange(sequence, layer, index);
    }
    begin = page_end;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<DeviceLease>> PageStoreImpl::Read(CacheId id, int first_layer, int layers,
                                                                 absl::Span<const AttendEntry> entries) {
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<Cache> cache, FindCache(id));
  if (!cache->on_device()) return WrongMemory(*cache);
  std::vector<Sequence*> sequences;
  sequences.reserve(entries.size());
  uint64_t pages = 0;
  KV_RETURN_IF_ERROR(CheckAttend(*cache, first_layer, layers, entries, &sequences, &pages));
  SlotCounts wanted;
  const auto end_of = [&](size_t i) { return entries[i].position + entries[i].tokens; };
  for (size_t i = 0; i < entries.size(); ++i) {
    CountIndexSlots(*sequences[i], first_layer, layers, 0, 0, end_of(i), &wanted);
  }
  Reservation slots(cache->tier->pool());
  KV_RETURN_IF_ERROR(cache->tier->Reserve(*cache, wanted, &slots));
  IndexJobs jobs;
  std::vector<uint64_t> chooses_from(entries.size(), SequenceIndex::kNever);
  for (size_t i = 0; i < entries.size(); ++i) {
    Sequence& sequence = *sequences[i];
    if (sequence.index == nullptr) continue;
    GiveIndexSlots(sequence, first_layer, layers, 0, 0, end_of(i), &slots);
    chooses_from[i] = sequence.index->ChoosesFrom(0, 0);
    for (int layer = first_layer; layer < first_layer + layers; ++layer) {
      NeedIndex(sequence, static_cast<uint32_t>(layer), entries[i].position, end_of(i) - 1, &jobs);
    }
    for (const std::shared_ptr<IndexJob>& job : jobs) {
      if (job->failure.ok()) continue;
      return absl::UnavailableError(absl::StrCat("entries[", i, "]: the index of sequence ", entries[i].sequence,
                                                 " could not be made, drop it: ", job->failure.message()));
    }
  }
  std::vector<PageRef> pending;
  std::vector<uint32_t> aged(entries.size());
  for (size_t i = 0; i < entries.size(); ++i) {
    Sequence& sequence = *sequences[i];
    const uint64_t newest = entries[i].position + entries[i].tokens - 1;
    aged[i] = sequence.aged[first_layer];
    for (int layer = first_layer; layer < first_layer + layers; ++layer) {
      if (sequence.aged[layer] != aged[i]) {
        return FieldError(absl::StatusCode::kFailedPrecondition, absl::StrCat("entries[", i, "].sequence"),
                          absl::StrCat(entries[i].sequence), "equally old in all layers that are read in one step");
      }
      // What the newest query reads encoded: what is aged for the sequence, or beyond the query's lag.
      const uint32_t own = static_cast<uint32_t>(newest / cache->page_tokens());
      const uint32_t far = cache->reading().AgedPages(newest);
      // Of an identity codec pages may be on their way from another host, as all aged ones of others may.
      if (cache->identity() && !sequence.arriving) continue;
      Settle(sequence, layer, std::max(far, std::min(sequence.aged[layer], own + 1)), &pending);
      if (cache->identity()) continue;
      KV_RETURN_IF_ERROR(CheckOwnPages(sequence, static_cast<uint32_t>(layer), i, entries[i]));
    }
  }
  KV_RETURN_IF_ERROR(CheckAttendPages(pending.size()));
  for (size_t i = 0; i < entries.size() && jobs.empty() && pending.empty(); ++i) {
    if (chooses_from[i] >= end_of(i)) continue;
    const uint64_t choosing = end_of(i) - std::max(chooses_from[i], entries[i].position);
    metrics_->index_selections.Increment(static_cast<double>(choosing * layers * cache->layout().kv_heads));
  }
  auto lease = std::make_unique<DeviceLeaseImpl>(this, cache, std::move(aged), std::move(chooses_from));
  lease->Start(std::move(pending), std::move(jobs));
  return lease;
}

absl::Status PageStoreImpl::TakeChanges(SequenceId id, int layer, std::vector<PagePlace>* changes, TableKeeper keeper) {
  KV_ASSIGN_OR_RETURN(Sequence * sequence, FindSequence(id));
  if (!sequence->cache->on_device()) return WrongMemory(*sequence->cache);
  KV_CHECK(layer >= 0 && static_cast<uint32_t>(layer) < sequence->cache->layers());
  const auto add = [&](uint32_t index) {
    const Page& page = sequence->blocks[index]->pages[layer];
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
  Sequence::Changes& changed = sequence->changed[static_cast<size_t>(keeper)][layer];
  const uint32_t pages = static_cast<uint32_t>(sequence->blocks.size());
  if (!std::exchange(changed.followed, true)) {
    for (uint32_t i = 0; i < pages; ++i) add(i);
    if (sequence->index_places.empty()) return absl::OkStatus();
    for (uint32_t i = 0; i <= sequence->index_places[layer].chunks.size(); ++i) changed.index.push_back(i);
    AddIndexChanges(*sequence, static_cast<uint32_t>(layer), changed, changes);
    return absl::OkStatus();
  }
  std::sort(changed.pages.begin(), changed.pages.end());
  changed.pages.erase(std::unique(changed.pages.begin(), changed.pages.end()), changed.pages.end());
  for (const uint32_t index : changed.pages) {
    if (index < pages) add(index);
  }
  changed.pages.clear();
  AddIndexChanges(*sequence, static_cast<uint32_t>(layer), changed, changes);
  return absl::OkStatus();
}

uint64_t PageStoreImpl::ChangedPages(SequenceId id, TableKeeper keeper) const {
  const auto sequence = FindSequence(id);
  uint64_t pages = 0;
  if (!sequence.ok()) return pages;
  for (const Sequence::Changes& layer : (*sequence)->changed[static_cast<size_t>(keeper)]) {
    pages += layer.followed ? layer.pages.size() + layer.index.size() : (*sequence)->blocks.size();
  }
  // Of the index a place at most for each chunk of its tokens, and one.
  if (const uint64_t chunk_tokens = (*sequence)->cache->index.chunk_tokens; chunk_tokens > 0) {
    for (const uint64_t tokens : (*sequence)->tokens) pages += tokens / chunk_tokens + 3;
  }
  return pages;
}

bool PageStoreImpl::OwnsSlab(CacheId id, uint32_t slab) const {
  const auto cache = FindCache(id);
  if (!cache.ok() || !(*cache)->on_device()) return false;
  const SlotPool& pool = *(*cache)->tier->pool();
  return slab < pool.slabs() && pool.IsOf(slab, (*cache)->tenant);
}

}  // namespace kvmanager
