// Attend and Load: what a batch of queries reads, or the pages of some tokens, in the form that rule 2 of page_store.h
// says.
//
// Where readers find pages by tables (MemoryBackend::follows_tables), a lease pins only the pages that it waits for:
// slots that a plan names stay until the plan is released. Elsewhere it lists the pages that are read, and pins them.
#include <algorithm>

#include "kvmanager/store/page_store_impl.h"

namespace kvmanager {
namespace {

// Only a raw page can be read in part: a query whose own page is kept encoded alone must be that page's last token.
// The error of entry `entry`, at `position`, where it is not; page_end: the first token behind the page.
absl::Status OwnPageIsEncoded(size_t entry, uint64_t position, uint64_t page_end) {
  return FieldError(absl::StatusCode::kFailedPrecondition, absl::StrCat("entries[", entry, "].position"),
                    absl::StrCat(position),
                    absl::StrCat(page_end - 1, " or more: earlier tokens of its page are kept encoded, as a whole"));
}

class AttendLeaseImpl final : public AttendLease, private EncodeWaiter {
 public:
  AttendLeaseImpl(PageStoreImpl* store, std::shared_ptr<Cache> cache) : EncodeWaiter(store), cache_(std::move(cache)) {
    ++cache_->leases;
    store->metrics()->attend_leases.Increment();
    if (store->spare_buffers.empty()) return;
    buffers_ = std::move(store->spare_buffers.back());
    store->spare_buffers.pop_back();
  }
  ~AttendLeaseImpl() override {
    PageStoreImpl* store = this->store();
    if (store == nullptr) return;
    for (const Chosen& chosen : chosen_) {
      if (chosen.selector != nullptr) store->TakeBack(chosen.sequence, *chosen.selector);
    }
    for (const PageRef& ref : buffers_.pins) store->Unpin(ref);
    store->attend_pages -= buffers_.pins.size();
    --cache_->leases;
    store->metrics()->attend_leases.Decrement();
    if (store->spare_buffers.size() >= PageStoreImpl::kSpareBuffersMax ||
        buffers_.pins.capacity() > PageStoreImpl::kSparePagesMax) {
      return;
    }
    buffers_.Clear();
    store->spare_buffers.push_back(std::move(buffers_));
  }

  /// Lists the pages of tokens `first` .. `last` of `sequence`, in the form that it keeps.
  void ListTokens(Sequence& sequence, uint32_t layer, uint64_t first, uint64_t last) {
    const ReadingRule rule = cache_->reading();
    for (uint32_t index = rule.PageOf(first); index <= rule.PageOf(last); ++index) {
      ListPage(sequence, layer, index, false);
    }
    EndEntry();
  }
  /// Lists the pages that an entry's queries read.
  absl::Status ListEntry(Sequence& sequence, uint32_t layer, const AttendEntry& entry) {
    const uint64_t last = entry.position + entry.tokens - 1;
    KV_RETURN_IF_ERROR(NeedIndex(sequence, {static_cast<int>(layer)}, entry));
    if (sequence.index != nullptr) {
      chosen_.resize(buffers_.ends.size() + 1);
      chosen_.back() = {sequence.id, sequence.index->Select(static_cast<int>(layer), entry.position, last)};
    }
    const ReadingRule rule = cache_->reading();
    const uint32_t last_page = rule.PageOf(last), beyond_lag = rule.AgedPages(last);
    for (uint32_t index = 0; index <= last_page; ++index) ListPage(sequence, layer, index, index < beyond_lag);
    AddOwnPages(sequence, layer, buffers_.aged.size(), entry);
    buffers_.aged.push_back(sequence.aged[layer]);
    EndEntry();
    return absl::OkStatus();
  }
  /// Finds what must be encoded before tables say what the entry's queries read. Errors: FAILED_PRECONDITION, where the
  /// layers are not equally old; UNAVAILABLE, where an index could not be made.
  absl::Status FollowEntry(Sequence& sequence, LayerRange layers, const AttendEntry& entry) {
    const size_t i = buffers_.aged.size();
    KV_RETURN_IF_ERROR(NeedIndex(sequence, layers, entry));
    buffers_.aged.push_back(sequence.aged[layers.first]);
    const uint64_t newest = entry.position + entry.tokens - 1;
    const ReadingRule rule = cache_->reading();
    const uint32_t own = rule.PageOf(newest), beyond_lag = rule.AgedPages(newest);
    for (int layer = layers.first; layer < layers.end(); ++layer) {
      const uint32_t aged = sequence.aged[layer];
      if (aged != buffers_.aged[i]) {
        return FieldError(absl::StatusCode::kFailedPrecondition, absl::StrCat("entries[", i, "].sequence"),
                          absl::StrCat(entry.sequence), "equally old in all layers that are read in one step");
      }
      // Of an identity codec pages may be on their way from another host, as all aged ones of others may.
      if (cache_->identity() && !sequence.arriving) continue;
      store()->Settle(sequence, layer, std::max(beyond_lag, std::min(aged, own + 1)), &pending_pages_);
      AddOwnPages(sequence, layer, i, entry);
    }
    return absl::OkStatus();
  }

