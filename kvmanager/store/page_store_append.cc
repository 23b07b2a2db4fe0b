// Append: reserve, copy, check the copy, then commit.
#include <algorithm>
#include <cstring>

#include "kvmanager/base/checksum.h"
#include "kvmanager/base/finite.h"
#include "kvmanager/store/page_store_impl.h"

namespace kvmanager {
namespace {

// Tokens [first, first + count) of an entry into tokens [to_token, ...) of a raw page.
// k, v: [tokens][kv_heads][head_dim]; page: [side][kv_heads][page_tokens][head_dim].
void CopyTokens(const PageLayout& layout, const AppendEntry& entry, int first, int count, uint8_t* page, int to_token) {
  const size_t row_bytes = layout.head_dim * DTypeBytes(layout.dtype);
  const size_t token_bytes = layout.kv_heads * row_bytes;
  for (int side = 0; side < 2; ++side) {
    const uint8_t* from_side = (side == 0 ? entry.k : entry.v) + first * token_bytes;
    for (int head = 0; head < layout.kv_heads; ++head) {
      const uint8_t* from = from_side + head * row_bytes;
      uint8_t* to = page + layout.raw_offset(side, head, to_token);
      for (int t = 0; t < count; ++t) std::memcpy(to + t * row_bytes, from + t * token_bytes, row_bytes);
    }
  }
}

// The page of activations that goes on where an append goes on in this page of K and V; nullptr: some token before had
// none.
const Page* OpenActivations(const Block& block, uint32_t layer) {
  const Page* const page = block.activations.empty() ? nullptr : &block.activations[layer];
  return page != nullptr && page->state == PageState::kFilling ? page : nullptr;
}

// The same for activations, into an activation page's tokens from `at` on.
absl::Status CopyActivations(const Cache& cache, const AppendEntry& entry, size_t i, int first, int count,
                             uint8_t* page, int at) {
  const size_t row_bytes = cache.activation_row_bytes(), hidden = cache.config.hidden;
  uint8_t* const to = page + at * row_bytes;
  std::memcpy(to, entry.x + first * row_bytes, count * row_bytes);
  const size_t wrong = FindNonFinite(cache.layout().dtype, to, count * hidden);
  if (wrong == count * hidden) return absl::OkStatus();
  return InvalidField(
      absl::StrCat("entries[", i, "].x[token ", first + wrong / hidden, "][value ", wrong % hidden, "]"), "NaN or Inf",
      "finite");
}

// Copies an entry's rows into the pages they belong to, of which `slots` has the new ones from `next_slot` on, and
// looks for what is not finite. What an error leaves in an open page's unused tokens is overwritten by the next append.
absl::Status CopyEntry(const Cache& cache, uint32_t layer, const AppendEntry& entry, size_t i, const Sequence& sequence,
                       const Reservation& slots, size_t* next_slot, size_t* next_activation) {
  const PageLayout& layout = cache.layout();
  const int page_tokens = cache.page_tokens();
  for (int done = 0; done < entry.tokens;) {
    const uint64_t position = entry.position + done;
    const int at = static_cast<int>(position % page_tokens);
    const int count = std::min(entry.tokens - done, page_tokens - at);
    const PageId slot =
        at == 0 ? slots.raw.ids[(*next_slot)++] : sequence.blocks[position / page_tokens]->pages[layer].raw;
    uint8_t* page = cache.tier->pool()->Data(slot);
    CopyTokens(layout, entry, done, count, page, at);
    NonFinite where;
    if (FindNonFinite(layout, page, at, count, &where)) {
      return InvalidField(
          absl::StrCat("entries[", i, "].", where.side == 0 ? "k" : "v", "[token ", done + where.token - at, "][head ",
                       where.head, "][channel ", where.channel, "]"),
          "NaN or Inf", "finite");
    }
    if (entry.x != nullptr) {
      const Page* const open = at == 0 ? nullptr : OpenActivations(*sequence.blocks[position / page_tokens], layer);
      if (at == 0 || open != nullptr) {
        const PageId to = at == 0 ? slots.activations.ids[(*next_activation)++] : open->raw;
        KV_RETURN_IF_ERROR(CopyActivations(cache, entry, i, done, count, cache.tier->pool()->Data(to), at));
      }
    }
    done += count;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status PageStoreImpl::CheckAppend(const Cache& cache, int first, int layers,
                                        absl::Span<const AppendEntry> entries, std::vector<Sequence*>* sequences,
                                        SlotCounts* wanted, uint64_t* pages) {
  const int page_tokens = cache.page_tokens();
  const uint64_t tokens_max = kSequenceBlocksMax * page_tokens;
  if (first < 0 || layers < 1 || first > cache.config.layers - layers) {
    return InvalidField("layer", first, absl::StrCat("0..", cache.config.layers - std::max(layers, 1)));
  }
  if (entries.size() > kEntriesMax)
    return InvalidField("entries", entries.size(), absl::StrCat("at most ", kEntriesMax));
  const uint64_t call = ++calls_;
  for (size_t i = 0; i < entries.size(); ++i) {
    const AppendEntry& entry = entries[i];
    KV_ASSIGN_OR_RETURN(Sequence * sequence, FindUsable(entry.sequence));
    const auto field = [i](absl::string_view name) { return absl::StrCat("entries[", i, "].", name); };
    if (sequence->cache.get() != &cache) {
      return InvalidField(field("sequence"), entry.sequence, absl::StrCat("a sequence of cache ", cache.id));
    }
    if (sequence->call == call) return InvalidField(field("sequence"), entry.sequence, "named once per call");
    sequence->call = call;
    for (int layer = first; layer < first + layers; ++layer) {
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
    wanted->raw += opened * layers;
    if (entry.x != nullptr) {
      if (!cache.keeps_activations()) {
        return InvalidField(field("x"), "given", absl::StrCat("none: cache ", cache.id, " keeps no activations"));
      }
      wanted->activations += opened * layers;
    }
    for (int layer = first; layer < first + layers && !cache.identity(); ++layer) {
      cache.CountEncodedSlots(layer, sealed, wanted);
    }
    *pages += (end - 1) / page_tokens + 1;
    sequences->push_back(sequence);
  }
  return absl::OkStatus();
}

void PageStoreImpl::CommitAppend(const std::shared_ptr<Cache>& cache, uint32_t layer,
                                 absl::Span<const AppendEntry> entries, absl::Span<Sequence* const> sequences,
                                 Reservation* slots, std::vector<PageRef>* to_encode) {
  const int page_tokens = cache->page_tokens();
  for (size_t i = 0; i < entries.size(); ++i) {
    Sequence& sequence = *sequences[i];
    const AppendEntry& entry = entries[i];
    Age(sequence, layer, entry.position);
    const uint64_t end = entry.position + entry.tokens;
    for (uint64_t position = entry.position; position < end;) {
      const uint32_t index = static_cast<uint32_t>(position / page_tokens);
      if (index == sequence.blocks.size()) Attach(sequence, NewBlock(cache, index));
      const PageRef ref{sequence.blocks[index], layer};
      const bool opens = position % page_tokens == 0;
      if (opens) Apply(ref, PageEvent::kOpen, {slots->TakeRaw(), PageId()});
      const PageRef activations{ref.block, layer, PageKind::kActivations};
      if (entry.x == nullptr) {
        DropOpenActivations(ref);
      } else if (opens) {
        Apply(activations, PageEvent::kOpen, {slots->TakeActivations(), PageId()});
      }
      position = std::min(end, (uint64_t{index} + 1) * page_tokens);
      const bool seals = position % page_tokens == 0;
      if (opens || seals) NoteChange(sequence, layer, index);
      if (!seals) break;
      if (const Page* const full = OpenActivations(*ref.block, layer)) {
        const uint64_t checksum = Checksum(Data(*cache, full->raw), cache->activation_page_bytes());
        Apply(activations, PageEvent::kSealIdentity, {PageId(), full->raw, false, checksum});
      }
      const PageId raw = ref.page().raw;
      if (cache->identity()) {
        PageChange sealed_page{PageId(), raw, false, ChecksumOf(*cache, ref.layer, ref.page())};
        Apply(ref, PageEvent::kSealIdentity, sealed_page);
      } else {
        Apply(ref, PageEvent::kSeal, {raw, slots->TakeEncoded(*cache, layer)});
        to_encode->push_back(ref);
      }
      for (PageFollower* follower : sequence.followers) follower->OnFull(index, layer);
    }
    sequence.tokens[layer] = end;
    if (sequence.index != nullptr) {
      sequence.index->OnAppend(static_cast<int>(layer), entry.position, entry.tokens, clock_->NowNs());
    }
  }
}

absl::Status PageStoreImpl::Append(CacheId id, int layer, absl::Span<const AppendEntry> entries) {
  KV_ASSIGN_OR_RETURN(const std::shared_ptr<Cache> cache, FindCache(id));
  const auto refuse = [this](absl::Status status) {
    metrics_->refused_appends.Increment();
    return status;
  };
  if (cache->on_device()) return refuse(WrongMemory(*cache));
  std::vector<Sequence*> sequences;
  sequences.reserve(entries.size());
  SlotCounts wanted;
  uint64_t pages = 0;
  if (absl::Status status = CheckAppend(*cache, layer, 1, entries, &sequences, &wanted, &pages); !status.ok()) {
    return refuse(std::move(status));
  }
  if (absl::Status status = CheckAttendPages(pages); !status.ok()) return refuse(std::move(status));
  Reservation slots(cache->tier->pool());
  if (absl::Status status = cache->tier->Reserve(*cache, wanted, &slots); !status.ok())
    return refuse(std::move(status));

  // Everything is copied and checked before anything is committed.
  size_t next_slot = 0, next_activation = 0;
  uint64_t tokens = 0;
  for (size_t i = 0; i < entries.size(); ++i) {
    absl::Status copied = CopyEntry(*cache, static_cast<uint32_t>(layer), entries[i], i, *sequences[i], slots,
                                    &next_slot, &next_activation);
    if (!copied.ok()) return refuse(std::move(copied));
    tokens += entries[i].tokens;
  }
  std::vector<PageRef> to_encode;
  CommitAppend(cache, static_cast<uint32_t>(layer), entries, sequences, &slots, &to_encode);
  metrics_->appended_tokens.Increment(static_cast<double>(tokens));
  PostEncodes(cache, std::move(to_encode));
  for (Sequence* sequence : sequences) {
    for (PageFollower* follower : sequence->followers) follower->Tell();
    if (sequence->index != nullptr) AdvanceIndex(*sequence, static_cast<uint32_t>(layer));
  }
  return absl::OkStatus();
}

}  // namespace kvmanager
