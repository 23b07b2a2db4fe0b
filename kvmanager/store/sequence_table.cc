#include "kvmanager/store/sequence_table.h"

#include <algorithm>
#include <utility>

#include "kvmanager/base/status.h"
#include "kvmanager/store/memory_backend.h"

namespace kvmanager {

absl::StatusOr<Sequence*> SequenceTable::Find(SequenceId id) const {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return absl::NotFoundError(absl::StrCat("sequence ", id, " does not exist"));
  return found->second.get();
}

absl::StatusOr<Sequence*> SequenceTable::FindUsable(SequenceId id) const {
  KV_ASSIGN_OR_RETURN(Sequence * sequence, Find(id));
  KV_RETURN_IF_ERROR(sequence->broken);
  return sequence;
}

absl::StatusOr<Sequence*> SequenceTable::FindWhole(SequenceId id) const {
  KV_ASSIGN_OR_RETURN(Sequence * sequence, FindUsable(id));
  if (!sequence->arriving) return sequence;
  return absl::FailedPreconditionError(
      absl::StrCat("sequence ", id, " still arrives by a hand-off: until then it can be read and appended to"));
}

absl::Status SequenceTable::CheckLimit(const Cache& cache, size_t blocks) const {
  const struct {
    const char* what;
    uint64_t has, more, max;
  } bounds[] = {{"open sequences", sequences_.size(), 1, kSequencesMax},
                {"open sequences of this tenant", of_payer_.Of(cache.payer), 1, kTenantSequencesMax},
                {"blocks that this tenant's sequences began with", shared_blocks_.Of(cache.payer), blocks,
                 kTenantSharedBlocksMax}};
  for (const auto& [what, has, more, max] : bounds) {
    if (has + more <= max) continue;
    return FieldError(absl::StatusCode::kResourceExhausted, what, absl::StrCat(has),
                      absl::StrCat("at most ", max, " with ", more, " more; end some"));
  }
  return absl::OkStatus();
}

void SequenceTable::WriteUse(StoreUse* use) const {
  use->sequences = sequences_.size();
  use->tenant_sequences = of_payer_.most();
  use->tenant_shared_blocks = shared_blocks_.most();
}

absl::Status SequenceTable::CheckNew(const Cache& cache, absl::Span<const BlockName> prefix,
                                     uint64_t prompt_tokens) const {
  KV_RETURN_IF_ERROR(CacheTable::CheckNames(prefix));
  const uint64_t tokens_max = kSequenceBlocksMax * cache.page_tokens();
  if (prompt_tokens > tokens_max) {
    return InvalidField("prompt_tokens", prompt_tokens, absl::StrCat("at most ", tokens_max, ", a sequence's limit"));
  }
  return CheckLimit(cache, prefix.size());
}

std::unique_ptr<Sequence> SequenceTable::New(const std::shared_ptr<Cache>& cache) {
  auto sequence = std::make_unique<Sequence>();
  sequence->cache = cache;
  sequence->tokens.assign(cache->layers(), 0);
  sequence->aged.assign(cache->layers(), 0);
  sequence->settled.assign(cache->layers(), 0);
  return sequence;
}

SequenceId SequenceTable::Show(std::unique_ptr<Sequence> sequence) {
  const SequenceId id = next_sequence_++;
  sequence->id = id;
  ++sequence->cache->sequences;
  sequence->cache->wanted = true;
  sequence->shared_blocks = sequence->blocks.size();
  of_payer_.Add(sequence->cache->payer);
  shared_blocks_.Add(sequence->cache->payer, sequence->shared_blocks);
  parts_.metrics->sequences.Increment();
  sequences_.emplace(id, std::move(sequence));
  return id;
}

void SequenceTable::Attach(Sequence& sequence, Block* block) {
  const uint32_t index = static_cast<uint32_t>(sequence.blocks.size());
  KV_CHECK(block->index == index);
  KV_CHECK(block->holders > 0 && !block->evictable);
  sequence.blocks.push_back(block);
  const bool notes_changes = sequence.has_keepers();  // of a new sequence, with very many pages, nobody
  for (uint32_t layer = 0; layer < block->pages().size(); ++layer) {
    if (sequence.HoldsRaw(index, layer)) parts_.blocks->HoldRaw({block, layer});
    if (notes_changes && block->pages()[layer].state != PageState::kFree) sequence.NoteChange(layer, index);
  }
  if (block->published) sequence.cache->tier->eviction().Found(&sequence.run, block);
}

void SequenceTable::DetachLast(Sequence& sequence) {
  Block* const block = sequence.blocks.back();
  sequence.blocks.pop_back();
  GiveBack(block, sequence.aged, sequence.run);
}

void SequenceTable::GiveBack(Block* block, absl::Span<const uint32_t> aged, const EvictionRun& run) {
  for (uint32_t layer = 0; layer < block->pages().size(); ++layer) {
    if (block->index >= aged[layer]) parts_.blocks->DropRawHold({block, layer});
  }
  parts_.blocks->Release(block, &run);
}

size_t SequenceTable::Age(Sequence& sequence, uint32_t layer, uint64_t position, size_t pages_max) {
  const Cache& cache = *sequence.cache;
  const uint32_t aged = cache.reading().AgedPages(position);
  size_t pages = 0;
  for (; sequence.aged[layer] < aged && pages < pages_max; ++pages) {
    Block* block = sequence.blocks[sequence.aged[layer]];
    ++sequence.aged[layer];
    parts_.blocks->DropRawHold({block, layer});
  }
  return pages;
}

void SequenceTable::Leave(Sequence& sequence, uint32_t first) {
  if (sequence.blocks.size() <= first) return;
  Left left{sequence.cache, {sequence.blocks.begin() + first, sequence.blocks.end()}, sequence.aged, sequence.run};
  sequence.blocks.resize(first);
  LeaveSoon(std::move(left));
}

void SequenceTable::LeaveBlocks(const std::shared_ptr<Cache>& cache, std::vector<Block*> blocks) {
  const std::vector<uint32_t> no_raw_holds(cache->layers(), UINT32_MAX);
  LeaveSoon({cache, std::move(blocks), no_raw_holds, EvictionRun()});
}

void SequenceTable::LeaveSoon(Left left) {
  ReleaseLast(left);
  if (left.blocks.empty()) return;
  left.counted = left.blocks.size();
  shared_blocks_.Add(left.cache->payer, left.counted);
  ++left.cache->leases;
  left_.push_back(std::move(left));
  if (left_.size() == 1) on_leftovers_();
}

void SequenceTable::ReleaseLast(Left& left) {
  for (size_t pages = 0; !left.blocks.empty() && pages < kPagesAtOnce; pages += left.cache->layers()) {
    Block* const block = left.blocks.back();
    left.blocks.pop_back();
    GiveBack(block, left.aged, left.run);
  }
}

bool SequenceTable::ReleaseSome() {
  if (left_.empty()) return false;
  // Room that comes may be taken at once, by somebody who looks for more here.
  Left left = std::move(left_.front());
  left_.pop_front();
  ReleaseLast(left);
  if (left.blocks.empty()) {
    shared_blocks_.Remove(left.cache->payer, left.counted);
    --left.cache->leases;
    if (!left.cache->wanted) parts_.caches->CloseIfUnused(left.cache);
  } else {
    left_.push_front(std::move(left));
  }
  return !left_.empty();
}

SequenceInfo SequenceTable::InfoOf(const Sequence& sequence) {
  SequenceInfo info;
  info.sequence = sequence.id;
  info.cache = sequence.cache->id;
  info.tokens = sequence.TokensInEveryLayer();
  info.hit_blocks = sequence.hit_blocks;
  info.arriving = sequence.arriving;
  for (const Block* block : sequence.blocks) {
    info.published_blocks += block->published;
  }
  info.bytes = sequence.bytes();
  info.layer_tokens = sequence.tokens;
  return info;
}

absl::StatusOr<SequenceInfo> SequenceTable::Describe(SequenceId id) const {
  KV_ASSIGN_OR_RETURN(const Sequence* sequence, Find(id));
  return InfoOf(*sequence);
}

std::vector<SequenceId> SequenceTable::Ids() const {
  std::vector<SequenceId> all;
  for (const auto& [id, sequence] : sequences_) all.push_back(id);
  std::sort(all.begin(), all.end());
  return all;
}

absl::StatusOr<SequenceId> SequenceTable::Fork(SequenceId id, std::vector<OpenCopy>* copies) {
  KV_ASSIGN_OR_RETURN(const Sequence* source, FindWhole(id));
  KV_RETURN_IF_ERROR(CheckLimit(*source->cache, source->blocks.size()));
  if (!source->LayersAreEqual()) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "tokens",
                      absl::StrCat("different in the layers, ", source->TokensInEveryLayer(), " in the shortest"),
                      "equal in all layers to fork");
  }
  const std::shared_ptr<Cache> cache = source->cache;
  const uint64_t tokens = source->tokens[0];
  const size_t full_blocks = tokens / cache->page_tokens();
  const int open_tokens = static_cast<int>(tokens % cache->page_tokens());
  Block* copy = nullptr;
  if (open_tokens > 0) {
    KV_ASSIGN_OR_RETURN(copy, CopyOpenBlock(*source, static_cast<uint32_t>(full_blocks), open_tokens, copies));
  }
  auto fork = New(cache);
  fork->tokens = source->tokens;
  fork->aged = source->aged;
  fork->hit_blocks = source->hit_blocks;
  fork->blocks.reserve(full_blocks + (copy != nullptr));
  constexpr size_t kAhead = 8;
  for (size_t i = 0; i < full_blocks; ++i) {
    if (i + 2 * kAhead < full_blocks) source->blocks[i + 2 * kAhead]->Prefetch();
    if (i + kAhead < full_blocks) source->blocks[i + kAhead]->all_pages.Prefetch();
    parts_.blocks->Hold(source->blocks[i]);
    Attach(*fork, source->blocks[i]);
  }
  if (copy != nullptr) Attach(*fork, copy);
  parts_.indexes->Copy(*source, *fork);
  parts_.metrics->forks.Increment();
  return Show(std::move(fork));
}

