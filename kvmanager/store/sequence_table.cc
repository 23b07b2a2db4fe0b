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
  const auto of_payer = of_payer_.find(cache.payer);
  const Use use = of_payer == of_payer_.end() ? Use() : of_payer->second;
  const struct {
    const char* what;
    uint64_t has, more, max;
  } bounds[] = {{"open sequences", sequences_.size(), 1, kSequencesMax},
                {"open sequences of this tenant", use.sequences, 1, kTenantSequencesMax},
                {"blocks that this tenant's sequences began with", use.shared_blocks, blocks, kTenantSharedBlocksMax}};
  for (const auto& [what, has, more, max] : bounds) {
    if (has + more <= max) continue;
    return FieldError(absl::StatusCode::kResourceExhausted, what, absl::StrCat(has),
                      absl::StrCat("at most ", max, " with ", more, " more; end some"));
  }
  return absl::OkStatus();
}

void SequenceTable::WriteUse(StoreUse* use) const {
  use->sequences = sequences_.size();
  for (const auto& [payer, of] : of_payer_) {
    use->tenant_sequences = std::max<uint64_t>(use->tenant_sequences, of.sequences);
    use->tenant_shared_blocks = std::max(use->tenant_shared_blocks, of.shared_blocks);
  }
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
  Use& use = of_payer_[sequence->cache->payer];
  ++use.sequences;
  use.shared_blocks += sequence->shared_blocks;
  parts_.metrics->sequences.Increment();
  sequences_.emplace(id, std::move(sequence));
  return id;
}

void SequenceTable::Attach(Sequence& sequence, Block* block) {
  const uint32_t index = static_cast<uint32_t>(sequence.blocks.size());
  KV_CHECK(block->index == index);
  parts_.blocks->MakeUnevictable(block);
  sequence.blocks.push_back(block);
  for (uint32_t layer = 0; layer < block->pages.size(); ++layer) {
    if (sequence.HoldsRaw(index, layer)) ++block->pages[layer].raw_holds;
    if (block->pages[layer].state != PageState::kFree) sequence.NoteChange(layer, index);
  }
}

void SequenceTable::DetachLast(Sequence& sequence) {
  Block* block = sequence.blocks.back();
  for (uint32_t layer = 0; layer < block->pages.size(); ++layer) {
    if (sequence.HoldsRaw(block->index, layer)) parts_.blocks->DropRawHold({block, layer});
  }
  sequence.blocks.pop_back();
  parts_.blocks->Release(block);
}

void SequenceTable::Age(Sequence& sequence, uint32_t layer, uint64_t position) {
  const Cache& cache = *sequence.cache;
  const uint32_t aged = cache.reading().AgedPages(position);
  while (sequence.aged[layer] < aged) {
    Block* block = sequence.blocks[sequence.aged[layer]];
    ++sequence.aged[layer];
    parts_.blocks->DropRawHold({block, layer});
  }
}

