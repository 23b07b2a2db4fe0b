#include "kvmanager/store/store_appends.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/checksum.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/memory_backend.h"

namespace kvmanager {

absl::Status StoreAppends::Check(const Cache& cache, LayerRange layers, absl::Span<const AppendEntry> entries,
                                 std::vector<Sequence*>* sequences, SlotCounts* wanted) {
  const int page_tokens = cache.page_tokens();
  const uint64_t tokens_max = kSequenceBlocksMax * page_tokens;
  KV_RETURN_IF_ERROR(cache.CheckLayers(layers));
  if (entries.size() > kStepEntriesMax)
    return InvalidField("entries", entries.size(), absl::StrCat("at most ", kStepEntriesMax));
  const uint64_t call = ++calls_;
  uint64_t pages = 0;  // that the entries' queries would read
  for (size_t i = 0; i < entries.size(); ++i) {
    const AppendEntry& entry = entries[i];
    KV_ASSIGN_OR_RETURN(Sequence * sequence, parts_.sequences->FindUsable(entry.sequence));
    const auto field = [i](absl::string_view name) { return absl::StrCat("entries[", i, "].", name); };
    if (sequence->cache.get() != &cache) {
      return InvalidField(field("sequence"), entry.sequence, absl::StrCat("a sequence of cache ", cache.id));
    }
    if (sequence->call == call) return InvalidField(field("sequence"), entry.sequence, "named once per call");
    sequence->call = call;
    for (int layer = layers.first; layer < layers.end(); ++layer) {
      if (entry.position == sequence->tokens[layer]) continue;
      return FieldError(absl::StatusCode::kFailedPrecondition, field("position"), absl::StrCat(entry.position),
                        absl::StrCat(sequence->tokens[layer], ", the token count of layer ", layer));
    }
    if (entry.tokens < 1 || static_cast<uint64_t>(entry.tokens) > tokens_max - entry.position) {
      return InvalidField(field("tokens"), entry.tokens,
                          absl::StrCat("1..", tokens_max - entry.position, ", a sequence's limit being ", tokens_max));
    }
    const uint64_t end = entry.position + entry.tokens;
    for (const PageFollower* follower : sequence->followers) {
      if (end <= follower->tokens()) continue;
      return FieldError(absl::StatusCode::kFailedPrecondition, field("tokens"), absl::StrCat(entry.tokens),
                        absl::StrCat("at most ", follower->tokens() - entry.position,
                                     ": a hand-off of this sequence is under way, of ", follower->tokens(), " tokens"));
    }
    const uint64_t opened = (end + page_tokens - 1) / page_tokens - (entry.position + page_tokens - 1) / page_tokens;
    const size_t sealed = end / page_tokens - entry.position / page_tokens;
    wanted->raw += opened * layers.count;
    if (entry.x != nullptr) {
      if (!cache.keeps_activations()) {
        return InvalidField(field("x"), "given", absl::StrCat("none: cache ", cache.id, " keeps no activations"));
      }
      wanted->activations += opened * layers.count;
    }
    for (int layer = layers.first; layer < layers.end() && !cache.identity(); ++layer) {
      cache.CountEncodedSlots(layer, sealed, wanted);
    }
    pages += (end - 1) / page_tokens + 1;
    parts_.indexes->CountSlots(*sequence, layers, entry.position, entry.tokens, end, wanted);
    sequences->push_back(sequence);
  }
  return cache.tier->memory().follows_tables() ? absl::OkStatus() : parts_.reads->CheckPages(pages);
}

absl::Status StoreAppends::Prepare(const Cache& cache, LayerRange layers, absl::Span<const AppendEntry> entries,
                                   std::vector<Sequence*>* sequences, Reservation* slots) {
  SlotCounts wanted;
  sequences->reserve(entries.size());
  absl::Status status = Check(cache, layers, entries, sequences, &wanted);
  if (status.ok() && wanted.raw > 0 && Fails(Failpoint::kAppendReserve)) {
    status = absl::ResourceExhaustedError("failpoint append.reserve");
  }
  if (status.ok()) status = cache.tier->Reserve(cache, wanted, slots);
  return status;
}

void StoreAppends::CommitLayer(const std::shared_ptr<Cache>& cache, uint32_t layer,
                               absl::Span<const AppendEntry> entries, absl::Span<Sequence* const> sequences,
                               Reservation* slots, absl::Span<const uint64_t> checksums,
                               std::vector<PageRef>* to_encode) {
  const int page_tokens = cache->page_tokens();
  size_t opened = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    Sequence& sequence = *sequences[i];
    const AppendEntry& entry = entries[i];
    parts_.sequences->Age(sequence, layer, entry.position);
    const uint64_t end = entry.position + entry.tokens;
    for (uint64_t position = entry.position; position < end;) {
      const uint32_t index = static_cast<uint32_t>(position / page_tokens);
      if (index == sequence.blocks.size()) parts_.sequences->Attach(sequence, parts_.blocks->New(cache, index));
      const PageRef ref{sequence.blocks[index], layer};
      const bool opens = position % page_tokens == 0;
      if (opens) parts_.blocks->Apply(ref, PageEvent::kOpen, {slots->TakeRaw(), PageId()});
      const uint64_t checksum = opens && !checksums.empty() ? checksums[opened++] : 0;
      const PageRef activations{ref.block, layer, PageKind::kActivations};
      if (entry.x == nullptr) {
        parts_.blocks->DropOpenActivations(ref);
      } else if (opens) {
        parts_.blocks->Apply(activations, PageEvent::kOpen, {slots->TakeActivations(), PageId()});
      }
      position = std::min(end, (uint64_t{index} + 1) * page_tokens);
      const bool seals = position % page_tokens == 0;
      if (opens || seals) sequence.NoteChange(layer, index);
      if (!seals) break;
      if (const Page* const full = ref.block->OpenActivations(layer)) {
        const uint64_t of_activations = Checksum(PageData(*cache, full->raw), cache->activation_page_bytes());
        parts_.blocks->Apply(activations, PageEvent::kSealIdentity, {PageId(), full->raw, false, of_activations});
      }
      const PageId raw = ref.page().raw;
      if (cache->identity()) {
        PageChange sealed_page{PageId(), raw, false,
                               checksum != 0 ? checksum : PageChecksum(*cache, ref.layer, ref.page())};
        parts_.blocks->Apply(ref, PageEvent::kSealIdentity, sealed_page);
      } else {
        parts_.blocks->Apply(ref, PageEvent::kSeal, {raw, slots->TakeEncoded(*cache, layer)});
        to_encode->push_back(ref);
      }
      for (PageFollower* follower : sequence.followers) follower->OnFull(index, layer);
    }
    sequence.tokens[layer] = end;
    if (sequence.index != nullptr) {
      sequence.index->OnAppend(static_cast<int>(layer), entry.position, entry.tokens, parts_.clock->NowNs());
    }
  }
}