absl::Status SequenceTable::Crop(SequenceId id, uint64_t tokens, std::vector<OpenCopy>* copies) {
  KV_ASSIGN_OR_RETURN(Sequence * sequence, FindWhole(id));
  const std::shared_ptr<Cache> cache = sequence->cache;
  if (tokens > sequence->TokensInEveryLayer()) {
    return InvalidField("tokens", tokens,
                        absl::StrCat("at most ", sequence->TokensInEveryLayer(), ", what every layer has"));
  }
  const bool crops =
      std::any_of(sequence->tokens.begin(), sequence->tokens.end(), [tokens](uint64_t has) { return has > tokens; });
  if (!crops) return absl::OkStatus();
  if (sequence->appending) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", id, " is being appended to: it cannot be cropped before the end"));
  }
  if (!sequence->followers.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "sequence ", id,
        " is being handed off: it cannot be cropped before what it has is listed, and what grows before its end"));
  }
  const uint32_t index = static_cast<uint32_t>(tokens / cache->page_tokens());
  const int rest = static_cast<int>(tokens % cache->page_tokens());
  // As if every layer had been appended token by token: how its tokens were cut into appends must not show.
  const auto aged_by_newest = [&](uint32_t layer) { return cache->reading().AgedPages(sequence->tokens[layer] - 1); };
  Block* copy = nullptr;
  bool keep_block = false;
  if (rest > 0) {
    Block* block = sequence->blocks[index];
    bool all_filling = true;
    for (uint32_t layer = 0; layer < cache->layers(); ++layer) {
      all_filling &= block->pages()[layer].state == PageState::kFilling;
      // By age, not by what happens to be left: the answer must not depend on when encoding ended.
      const bool aged = !sequence->HoldsRaw(index, layer) || index < aged_by_newest(layer);
      if (aged && !cache->identity()) {
        return FieldError(absl::StatusCode::kFailedPrecondition, "tokens", absl::StrCat(tokens),
                          absl::StrCat(uint64_t{index} * cache->page_tokens(),
                                       ", the boundary below: this page is kept in its encoded form only"));
      }
    }
    // Reads under way see the old page; later appends would overwrite it.
    keep_block = all_filling && block->pins == 0;
    if (!keep_block) {
      KV_ASSIGN_OR_RETURN(copy, CopyOpenBlock(*sequence, index, rest, copies));
    }
  }
  for (uint32_t layer = 0; layer < cache->layers(); ++layer) {
    if (sequence->tokens[layer] > tokens) Age(*sequence, layer, sequence->tokens[layer] - 1);
  }
  Leave(*sequence, index + (keep_block ? 1 : 0));
  for (uint32_t layer = 0; layer < cache->layers(); ++layer) {
    sequence->tokens[layer] = tokens;
    sequence->aged[layer] = std::min(sequence->aged[layer], index);
    sequence->settled[layer] = std::min(sequence->settled[layer], index);
  }
  parts_.indexes->Crop(*sequence, tokens);
  sequence->hit_blocks = std::min(sequence->hit_blocks, static_cast<int>(index));
  if (copy != nullptr) Attach(*sequence, copy);
  return absl::OkStatus();
}