  bool waits() const { return !pending_pages_.empty() || !pending_jobs_.empty(); }
  /// Waits for what was added; where no pages are listed it pins those that it waits for.
  absl::Status Finish() {
    KV_RETURN_IF_ERROR(status_);
    if (buffers_.pins.empty()) {
      KV_RETURN_IF_ERROR(store()->CheckAttendPages(pending_pages_.size()));
      for (const PageRef& ref : pending_pages_) PinPage(ref);
    }
    WaitFor(std::move(pending_pages_), std::move(pending_jobs_));
    return absl::OkStatus();
  }

  bool ready() const override { return is_ready(); }
  void OnReady(absl::AnyInvocable<void()> fn) override { CallWhenReady(std::move(fn)); }
  const absl::Status& status() const override {
    KV_CHECK(is_ready());
    return status_;
  }
  absl::Span<const AttentionPage> pages(size_t entry) const override {
    KV_CHECK(is_ready() && status_.ok() && entry < buffers_.ends.size());
    const size_t begin = entry == 0 ? 0 : buffers_.ends[entry - 1];
    return absl::MakeConstSpan(buffers_.pages).subspan(begin, buffers_.ends[entry] - begin);
  }
  TokenSelector* selector(size_t entry) const override {
    KV_CHECK(is_ready() && entry < buffers_.ends.size());
    return entry < chosen_.size() ? chosen_[entry].selector.get() : nullptr;
  }
  uint32_t aged(size_t entry) const override {
    KV_CHECK(entry < buffers_.aged.size());
    return buffers_.aged[entry];
  }
  uint64_t chooses_from(size_t entry) const override {
    KV_CHECK(entry < buffers_.chooses_from.size());
    return buffers_.chooses_from[entry];
  }

 private:
  void PinPage(PageRef ref) {
    store()->Pin(ref);
    ++store()->attend_pages;
    buffers_.pins.push_back(ref);
  }
  // beyond_lag: the entry's newest query reads the page encoded, though it has not aged.
  void ListPage(Sequence& sequence, uint32_t layer, uint32_t index, bool beyond_lag) {
    const PageRef ref{sequence.blocks[index], layer};
    PinPage(ref);
    AttentionPage out;
    out.lag_applies = sequence.HoldsRaw(index, layer);
    // Of an aged page the raw form is not offered even if it is still there, so that timing cannot show.
    if (out.lag_applies) out.raw = store()->RawData(*cache_, ref.page());
    if (!out.lag_applies || beyond_lag) {
      buffers_.encoded.push_back({ref, buffers_.pages.size()});
      if (PageStoreImpl::Awaits(ref)) pending_pages_.push_back(ref);
    }
    buffers_.pages.push_back(out);
  }
  void EndEntry() { buffers_.ends.push_back(buffers_.pages.size()); }

