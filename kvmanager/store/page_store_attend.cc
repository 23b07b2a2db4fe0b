// Attend and Load: pin what a batch of queries reads, or the pages of some tokens, in the form that rule 2 of
// page_store.h says.
#include <algorithm>

#include "kvmanager/store/page_store_impl.h"

namespace kvmanager {
namespace {

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
    buffers_.pins.clear();
    buffers_.pages.clear();
    buffers_.encoded.clear();
    buffers_.ends.clear();
    store->spare_buffers.push_back(std::move(buffers_));
  }

  /// Adds the pages that queries `first` .. `last` (positions) of `sequence` read.
  void AddEntry(Sequence& sequence, uint32_t layer, uint64_t first, uint64_t last) {
    if (sequence.index != nullptr) {
      chosen_.resize(buffers_.ends.size() + 1);
      chosen_.back() = {sequence.id, store()->SelectorFor(sequence, layer, first, last, &pending_jobs_)};
    }
    const ReadingRule rule = cache_->reading();
    const uint32_t last_page = rule.PageOf(last), beyond_lag = rule.AgedPages(last);
    for (uint32_t index = 0; index <= last_page; ++index) AddPage(sequence, layer, index, index < beyond_lag);
    EndEntry(uint64_t{last_page} + 1);
  }
  /// Adds the pages of tokens `first` .. `last` of `sequence`, in the form that it keeps.
  void AddTokens(Sequence& sequence, uint32_t layer, uint64_t first, uint64_t last) {
    const int page_tokens = cache_->page_tokens();
    const uint64_t first_page = first / page_tokens, last_page = last / page_tokens;
    for (uint64_t index = first_page; index <= last_page; ++index) {
      AddPage(sequence, layer, static_cast<uint32_t>(index), false);
    }
    EndEntry(last_page - first_page + 1);
  }
  bool waits() const { return !pending_pages_.empty() || !pending_jobs_.empty(); }
  void Finish() { WaitFor(std::move(pending_pages_), std::move(pending_jobs_)); }

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

 private:
  // beyond_lag: the entry's newest query reads the page encoded, though it has not aged.
  void AddPage(Sequence& sequence, uint32_t layer, uint32_t index, bool beyond_lag) {
    const PageRef ref{sequence.blocks[index], layer};
    store()->Pin(ref);
    buffers_.pins.push_back(ref);
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
  void EndEntry(uint64_t pages) {
    store()->attend_pages += pages;
    buffers_.ends.push_back(buffers_.pages.size());
  }

  struct Chosen {
    SequenceId sequence = 0;
    std::unique_ptr<TokenSelector> selector;
  };

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
  }

  std::shared_ptr<Cache> cache_;  // shared: see Block
  PageStoreImpl::AttendBuffers buffers_;
  std::vector<PageRef> pending_pages_;
  std::vector<Chosen> chosen_;  // by entry; empty of codecs without indexes
  IndexJobs pending_jobs_;
  absl::Status status_;
};

}  // namespace

absl::Status PageStoreImpl::CheckAttendPages(uint64_t pages) const {
  if (pages <= kAttendPagesMax - attend_pages) return absl::OkStatus();
  return FieldError(absl::StatusCode::kResourceExhausted, "pages under attend leases",
                    absl::StrCat(attend_pages, " and ", pages, " more"), absl::StrCat("at most ", kAttendPagesMax));
}

absl::Status PageStoreImpl::CheckAttend(const Cache& cache, int first_layer, int layers,
                                        absl::Span<const AttendEntry> entries, std::vector<Sequence*>* sequences,
                                        uint64_t* pages) const {
  if (first_layer < 0 || layers < 1 || first_layer > cache.config.layers - layers) {
    return InvalidField("layer", first_layer, absl::StrCat("0..", cache.config.layers - std::max(layers, 1)));
  }
  if (entries.size() > kEntriesMax)
    return InvalidField("entries", entries.size(), absl::StrCat("at most ", kEntriesMax));
  for (size_t i = 0; i < entries.size(); ++i) {
    const AttendEntry& entry = entries[i];
    KV_ASSIGN_OR_RETURN(Sequence * sequence, FindUsable(entry.sequence));
    const auto field = [i](absl::string_view name) { return absl::StrCat("entries[", i, "].", name); };
    if (sequence->cache.get() != &cache) {
      return InvalidField(field("sequence"), entry.sequence, absl::StrCat("a sequence of cache ", cache.id));
    }
    for (int layer = first_layer; layer < first_layer + layers; ++layer) {
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

absl::StatusOr<std::unique_ptr<AttendLease>> PageStoreImpl::Attend(CacheId id, int layer,
                                                                   absl::Span<const AttendEntry> entries) {
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<Cache> cache, FindCache(id));
  if (cache->on_device()) return WrongMemory(*cache);
  std::vector<Sequence*> sequences;
  sequences.reserve(entries.size());
  uint64_t pages = 0;
  KV_RETURN_IF_ERROR(CheckAttend(*cache, layer, 1, entries, &sequences, &pages));
  KV_RETURN_IF_ERROR(CheckAttendPages(pages));
  auto lease = std::make_unique<AttendLeaseImpl>(this, cache);
  for (size_t i = 0; i < entries.size(); ++i) {
    lease->AddEntry(*sequences[i], layer, entries[i].position, entries[i].position + entries[i].tokens - 1);
  }
  if (lease->waits()) metrics_->attend_waits.Increment();
  lease->Finish();
  return lease;
}

absl::StatusOr<std::unique_ptr<AttendLease>> PageStoreImpl::Load(CacheId id, int layer,
                                                                 absl::Span<const AttendEntry> entries) {
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<Cache> cache, FindCache(id));
  std::vector<Sequence*> sequences;
  sequences.reserve(entries.size());
  uint64_t to_attend = 0, pages = 0;
  KV_RETURN_IF_ERROR(CheckAttend(*cache, layer, 1, entries, &sequences, &to_attend));
  const uint64_t page_tokens = cache->page_tokens();
  for (const AttendEntry& entry : entries) {
    pages += (entry.position + entry.tokens - 1) / page_tokens - entry.position / page_tokens + 1;
  }
  KV_RETURN_IF_ERROR(CheckAttendPages(pages));
  auto lease = std::make_unique<AttendLeaseImpl>(this, cache);
  for (size_t i = 0; i < entries.size(); ++i) {
    lease->AddTokens(*sequences[i], layer, entries[i].position, entries[i].position + entries[i].tokens - 1);
  }
  lease->Finish();
  return lease;
}

}  // namespace kvmanager
