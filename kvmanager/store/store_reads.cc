#include "kvmanager/store/store_reads.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/status.h"
#include "kvmanager/store/memory_backend.h"

namespace kvmanager {
namespace {

// Only a raw page can be read in part: a query whose own page is kept encoded alone must be that page's last token.
// The error of entry `entry`, at `position`, where it is not; page_end: the first token behind the page.
absl::Status OwnPageIsEncoded(size_t entry, uint64_t position, uint64_t page_end) {
  return FieldError(absl::StatusCode::kFailedPrecondition, absl::StrCat("entries[", entry, "].position"),
                    absl::StrCat(position),
                    absl::StrCat(page_end - 1, " or more: earlier tokens of its page are kept encoded, as a whole"));
}

}  // namespace

class AttendLeaseImpl final : public AttendLease, private EncodeWaiter {
 public:
  AttendLeaseImpl(StoreReads* reads, std::shared_ptr<Cache> cache)
      : EncodeWaiter(reads->parts().encodes, reads->parts().alive), reads_(reads), cache_(std::move(cache)) {
    ++cache_->leases;
    parts().metrics->attend_leases.Increment();
    buffers_ = reads_->TakeBuffers();
  }
  ~AttendLeaseImpl() override {
    if (store_has_gone()) return;
    for (const Chosen& chosen : chosen_) {
      if (chosen.selector == nullptr) continue;
      const auto sequence = parts().sequences->Find(chosen.sequence);
      parts().indexes->TakeBack(sequence.ok() ? *sequence : nullptr, *chosen.selector);
    }
    parts().metrics->attend_leases.Decrement();
    reads_->GiveBack({std::move(cache_), std::move(buffers_), counted_});
  }

  /// Counts pages that it is about to pin.
  void CountPages(uint64_t pages) {
    reads_->pages().Add(cache_->payer, pages);
    counted_ += pages;
  }

  /// Lists the pages of tokens `first` .. `last` of `sequence`, in the form that it keeps.
  void ListTokens(Sequence& sequence, uint32_t layer, uint64_t first, uint64_t last) {
    const ReadingRule rule = cache_->reading();
    for (uint32_t index = rule.PageOf(first); index <= rule.PageOf(last); ++index) {
      ListPage(sequence, layer, index, false);
    }
    EndEntry();
  }
  /// Lists the next pages that an entry's queries read, from page `*next` on, and at most `*left`: both go on. True:
  /// that was the entry's last.
  absl::StatusOr<bool> ListEntry(Sequence& sequence, uint32_t layer, const AttendEntry& entry, uint32_t* next,
                                 uint64_t* left) {
    const uint64_t last = entry.position + entry.tokens - 1;
    if (*next == 0) {
      KV_RETURN_IF_ERROR(NeedIndex(sequence, {static_cast<int>(layer)}, entry));
      if (sequence.index != nullptr) {
        chosen_.resize(buffers_.ends.size() + 1);
        chosen_.back() = {sequence.id, sequence.index->Select(static_cast<int>(layer), entry.position, last)};
      }
    }
    const ReadingRule rule = cache_->reading();
    const uint32_t last_page = rule.PageOf(last), beyond_lag = rule.AgedPages(last);
    for (; *next <= last_page && *left > 0; ++*next, --*left) ListPage(sequence, layer, *next, *next < beyond_lag);
    if (*next <= last_page) return false;
    AddOwnPages(sequence, layer, buffers_.aged.size(), entry);
    buffers_.aged.push_back(sequence.aged[layer]);
    EndEntry();
    return true;
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
      Settle(sequence, layer, std::max(beyond_lag, std::min(aged, own + 1)), &pending_pages_);
      AddOwnPages(sequence, layer, i, entry);
    }
    return absl::OkStatus();
  }