  // The index that the entry's queries choose by is made, if they do.
  absl::Status NeedIndex(Sequence& sequence, LayerRange layers, const AttendEntry& entry) {
    const size_t i = buffers_.chooses_from.size();
    buffers_.chooses_from.push_back(SequenceIndex::kNever);
    if (sequence.index == nullptr) return absl::OkStatus();
    buffers_.chooses_from.back() = sequence.index->ChoosesFrom(0, 0);
    for (int layer = layers.first; layer < layers.end(); ++layer) {
      store()->NeedIndex(sequence, static_cast<uint32_t>(layer), entry.position, entry.position + entry.tokens - 1,
                         &pending_jobs_);
    }
    for (const std::shared_ptr<IndexJob>& job : pending_jobs_) {
      if (job->failure.ok()) continue;
      return absl::UnavailableError(absl::StrCat("entries[", i, "]: the index of sequence ", entry.sequence,
                                                 " could not be made, drop it: ", job->failure.message()));
    }
    return absl::OkStatus();
  }
  // Pages that an entry's queries are themselves in and that are aged: in encoded form only their last token may ask.
  void AddOwnPages(Sequence& sequence, uint32_t layer, size_t i, const AttendEntry& entry) {
    if (cache_->identity()) return;
    const uint64_t page_tokens = cache_->page_tokens(), end = entry.position + entry.tokens;
    for (uint64_t begin = entry.position; begin < end;) {
      const uint32_t index = static_cast<uint32_t>(begin / page_tokens);
      if (sequence.HoldsRaw(index, layer)) break;
      const uint64_t page_end = (index + uint64_t{1}) * page_tokens;
      const PageRef ref{sequence.blocks[index], layer};
      if (begin + 1 != page_end) {
        const OwnPage own{ref, i, entry.position, page_end};
        // What it does not wait for is not pinned where no pages are listed.
        PageStoreImpl::Awaits(ref) ? own_pages_.push_back(own) : CheckOwnPage(own);
      } else if (!PageStoreImpl::Awaits(ref) && !ref.page().declined) {
        // Its raw slot may be another page's by now: tables are told again, without.
        PageStoreImpl::NoteChange(sequence, layer, index);
      }
      begin = page_end;
    }
  }
  struct OwnPage {
    PageRef ref;
    size_t entry;
    uint64_t position, page_end;
  };
  void CheckOwnPage(const OwnPage& own) {
    if (!status_.ok() || own.ref.page().declined) return;
    status_ = OwnPageIsEncoded(own.entry, own.position, own.page_end);
  }

  void Resolve() override {
    for (const auto& read : buffers_.encoded) {
      if (!read.ref.block->arrival.ok()) {
        status_ = read.ref.block->arrival;
        return;
      }
      const Page& page = read.ref.page();
      AttentionPage& out = buffers_.pages[read.at];
      if (page.declined) {
        out.raw = store()->Data(*cache_, page.raw);
      } else {
        out.encoded = store()->Data(*cache_, page.encoded);
      }
    }
    for (const OwnPage& own : own_pages_) CheckOwnPage(own);
  }

  struct Chosen {
    SequenceId sequence = 0;
    std::unique_ptr<TokenSelector> selector;
  };

