#include "kvmanager/store/store_appends.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/checksum.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/memory_backend.h"

namespace kvmanager {

absl::Status StoreAppends::Check(const Cache& cache, LayerRange layers, absl::Span<const AppendEntry> entries,
                                 std::vector<Sequence*>* sequences, SlotCounts* wanted, uint64_t* pages) {
  const int page_tokens = cache.page_tokens();
  const uint64_t tokens_max = kSequenceBlocksMax * page_tokens;
  KV_RETURN_IF_ERROR(cache.CheckLayers(layers));
  if (entries.size() > kStepEntriesMax)
    return InvalidField("entries", entries.size(), absl::StrCat("at most ", kStepEntriesMax));
  const uint64_t call = ++calls_;
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
    *pages += (end - 1) / page_tokens + 1;
    parts_.indexes->CountSlots(*sequence, layers, entry.position, entry.tokens, end, wanted);
    sequences->push_back(sequence);
  }
  return absl::OkStatus();
}

void StoreAppends::Commit(const std::shared_ptr<Cache>& cache, uint32_t layer, absl::Span<const AppendEntry> entries,
                          absl::Span<Sequence* const> sequences, Reservation* slots, std::vector<PageRef>* to_encode) {
  const int page_tokens = cache->page_tokens();
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
        const uint64_t checksum = Checksum(PageData(*cache, full->raw), cache->activation_page_bytes());
        parts_.blocks->Apply(activations, PageEvent::kSealIdentity, {PageId(), full->raw, false, checksum});
      }
      const PageId raw = ref.page().raw;
      if (cache->identity()) {
        PageChange sealed_page{PageId(), raw, false, PageChecksum(*cache, ref.layer, ref.page())};
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

absl::Status StoreAppends::Append(CacheId id, LayerRange layers, absl::Span<const AppendEntry> entries) {
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<Cache> cache, parts_.caches->Find(id));
  const MemoryBackend& memory = cache->tier->memory();
  std::vector<Sequence*> sequences;
  sequences.reserve(entries.size());
  SlotCounts wanted;
  uint64_t pages = 0;
  Reservation slots(cache->tier->pool());
  absl::Status status = Check(*cache, layers, entries, &sequences, &wanted, &pages);
  if (status.ok() && !memory.follows_tables()) status = parts_.reads->CheckPages(pages);
  if (status.ok() && wanted.raw > 0 && Fails(Failpoint::kAppendReserve)) {
    status = absl::ResourceExhaustedError("failpoint append.reserve");
  }
  if (status.ok()) status = cache->tier->Reserve(*cache, wanted, &slots);
  // Everything is copied and checked before anything is committed.
  if (status.ok()) status = memory.Write({*cache, layers, entries, sequences, slots});
  if (!status.ok()) {
    parts_.metrics->refused_appends.Increment();
    return status;
  }
  uint64_t tokens = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    const AppendEntry& entry = entries[i];
    parts_.indexes->GiveSlots(*sequences[i], layers, entry.position, entry.tokens, entry.position + entry.tokens,
                              &slots);
    tokens += static_cast<uint64_t>(entry.tokens) * layers.count;
  }
  std::vector<PageRef> to_encode;
  for (int layer = layers.first; layer < layers.end(); ++layer) {
    Commit(cache, static_cast<uint32_t>(layer), entries, sequences, &slots, &to_encode);
  }
  parts_.metrics->appended_tokens.Increment(static_cast<double>(tokens));
  parts_.encodes->Post(cache, std::move(to_encode));
  for (Sequence* sequence : sequences) {
    for (PageFollower* follower : sequence->followers) follower->Tell();
    for (int layer = layers.first; sequence->index != nullptr && layer < layers.end(); ++layer) {
      parts_.indexes->Advance(*sequence, static_cast<uint32_t>(layer));
    }
  }
  return absl::OkStatus();
}

}  // namespace kvmanager