void StoreAppends::Commit(const std::shared_ptr<Cache>& cache, LayerRange layers, absl::Span<const AppendEntry> entries,
                          absl::Span<Sequence* const> sequences, Reservation* slots,
                          absl::Span<const uint64_t> checksums) {
  uint64_t tokens = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const AppendEntry& entry = entries[i];
    parts_.indexes->GiveSlots(*sequences[i], layers, entry.position, entry.tokens, entry.position + entry.tokens,
                              slots);
    tokens += static_cast<uint64_t>(entry.tokens) * layers.count;
  }
  std::vector<PageRef> to_encode;
  for (int layer = layers.first; layer < layers.end(); ++layer) {
    CommitLayer(cache, static_cast<uint32_t>(layer), entries, sequences, slots, checksums, &to_encode);
  }
  parts_.metrics->appended_tokens.Increment(static_cast<double>(tokens));
  parts_.encodes->Post(cache, std::move(to_encode));
  for (Sequence* sequence : sequences) {
    for (PageFollower* follower : sequence->followers) follower->Tell();
    for (int layer = layers.first; sequence->index != nullptr && layer < layers.end(); ++layer) {
      parts_.indexes->Advance(*sequence, static_cast<uint32_t>(layer));
    }
  }
}

absl::Status StoreAppends::Append(CacheId id, LayerRange layers, absl::Span<const AppendEntry> entries) {
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<Cache> cache, parts_.caches->Find(id));
  std::vector<Sequence*> sequences;
  Reservation slots(cache->tier->pool());
  absl::Status status = Prepare(*cache, layers, entries, &sequences, &slots);
  // Everything is copied and checked before anything is committed.
  if (status.ok()) status = cache->tier->memory().Write({*cache, layers, entries, sequences, slots});
  if (!status.ok()) {
    parts_.metrics->refused_appends.Increment();
    return status;
  }
  Commit(cache, layers, entries, sequences, &slots);
  return absl::OkStatus();
}

class StoreAppends::Lease final : public AppendLease {
 public:
  Lease(StoreAppends* appends, std::shared_ptr<Cache> cache, int layer, absl::Span<const AppendEntry> entries)
      : appends_(appends),
        alive_(appends->parts_.alive),
        cache_(std::move(cache)),
        layer_(layer),
        entries_(entries.begin(), entries.end()),
        slots_(cache_->tier->pool(), Reservation::Cleaning::kByUser) {}
  ~Lease() override {
    if (alive_.expired()) slots_.Forget();
  }