  std::shared_ptr<Cache> cache_;  // shared: see Block
  PageStoreImpl::AttendBuffers buffers_;
  std::vector<PageRef> pending_pages_;
  std::vector<OwnPage> own_pages_;  // of pending pages
  std::vector<Chosen> chosen_;      // by entry; empty of codecs without indexes
  IndexJobs pending_jobs_;
  absl::Status status_;
};

}  // namespace

absl::Status PageStoreImpl::CheckAttendPages(uint64_t pages) const {
  if (pages <= kAttendPagesMax - attend_pages) return absl::OkStatus();
  return FieldError(absl::StatusCode::kResourceExhausted, "pages under attend leases",
                    absl::StrCat(attend_pages, " and ", pages, " more"), absl::StrCat("at most ", kAttendPagesMax));
}

absl::Status PageStoreImpl::CheckLayers(const Cache& cache, LayerRange layers) {
  if (layers.first >= 0 && layers.count >= 1 && layers.first <= cache.config.layers - layers.count) {
    return absl::OkStatus();
  }
  return InvalidField("layer", layers.first, absl::StrCat("0..", cache.config.layers - std::max(layers.count, 1)));
}

absl::Status PageStoreImpl::CheckAttend(const Cache& cache, LayerRange layers, absl::Span<const AttendEntry> entries,
                                        std::vector<Sequence*>* sequences, uint64_t* pages) const {
  KV_RETURN_IF_ERROR(CheckLayers(cache, layers));
  if (entries.size() > kEntriesMax)
    return InvalidField("entries", entries.size(), absl::StrCat("at most ", kEntriesMax));
  for (size_t i = 0; i < entries.size(); ++i) {
    const AttendEntry& entry = entries[i];
    KV_ASSIGN_OR_RETURN(Sequence * sequence, FindUsable(entry.sequence));
    const auto field = [i](absl::string_view name) { return absl::StrCat("entries[", i, "].", name); };
    if (sequence->cache.get() != &cache) {
      return InvalidField(field("sequence"), entry.sequence, absl::StrCat("a sequence of cache ", cache.id));
    }
    for (int layer = layers.first; layer < layers.end(); ++layer) {
      const uint64_t tokens = sequence->tokens[layer];
      if (entry.position >= tokens) {
        return InvalidField(field("position"), entry.position,
                            absl::StrCat("below ", tokens, ", the token count of layer ", layer));
      }
      if (entry.tokens < 1 || static_cast<uint64_t>(entry.tokens) > tokens - entry.position) {
        return InvalidField(field("tokens"), entry.tokens, absl::StrCat("1..", tokens - entry.position));
      }
    }
    *pages += (entry.position + entry.tokens - 1) / cache.page_tokens() + 1;
    sequences->push_back(sequence);
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

absl::StatusOr<std::unique_ptr<AttendLease>> PageStoreImpl::Attend(CacheId id, LayerRange layers,
                                                                   absl::Span<const AttendEntry> entries) {
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<Cache> cache, FindCache(id));
  std::vector<Sequence*> sequences;
  sequences.reserve(entries.size());
  uint64_t pages = 0;
  KV_RETURN_IF_ERROR(CheckAttend(*cache, layers, entries, &sequences, &pages));
  const bool tables = cache->tier->memory().follows_tables();
  if (!tables) {
    if (layers.count != 1) return InvalidField("layers", layers.count, "1: the pages that are read are listed");
    KV_RETURN_IF_ERROR(CheckAttendPages(pages));
  }
  const auto end_of = [&](size_t i) { return entries[i].position + entries[i].tokens; };
  SlotCounts wanted;
  for (size_t i = 0; i < entries.size(); ++i) CountIndexSlots(*sequences[i], layers, 0, 0, end_of(i), &wanted);
  Reservation slots(cache->tier->pool());
  if (!wanted.none()) KV_RETURN_IF_ERROR(cache->tier->Reserve(*cache, wanted, &slots));
  auto lease = std::make_unique<AttendLeaseImpl>(this, cache);
  for (size_t i = 0; i < entries.size(); ++i) {
    GiveIndexSlots(*sequences[i], layers, 0, 0, end_of(i), &slots);
    KV_RETURN_IF_ERROR(tables ? lease->FollowEntry(*sequences[i], layers, entries[i])
                              : lease->ListEntry(*sequences[i], layers.first, entries[i]));
  }
  const bool waits = lease->waits();
  KV_RETURN_IF_ERROR(lease->Finish());
  if (waits) metrics_->attend_waits.Increment();
  if (!lease->ready()) return lease;
  KV_RETURN_IF_ERROR(lease->status());
  // Kernels select by what the lease says; elsewhere a selector counts what it did.
  for (size_t i = 0; tables && i < entries.size(); ++i) {
    if (lease->chooses_from(i) >= end_of(i)) continue;
    const uint64_t queries = end_of(i) - std::max(lease->chooses_from(i), entries[i].position);
    metrics_->index_selections.Increment(static_cast<double>(queries * layers.count * cache->layout().kv_heads));
  }
  return lease;
}

absl::StatusOr<std::unique_ptr<AttendLease>> PageStoreImpl::Load(CacheId id, int layer,
                                                                 absl::Span<const AttendEntry> entries) {
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<Cache> cache, FindCache(id));
  std::vector<Sequence*> sequences;
  sequences.reserve(entries.size());
  uint64_t to_attend = 0, pages = 0;
  KV_RETURN_IF_ERROR(CheckAttend(*cache, layer, entries, &sequences, &to_attend));
  const uint64_t page_tokens = cache->page_tokens();
  for (const AttendEntry& entry : entries) {
    pages += (entry.position + entry.tokens - 1) / page_tokens - entry.position / page_tokens + 1;
  }
  KV_RETURN_IF_ERROR(CheckAttendPages(pages));
  auto lease = std::make_unique<AttendLeaseImpl>(this, cache);
  for (size_t i = 0; i < entries.size(); ++i) {
    lease->ListTokens(*sequences[i], layer, entries[i].position, entries[i].position + entries[i].tokens - 1);
  }
  KV_RETURN_IF_ERROR(lease->Finish());
  return lease;
}

}  // namespace kvmanager