void SequenceTable::Drop(SequenceId id) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return;
  const std::unique_ptr<Sequence> sequence = std::move(found->second);
  sequences_.erase(found);
  parts_.indexes->Drop(*sequence);
  Leave(*sequence, 0);
  --sequence->cache->sequences;
  of_payer_.Remove(sequence->cache->payer);
  shared_blocks_.Remove(sequence->cache->payer, sequence->shared_blocks);
  parts_.metrics->sequences.Decrement();
}

absl::StatusOr<Block*> SequenceTable::CopyOpenBlock(const Sequence& sequence, uint32_t index, int tokens,
                                                    std::vector<OpenCopy>* copies) {
  const std::shared_ptr<Cache> cache = sequence.cache;
  Reservation slots(cache->tier->pool());
  KV_RETURN_IF_ERROR(cache->tier->Reserve(*cache, {.raw = cache->layers()}, &slots));
  Block* const copy = parts_.blocks->New(cache, index);
  for (uint32_t layer = 0; layer < cache->layers(); ++layer) {
    const PageId slot = slots.TakeRaw();
    cache->tier->memory().CopyOpen(*cache, layer, sequence.blocks[index]->pages()[layer], slot, tokens, copies);
    parts_.blocks->Apply({copy, layer}, PageEvent::kOpen, {slot, PageId()});
  }
  return copy;
}

}  // namespace kvmanager