  absl::Status Begin() {
    std::vector<Sequence*> sequences;
    KV_RETURN_IF_ERROR(appends_->Prepare(*cache_, layer_, entries_, &sequences, &slots_));
    KV_RETURN_IF_ERROR(cache_->tier->memory().Plan({*cache_, layer_, entries_, sequences, slots_}, &writes_));
    checksums_.resize(slots_.raw.ids.size());
    const SlotPool& pool = *cache_->tier->pool();
    for (const PageId slot : slots_.unclean) unclean_.push_back({pool.Data(slot), pool.SlotBytes(slot)});
    return absl::OkStatus();
  }
  bool WriteNext() override {
    const MemoryBackend& memory = cache_->tier->memory();
    size_t bytes = 0;
    for (; bytes < kPieceBytes && cleaned_ < unclean_.size(); ++cleaned_) {
      std::memset(unclean_[cleaned_].data(), 0, unclean_[cleaned_].size());
      bytes += unclean_[cleaned_].size();
    }
    for (; bytes < kPieceBytes && next_ < writes_.size() && status_.ok(); ++next_) {
      const PageWrite& write = writes_[next_];
      if (!write.opens) continue;  // the page is the sequence's: Commit
      status_ = memory.WritePage(*cache_, layer_, entries_[write.entry], write);
      if (status_.ok() && cache_->identity() && write.tokens == cache_->page_tokens()) {
        checksums_[write.slot] = memory.Checksum(write.page, cache_->layout().raw_bytes());
      }
      bytes += cache_->layout().raw_bytes();
    }
    return (cleaned_ < unclean_.size() || next_ < writes_.size()) && status_.ok();
  }
  absl::Status Commit() override {
    if (alive_.expired()) return absl::UnavailableError("the store has closed");
    absl::Status status = CommitIfUnchanged();
    if (!status.ok()) appends_->parts_.metrics->refused_appends.Increment();
    return status;
  }

 private:
  static constexpr size_t kPieceBytes = 64 << 10;

  absl::Status CommitIfUnchanged() {
    KV_RETURN_IF_ERROR(status_);
    KV_CHECK(next_ == writes_.size() && cleaned_ == unclean_.size());
    for (const PageId slot : slots_.unclean) cache_->tier->pool()->NoteCleaned(slot);
    std::vector<Sequence*> sequences;
    SlotCounts wanted;
    KV_RETURN_IF_ERROR(appends_->Check(*cache_, layer_, entries_, &sequences, &wanted));
    KV_CHECK(wanted.raw == slots_.raw.ids.size());  // it follows from the positions
    std::vector<PageWrite> writes;
    const MemoryBackend& memory = cache_->tier->memory();
    KV_RETURN_IF_ERROR(memory.Plan({*cache_, layer_, entries_, sequences, slots_}, &writes));
    for (const PageWrite& write : writes) {
      if (!write.opens) KV_RETURN_IF_ERROR(memory.WritePage(*cache_, layer_, entries_[write.entry], write));
    }
    appends_->Commit(cache_, layer_, entries_, sequences, &slots_, checksums_);
    return absl::OkStatus();
  }

  StoreAppends* const appends_;
  const std::weak_ptr<const bool> alive_;
  const std::shared_ptr<Cache> cache_;
  const int layer_;
  const std::vector<AppendEntry> entries_;
  Reservation slots_;
  std::vector<absl::Span<uint8_t>> unclean_;  // slots; they are zeroed first
  size_t cleaned_ = 0;                        // of them
  std::vector<PageWrite> writes_;
  std::vector<uint64_t> checksums_;  // of the pages that are opened, of an identity codec; 0: not full
  size_t next_ = 0;
  absl::Status status_;
};

absl::StatusOr<std::unique_ptr<AppendLease>> StoreAppends::Begin(CacheId id, int layer,
                                                                 absl::Span<const AppendEntry> entries) {
  KV_ASSIGN_OR_RETURN(std::shared_ptr<Cache> cache, parts_.caches->Find(id));
  auto lease = std::make_unique<Lease>(this, std::move(cache), layer, entries);
  if (absl::Status begun = lease->Begin(); !begun.ok()) {
    parts_.metrics->refused_appends.Increment();
    return begun;
  }
  return std::unique_ptr<AppendLease>(std::move(lease));
}

}  // namespace kvmanager