void SequenceTable::ReleaseBlocks(Sequence& sequence) {
  while (!sequence.blocks.empty()) DetachLast(sequence);
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

absl::StatusOr<CreateResult> SequenceTable::Create(CacheId id, absl::Span<const BlockName> prefix,
                                                   uint64_t prompt_tokens) {
  KV_ASSIGN_OR_RETURN(const auto cache, parts_.caches->Find(id));
  KV_RETURN_IF_ERROR(CheckNew(*cache, prefix, prompt_tokens));
  CreateResult result;
  const std::vector<Block*> found = parts_.blocks->FindPrefix(*cache, prefix, BlockIndex::Bytes::kVerify,
                                                              /*lower_too=*/false, nullptr, &result.match);
  parts_.metrics->prefix_asked_blocks.Increment(static_cast<double>(prefix.size()));
  parts_.blocks->CountHits(result.match);
  auto sequence = New(cache);
  sequence->hit_blocks = result.match.hit_blocks;
  // A hit is taken as it is found: its pages have aged.
  std::fill(sequence->aged.begin(), sequence->aged.end(), static_cast<uint32_t>(found.size()));
  std::fill(sequence->tokens.begin(), sequence->tokens.end(), uint64_t{found.size()} * cache->page_tokens());
  for (Block* block : found) Attach(*sequence, block);
  parts_.indexes->Make(*sequence, {prompt_tokens, 0}, sequence->tokens[0]);
  parts_.indexes->AdvanceAll(*sequence);
  result.sequence = Show(std::move(sequence));
  return result;
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
  for (size_t i = 0; i < full_blocks; ++i) {
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
  if (!sequence->followers.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", id, " is being handed off while it grows: it cannot be cropped before the end"));
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
      all_filling &= block->pages[layer].state == PageState::kFilling;
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
  while (sequence->blocks.size() > index + (keep_block ? 1 : 0)) DetachLast(*sequence);
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

absl::StatusOr<PublishResult> SequenceTable::Publish(SequenceId id, absl::Span<const BlockName> names) {
  KV_ASSIGN_OR_RETURN(Sequence * sequence, FindWhole(id));
  KV_RETURN_IF_ERROR(CacheTable::CheckNames(names));
  Cache& cache = *sequence->cache;
  const uint64_t full_blocks = sequence->TokensInEveryLayer() / cache.page_tokens();
  if (names.size() > full_blocks) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "names", absl::StrCat(names.size()),
                      absl::StrCat("at most ", full_blocks, ", the blocks full in every layer"));
  }
  absl::flat_hash_set<BlockKey> keys;
  for (size_t i = 0; i < names.size(); ++i) {
    const Block* block = sequence->blocks[i];
    const std::string field = absl::StrCat("names[", i, "]");
    if (!keys.insert(names[i].key).second) return InvalidField(field, names[i].key.ToHex(8), "named once");
    if (block->published && block->name.key != names[i].key) {
      return FieldError(absl::StatusCode::kFailedPrecondition, field, names[i].key.ToHex(8),
                        absl::StrCat(block->name.key.ToHex(8), ", its name so far"));
    }
    const Block* known = cache.table.FindKey(names[i].key);
    if (known != nullptr && known->name.tokens != names[i].tokens) {
      return InvalidField(absl::StrCat(field, ".tokens"), names[i].tokens.ToHex(8),
                          absl::StrCat(known->name.tokens.ToHex(8), ", what this key names"));
    }
    if (known != nullptr && known->index != i) {
      return InvalidField(field, names[i].key.ToHex(8),
                          absl::StrCat("the key of block ", i, ", not of block ", known->index));
    }
  }
  PublishResult result;
  std::vector<Block*> deferred;
  for (uint32_t i = 0; i < names.size(); ++i) {
    Block*& block = sequence->blocks[i];
    if (block->published) continue;
    MissReason reason;
    Block* equal = parts_.blocks->Find(cache, names[i], i, BlockIndex::Bytes::kVerify, &reason);
    if (equal == nullptr) {
      if (block->corrupt) continue;
      parts_.blocks->Name(block, names[i]);
      ++result.published;
      continue;
    }
    const bool aged = std::all_of(sequence->aged.begin(), sequence->aged.end(), [i](uint32_t n) { return n > i; });
    if (aged) {
      parts_.blocks->Release(block);  // it has no raw hold of this sequence any more
      block = equal;
      for (uint32_t layer = 0; layer < cache.layers(); ++layer) {
        sequence->NoteChange(layer, i);
        sequence->settled[layer] = std::min(sequence->settled[layer], i);  // the other block may still be encoded
      }
      ++result.shared;
    } else {
      deferred.push_back(equal);
    }
  }
  result.deferred = static_cast<int>(deferred.size());
  for (; !deferred.empty(); deferred.pop_back()) parts_.blocks->Release(deferred.back());
  parts_.metrics->published.Increment(result.published);
  parts_.metrics->published_shared.Increment(result.shared);
  return result;
}

void SequenceTable::Drop(SequenceId id) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return;
  const std::unique_ptr<Sequence> sequence = std::move(found->second);
  sequences_.erase(found);
  parts_.indexes->Drop(*sequence);
  ReleaseBlocks(*sequence);
  --sequence->cache->sequences;
  const auto of_payer = of_payer_.find(sequence->cache->payer);
  of_payer->second.shared_blocks -= sequence->shared_blocks;
  if (--of_payer->second.sequences == 0) of_payer_.erase(of_payer);
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
    cache->tier->memory().CopyOpen(*cache, layer, sequence.blocks[index]->pages[layer], slot, tokens, copies);
    parts_.blocks->Apply({copy, layer}, PageEvent::kOpen, {slot, PageId()});
  }
  return copy;
}

}  // namespace kvmanager