  /// Adds to `pending` the pages of a layer before page `end` that are still to be encoded.
  static void Settle(Sequence& sequence, uint32_t layer, uint32_t end, std::vector<PageRef>* pending) {
    uint32_t& settled = sequence.settled[layer];
    for (uint32_t i = settled; i < end; ++i) {
      const PageRef ref{sequence.blocks[i], layer};
      if (EncodeJobs::Awaits(ref)) {
        pending->push_back(ref);
      } else if (i == settled) {
        if (ref.page().declined) sequence.NoteChange(layer, i);
        ++settled;
      }
    }
  }

  bool waits() const { return !pending_pages_.empty() || !pending_jobs_.empty(); }
  /// Waits for what was added; where no pages are listed it pins those that it waits for.
  absl::Status Finish() {
    KV_RETURN_IF_ERROR(status_);
    if (buffers_.pins.empty()) {
      KV_RETURN_IF_ERROR(reads_->pages().Check(cache_->payer, pending_pages_.size()));
      CountPages(pending_pages_.size());
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
  uint64_t sparse_from(size_t entry) const override {
    KV_CHECK(entry < buffers_.sparse_from.size());
    return buffers_.sparse_from[entry];
  }

 private:
  void PinPage(PageRef ref) {
    parts().blocks->Pin(ref);
    buffers_.pins.push_back(ref);
  }
  // beyond_lag: the entry's newest query reads the page encoded, though it has not aged.
  void ListPage(Sequence& sequence, uint32_t layer, uint32_t index, bool beyond_lag) {
    const PageRef ref{sequence.blocks[index], layer};
    PinPage(ref);
    AttentionPage out;
    out.lag_applies = sequence.HoldsRaw(index, layer);
    // Of an aged page the raw form is not offered even if it is still there, so that timing cannot show.
    if (out.lag_applies) out.raw = RawPageData(*cache_, ref.page());
    if (!out.lag_applies || beyond_lag) {
      if (EncodeJobs::Awaits(ref)) {
        pending_pages_.push_back(ref);
        buffers_.encoded.push_back({ref, buffers_.pages.size()});
      } else {
        ReadEncoded(ref, &out);
      }
    }
    buffers_.pages.push_back(out);
  }
  // Of a page that nothing is awaited for.
  void ReadEncoded(const PageRef& ref, AttentionPage* out) {
    if (ref.block->never_arrives) {
      status_.Update(cache_->failed_arrivals.at(ref.block));
      return;
    }
    const Page page = ref.page();
    if (page.declined) {
      out->raw = PageData(*cache_, page.raw);
    } else {
      out->encoded = PageData(*cache_, page.encoded);
      out->rung = page.rung;
    }
  }
  void EndEntry() { buffers_.ends.push_back(buffers_.pages.size()); }

  // The index that the entry's queries choose by is made, if they do.
  absl::Status NeedIndex(Sequence& sequence, LayerRange layers, const AttendEntry& entry) {
    const size_t i = buffers_.sparse_from.size();
    buffers_.sparse_from.push_back(SequenceIndex::kNever);
    if (sequence.index == nullptr) return absl::OkStatus();
    buffers_.sparse_from.back() = sequence.index->SparseFrom(0, 0);
    for (int layer = layers.first; layer < layers.end(); ++layer) {
      parts().indexes->Need(sequence, static_cast<uint32_t>(layer), entry.position, entry.position + entry.tokens - 1,
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
        EncodeJobs::Awaits(ref) ? own_pages_.push_back(own) : CheckOwnPage(own);
      } else if (!EncodeJobs::Awaits(ref) && !ref.page().declined) {
        // Its raw slot may be another page's by now: tables are told again, without.
        sequence.NoteChange(layer, index);
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
    for (const auto& read : buffers_.encoded) ReadEncoded(read.ref, &buffers_.pages[read.at]);
    if (!status_.ok()) return;
    for (const OwnPage& own : own_pages_) CheckOwnPage(own);
  }

  struct Chosen {
    SequenceId sequence = 0;
    std::unique_ptr<TokenSelector> selector;
  };

  const StoreReads::Parts& parts() const { return reads_->parts(); }

  StoreReads* const reads_;
  std::shared_ptr<Cache> cache_;  // shared: see Block
  ReadBuffers buffers_;
  uint64_t counted_ = 0;  // pages, pinned or about to be
  std::vector<PageRef> pending_pages_;
  std::vector<OwnPage> own_pages_;  // of pending pages
  std::vector<Chosen> chosen_;      // by entry; empty of codecs without indexes
  IndexJobs pending_jobs_;
  absl::Status status_;
};

absl::Status StoreReads::CheckEntry(const Cache& cache, LayerRange layers, absl::Span<const AttendEntry> entries,
                                    size_t i, Sequence** sequence) const {
  const AttendEntry& entry = entries[i];
  KV_ASSIGN_OR_RETURN(*sequence, parts_.sequences->FindUsable(entry.sequence));
  const auto field = [i](absl::string_view name) { return absl::StrCat("entries[", i, "].", name); };
  if ((*sequence)->cache.get() != &cache) {
    return InvalidField(field("sequence"), entry.sequence, absl::StrCat("a sequence of cache ", cache.id));
  }
  for (int layer = layers.first; layer < layers.end(); ++layer) {
    const uint64_t tokens = (*sequence)->tokens[layer];
    if (entry.position >= tokens) {
      return InvalidField(field("position"), entry.position,
                          absl::StrCat("below ", tokens, ", the token count of layer ", layer));
    }
    if (entry.tokens < 1 || static_cast<uint64_t>(entry.tokens) > tokens - entry.position) {
      return InvalidField(field("tokens"), entry.tokens, absl::StrCat("1..", tokens - entry.position));
    }
  }
  return absl::OkStatus();
}

absl::Status StoreReads::Check(const Cache& cache, LayerRange layers, absl::Span<const AttendEntry> entries,
                               std::vector<Sequence*>* sequences, uint64_t* pages) const {
  KV_RETURN_IF_ERROR(cache.CheckLayers(layers));
  if (entries.size() > kStepEntriesMax)
    return InvalidField("entries", entries.size(), absl::StrCat("at most ", kStepEntriesMax));
  for (size_t i = 0; i < entries.size(); ++i) {
    Sequence* sequence = nullptr;
    KV_RETURN_IF_ERROR(CheckEntry(cache, layers, entries, i, &sequence));
    *pages += (entries[i].position + entries[i].tokens - 1) / cache.page_tokens() + 1;
    sequences->push_back(sequence);
  }
  return absl::OkStatus();
}

absl::Status StoreReads::GiveSlots(const Cache& cache, LayerRange layers, absl::Span<const AttendEntry> entries,
                                   absl::Span<Sequence* const> sequences) {
  const auto end_of = [&](size_t i) { return entries[i].position + entries[i].tokens; };
  SlotCounts wanted;
  for (size_t i = 0; i < entries.size(); ++i) {
    parts_.indexes->CountSlots(*sequences[i], layers, 0, 0, end_of(i), &wanted);
  }
  Reservation slots(cache.tier->pool());
  if (!wanted.none()) KV_RETURN_IF_ERROR(cache.tier->Reserve(cache, wanted, &slots));
  for (size_t i = 0; i < entries.size(); ++i) {
    parts_.indexes->GiveSlots(*sequences[i], layers, 0, 0, end_of(i), &slots);
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> StoreReads::Finish(AttendLeaseImpl& lease) {
  const bool waits = lease.waits();
  KV_RETURN_IF_ERROR(lease.Finish());
  if (waits) parts_.metrics->attend_waits.Increment();
  if (!lease.ready()) return false;
  KV_RETURN_IF_ERROR(lease.status());
  return true;
}

absl::StatusOr<std::unique_ptr<AttendLease>> StoreReads::Attend(CacheId id, LayerRange layers,
                                                                absl::Span<const AttendEntry> entries) {
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<Cache> cache, parts_.caches->Find(id));
  std::vector<Sequence*> sequences;
  sequences.reserve(entries.size());
  uint64_t pages = 0;
  KV_RETURN_IF_ERROR(Check(*cache, layers, entries, &sequences, &pages));
  const bool tables = cache->tier->memory().follows_tables();
  if (!tables) {
    if (layers.count != 1) return InvalidField("layers", layers.count, "1: the pages that are read are listed");
    KV_RETURN_IF_ERROR(this->pages().Check(cache->payer, pages));
  }
  KV_RETURN_IF_ERROR(GiveSlots(*cache, layers, entries, sequences));
  auto lease = std::make_unique<AttendLeaseImpl>(this, cache);
  if (!tables) lease->CountPages(pages);
  for (size_t i = 0; i < entries.size(); ++i) {
    if (tables) {
      KV_RETURN_IF_ERROR(lease->FollowEntry(*sequences[i], layers, entries[i]));
      continue;
    }
    uint32_t next = 0;
    uint64_t left = UINT64_MAX;
    KV_RETURN_IF_ERROR(lease->ListEntry(*sequences[i], layers.first, entries[i], &next, &left).status());
  }
  KV_ASSIGN_OR_RETURN(const bool ready, Finish(*lease));
  if (!ready || !tables) return lease;
  // Kernels select by what the lease says; elsewhere a selector counts what it did.
  for (size_t i = 0; i < entries.size(); ++i) {
    const uint64_t end = entries[i].position + entries[i].tokens;
    if (lease->sparse_from(i) >= end) continue;
    const uint64_t queries = end - std::max(lease->sparse_from(i), entries[i].position);
    parts_.metrics->index_selections.Increment(static_cast<double>(queries * layers.count * cache->layout().kv_heads));
  }
  return lease;
}

namespace {

// Attend in pieces. Sequences may change, or go, between two of them: entries are checked again.
class ListingImpl final : public Listing {
 public:
  ListingImpl(StoreReads* reads, std::shared_ptr<Cache> cache, int layer, absl::Span<const AttendEntry> entries)
      : reads_(reads),
        alive_(reads->parts().alive),
        cache_(std::move(cache)),
        layer_(layer),
        entries_(entries.begin(), entries.end()) {}

  // Once, before all else.
  absl::Status Begin() {
    std::vector<Sequence*> sequences;
    sequences.reserve(entries_.size());
    uint64_t pages = 0;
    KV_RETURN_IF_ERROR(reads_->Check(*cache_, layer_, entries_, &sequences, &pages));
    KV_RETURN_IF_ERROR(reads_->pages().Check(cache_->payer, pages));
    KV_RETURN_IF_ERROR(reads_->GiveSlots(*cache_, layer_, entries_, sequences));
    lease_ = std::make_unique<AttendLeaseImpl>(reads_, cache_);
    lease_->CountPages(pages);
    return absl::OkStatus();
  }
  Next DoPiece() override {
    if (store_has_gone()) status_ = absl::UnavailableError("the store has closed");
    for (uint64_t left = StoreReads::kPagesAtOnce; status_.ok() && at_ < entries_.size() && left > 0;) {
      status_ = ListSome(&left);
    }
    return status_.ok() && at_ < entries_.size() ? Next::kPiece : Next::kDone;
  }
  bool CompareOne() override { return false; }
  absl::StatusOr<std::unique_ptr<AttendLease>> Commit() override {
    if (status_.ok() && store_has_gone()) status_ = absl::UnavailableError("the store has closed");
    KV_RETURN_IF_ERROR(status_);
    KV_RETURN_IF_ERROR(reads_->Finish(*lease_).status());
    return std::move(lease_);
  }

 private:
  bool store_has_gone() const { return alive_.expired(); }
  absl::Status ListSome(uint64_t* left) {
    Sequence* sequence = nullptr;
    KV_RETURN_IF_ERROR(reads_->CheckEntry(*cache_, layer_, entries_, at_, &sequence));
    KV_ASSIGN_OR_RETURN(const bool done, lease_->ListEntry(*sequence, layer_, entries_[at_], &next_page_, left));
    if (!done) return absl::OkStatus();
    ++at_;
    next_page_ = 0;
    return absl::OkStatus();
  }

  StoreReads* const reads_;  // while the store is there
  const std::weak_ptr<const bool> alive_;
  const std::shared_ptr<Cache> cache_;
  const int layer_;
  const std::vector<AttendEntry> entries_;
  size_t at_ = 0;  // the entry that is being listed, and its next page
  uint32_t next_page_ = 0;
  absl::Status status_;
  std::unique_ptr<AttendLeaseImpl> lease_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<AttendLease>> StoreReads::Load(CacheId id, int layer,
                                                              absl::Span<const AttendEntry> entries) {
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<Cache> cache, parts_.caches->Find(id));
  std::vector<Sequence*> sequences;
  sequences.reserve(entries.size());
  uint64_t to_attend = 0, pages = 0;
  KV_RETURN_IF_ERROR(Check(*cache, layer, entries, &sequences, &to_attend));
  const uint64_t page_tokens = cache->page_tokens();
  for (const AttendEntry& entry : entries) {
    pages += (entry.position + entry.tokens - 1) / page_tokens - entry.position / page_tokens + 1;
  }
  KV_RETURN_IF_ERROR(this->pages().Check(cache->payer, pages));
  auto lease = std::make_unique<AttendLeaseImpl>(this, cache);
  lease->CountPages(pages);
  for (size_t i = 0; i < entries.size(); ++i) {
    lease->ListTokens(*sequences[i], layer, entries[i].position, entries[i].position + entries[i].tokens - 1);
  }
  KV_RETURN_IF_ERROR(lease->Finish());
  return lease;
}

absl::StatusOr<std::unique_ptr<Listing>> StoreReads::BeginAttend(CacheId id, int layer,
                                                                 absl::Span<const AttendEntry> entries) {
  KV_ASSIGN_OR_RETURN(std::shared_ptr<Cache> cache, parts_.caches->Find(id));
  auto listing = std::make_unique<ListingImpl>(this, std::move(cache), layer, entries);
  KV_RETURN_IF_ERROR(listing->Begin());
  return listing;
}

ReadBuffers StoreReads::TakeBuffers() {
  if (spare_.empty()) return {};
  ReadBuffers buffers = std::move(spare_.back());
  spare_.pop_back();
  return buffers;
}

void StoreReads::GiveBack(Done done) {
  if (done.buffers.pins.size() <= kPagesAtOnce) return Unpin(done);
  left_.push_back(std::move(done));
  if (left_.size() == 1) on_leftovers_();
}

bool StoreReads::ReleaseSome() {
  if (left_.empty()) return false;
  // Room that comes may be taken at once, by somebody who looks for more here.
  Done done = std::move(left_.front());
  left_.pop_front();
  Unpin(done);
  if (!done.buffers.pins.empty()) left_.push_front(std::move(done));
  return !left_.empty();
}

void StoreReads::Unpin(Done& done) {
  std::vector<PageRef>& pins = done.buffers.pins;
  for (size_t i = 0; i < kPagesAtOnce && !pins.empty(); ++i) {
    parts_.blocks->Unpin(pins.back());
    pins.pop_back();
  }
  if (!pins.empty()) return;
  pages().Remove(done.cache->payer, done.counted);
  --done.cache->leases;
  if (spare_.size() >= kSpareBuffersMax || pins.capacity() > kSparePagesMax) return;
  done.buffers.Clear();
  spare_.push_back(std::move(done.buffers));
}

}  // namespace kvmanager
