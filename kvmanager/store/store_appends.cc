#include "kvmanager/store/store_appends.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/checksum.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/append_in_pieces.h"

namespace kvmanager {
namespace {

std::string FieldOf(size_t entry, absl::string_view name) { return absl::StrCat("entries[", entry, "].", name); }

// Pages that begin with a token of the entry.
uint64_t PagesOpened(const AppendEntry& entry, uint64_t page_tokens) {
  const uint64_t end = entry.position + entry.tokens;
  return (end + page_tokens - 1) / page_tokens - (entry.position + page_tokens - 1) / page_tokens;
}

// The caller's handle of an append in pieces.
class Lease final : public AppendLease {
 public:
  Lease(StoreAppends* appends, std::unique_ptr<AppendInPieces> append)
      : appends_(appends), alive_(appends->parts().alive), append_(std::move(append)) {}
  ~Lease() override {
    if (append_->committing() && !alive_.expired()) appends_->FinishLater(std::move(append_));
  }
  bool ReserveNext() override { return append_->ReserveNext(); }
  bool WriteNext() override { return append_->WriteNext(); }
  bool CommitNext() override { return append_->CommitNext(); }
  absl::Status status() const override { return append_->status(); }

 private:
  StoreAppends* const appends_;  // while the store is there
  const std::weak_ptr<const bool> alive_;
  std::unique_ptr<AppendInPieces> append_;
};

}  // namespace

StoreAppends::StoreAppends(const Parts& parts) : parts_(parts) {}
StoreAppends::~StoreAppends() = default;

absl::Status StoreAppends::CheckPlace(const Sequence& sequence, LayerRange layers,
                                      absl::Span<const AppendEntry> entries, size_t i) {
  const AppendEntry& entry = entries[i];
  for (int layer = layers.first; layer < layers.end(); ++layer) {
    if (entry.position == sequence.tokens[layer]) continue;
    return FieldError(absl::StatusCode::kFailedPrecondition, FieldOf(i, "position"), absl::StrCat(entry.position),
                      absl::StrCat(sequence.tokens[layer], ", the token count of layer ", layer));
  }
  const uint64_t tokens_max = kSequenceBlocksMax * sequence.cache->page_tokens();
  if (entry.tokens < 1 || static_cast<uint64_t>(entry.tokens) > tokens_max - entry.position) {
    return InvalidField(FieldOf(i, "tokens"), entry.tokens,
                        absl::StrCat("1..", tokens_max - entry.position, ", a sequence's limit being ", tokens_max));
  }
  for (const PageFollower* follower : sequence.followers) {
    if (entry.position + entry.tokens <= follower->tokens()) continue;
    return FieldError(absl::StatusCode::kFailedPrecondition, FieldOf(i, "tokens"), absl::StrCat(entry.tokens),
                      absl::StrCat("at most ", follower->tokens() - entry.position,
                                   ": a hand-off of this sequence is under way, of ", follower->tokens(), " tokens"));
  }
  return absl::OkStatus();
}

absl::Status StoreAppends::Check(const Cache& cache, LayerRange layers, absl::Span<const AppendEntry> entries,
                                 std::vector<Sequence*>* sequences, SlotCounts* wanted) {
  const uint64_t page_tokens = cache.page_tokens();
  KV_RETURN_IF_ERROR(cache.CheckLayers(layers));
  if (entries.size() > kStepEntriesMax)
    return InvalidField("entries", entries.size(), absl::StrCat("at most ", kStepEntriesMax));
  const uint64_t call = ++calls_;
  uint64_t pages = 0;  // that the entries' queries would read
  for (size_t i = 0; i < entries.size(); ++i) {
    const AppendEntry& entry = entries[i];
    KV_ASSIGN_OR_RETURN(Sequence * sequence, parts_.sequences->FindUsable(entry.sequence));
    if (sequence->cache.get() != &cache) {
      return InvalidField(FieldOf(i, "sequence"), entry.sequence, absl::StrCat("a sequence of cache ", cache.id));
    }
    if (sequence->call == call) return InvalidField(FieldOf(i, "sequence"), entry.sequence, "named once per call");
    sequence->call = call;
    if (sequence->appending) {
      return FieldError(absl::StatusCode::kFailedPrecondition, FieldOf(i, "sequence"), absl::StrCat(entry.sequence),
                        "one that no other call appends to");
    }
    KV_RETURN_IF_ERROR(CheckPlace(*sequence, layers, entries, i));
    const uint64_t end = entry.position + entry.tokens;
    const uint64_t opened = PagesOpened(entry, page_tokens);
    const size_t sealed = end / page_tokens - entry.position / page_tokens;
    wanted->raw += opened * layers.count;
    if (entry.x != nullptr) {
      if (!cache.keeps_activations()) {
        return InvalidField(FieldOf(i, "x"), "given", absl::StrCat("none: cache ", cache.id, " keeps no activations"));
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
  return cache.tier->memory().follows_tables() ? absl::OkStatus() : parts_.reads->pages().Check(cache.payer, pages);
}

AppendWork StoreAppends::Measure(CacheId id, LayerRange layers, absl::Span<const AppendEntry> entries) const {
  AppendWork work;
  const auto cache = parts_.caches->Find(id);
  if (!cache.ok() || !(*cache)->CheckLayers(layers).ok()) return work;
  for (const AppendEntry& entry : entries) {
    const auto sequence = parts_.sequences->Find(entry.sequence);
    if (!sequence.ok() || (*sequence)->cache != *cache || entry.tokens < 1) continue;
    work.opened += PagesOpened(entry, (*cache)->page_tokens()) * layers.count;
    const uint32_t aged = (*cache)->reading().AgedPages(entry.position);
    for (int layer = layers.first; layer < layers.end(); ++layer) {
      work.aged += aged - std::min(aged, (*sequence)->aged[layer]);
    }
  }
  return work;
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

uint64_t StoreAppends::CommitPage(const Written& written, uint32_t i, uint64_t position, PageSums sums,
                                  std::vector<PageRef>* to_encode) {
  const Cache& cache = *written.cache;
  const AppendEntry& entry = written.entries[i];
  Sequence& sequence = *written.sequences[i];
  const uint32_t page_tokens = cache.page_tokens(), layer = written.layer;
  const uint32_t index = static_cast<uint32_t>(position / page_tokens);
  if (index == sequence.blocks.size()) parts_.sequences->Attach(sequence, parts_.blocks->New(written.cache, index));
  const PageRef ref{sequence.blocks[index], layer};
  const bool opens = position % page_tokens == 0;
  if (opens) parts_.blocks->Apply(ref, PageEvent::kOpen, {written.slots->TakeRaw(), PageId()});
  const PageRef activations{ref.block, layer, PageKind::kActivations};
  if (entry.x == nullptr) {
    // Those of the page's first tokens are of no use without the others.
    if (ref.block->OpenActivations(layer).valid()) parts_.blocks->Apply(activations, PageEvent::kFree, {});
  } else if (opens) {
    parts_.blocks->Apply(activations, PageEvent::kOpen, {written.slots->TakeActivations(), PageId()});
  }
  position = std::min(entry.position + entry.tokens, (uint64_t{index} + 1) * page_tokens);
  const bool seals = position % page_tokens == 0;
  if (opens || seals) sequence.NoteChange(layer, index);
  sequence.tokens[layer] = position;
  if (!seals) return position;
  if (const PageId full = ref.block->OpenActivations(layer); full.valid()) {
    if (sums.activations == 0) sums.activations = Checksum(PageData(cache, full), cache.activation_page_bytes());
    parts_.blocks->Apply(activations, PageEvent::kSealIdentity, {PageId(), full, false, sums.activations});
  }
  const PageId raw = ref.page().raw;
  if (cache.identity()) {
    if (sums.raw == 0) sums.raw = PageChecksum(cache, ref.layer, ref.page());
    parts_.blocks->Apply(ref, PageEvent::kSealIdentity, {PageId(), raw, false, sums.raw});
  } else {
    parts_.blocks->Apply(ref, PageEvent::kSeal, {raw, written.slots->TakeEncoded(cache, layer)});
    to_encode->push_back(ref);
  }
  for (PageFollower* follower : sequence.followers) follower->OnFull(index, layer);
  return position;
}

void StoreAppends::CommitPages(const Written& written, size_t pages, AppendPlace* at, std::vector<PageRef>* to_encode) {
  const Cache& cache = *written.cache;
  for (size_t page = 0; page < pages && at->entry < written.entries.size(); ++page) {
    const AppendEntry& entry = written.entries[at->entry];
    Sequence* const sequence = written.sequences[at->entry];
    uint64_t position = entry.position + at->first;
    if (sequence != nullptr) {
      position =
          CommitPage(written, at->entry, position, written.sums.empty() ? PageSums() : written.sums[page], to_encode);
    } else {
      const uint64_t page_tokens = cache.page_tokens();
      const bool opens = position % page_tokens == 0;
      position = std::min(entry.position + entry.tokens, (position / page_tokens + 1) * page_tokens);
      if (opens) cache.tier->Free(written.slots->TakeRaw());
      if (opens && entry.x != nullptr) cache.tier->Free(written.slots->TakeActivations());
      if (position % page_tokens == 0 && !cache.identity()) {
        cache.tier->Free(written.slots->TakeEncoded(cache, written.layer));
      }
    }
    at->first = static_cast<int>(position - entry.position);
    if (at->first < entry.tokens) continue;
    if (sequence != nullptr && sequence->index != nullptr) {
      sequence->index->OnAppend(static_cast<int>(written.layer), entry.position, entry.tokens, parts_.clock->NowNs());
    }
    ++at->entry;
    at->first = 0;
  }
}

void StoreAppends::EndEntry(Sequence& sequence, LayerRange layers) {
  for (PageFollower* follower : sequence.followers) follower->Tell();
  for (int layer = layers.first; sequence.index != nullptr && layer < layers.end(); ++layer) {
    parts_.indexes->Advance(sequence, static_cast<uint32_t>(layer));
  }
}

void StoreAppends::Commit(const std::shared_ptr<Cache>& cache, LayerRange layers, absl::Span<const AppendEntry> entries,
                          absl::Span<Sequence* const> sequences, Reservation* slots) {
  uint64_t tokens = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const AppendEntry& entry = entries[i];
    parts_.indexes->GiveSlots(*sequences[i], layers, entry.position, entry.tokens, entry.position + entry.tokens,
                              slots);
    tokens += static_cast<uint64_t>(entry.tokens) * layers.count;
  }
  std::vector<PageRef> to_encode;
  for (int layer = layers.first; layer < layers.end(); ++layer) {
    for (size_t i = 0; i < sequences.size(); ++i) parts_.sequences->Age(*sequences[i], layer, entries[i].position);
    AppendPlace at;
    CommitPages({cache, static_cast<uint32_t>(layer), entries, sequences, slots, {}}, SIZE_MAX, &at, &to_encode);
  }
  parts_.metrics->appended_tokens.Increment(static_cast<double>(tokens));
  parts_.encodes->Post(cache, std::move(to_encode));
  for (Sequence* sequence : sequences) EndEntry(*sequence, layers);
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

absl::StatusOr<std::unique_ptr<AppendLease>> StoreAppends::Begin(CacheId id, int layer,
                                                                 absl::Span<const AppendEntry> entries,
                                                                 size_t pages_at_once) {
  KV_ASSIGN_OR_RETURN(std::shared_ptr<Cache> cache, parts_.caches->Find(id));
  auto append = std::make_unique<AppendInPieces>(this, std::move(cache), layer, entries, pages_at_once);
  if (absl::Status begun = append->Begin(); !begun.ok()) {
    parts_.metrics->refused_appends.Increment();
    return begun;
  }
  return std::make_unique<Lease>(this, std::move(append));
}

void StoreAppends::FinishLater(std::unique_ptr<AppendInPieces> append) {
  unfinished_.push_back(std::move(append));
  if (unfinished_.size() == 1) on_leftovers_();
}

bool StoreAppends::FinishSome() {
  if (unfinished_.empty()) return false;
  if (!unfinished_.front()->CommitNext()) unfinished_.pop_front();
  return !unfinished_.empty();
}

}  // namespace kvmanager
