// Sequences: match, create, fork, crop, publish, drop.
#include <algorithm>

#include "kvmanager/store/page_store_impl.h"

namespace kvmanager {

absl::Status PageStoreImpl::CheckNames(absl::Span<const BlockName> names) {
  if (names.size() <= PageStore::kNamesMax) return absl::OkStatus();
  return InvalidField("names", names.size(), absl::StrCat("at most ", PageStore::kNamesMax));
}

absl::StatusOr<Sequence*> PageStoreImpl::FindSequence(SequenceId id) const {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return absl::NotFoundError(absl::StrCat("sequence ", id, " does not exist"));
  return found->second.get();
}

absl::StatusOr<Sequence*> PageStoreImpl::FindUsable(SequenceId id) const {
  KV_ASSIGN_OR_RETURN(Sequence * sequence, FindSequence(id));
  KV_RETURN_IF_ERROR(sequence->broken);
  return sequence;
}

absl::StatusOr<Sequence*> PageStoreImpl::FindWhole(SequenceId id) const {
  KV_ASSIGN_OR_RETURN(Sequence * sequence, FindUsable(id));
  if (!sequence->arriving) return sequence;
  return absl::FailedPreconditionError(
      absl::StrCat("sequence ", id, " still arrives by a hand-off: until then it can be read and appended to"));
}

absl::Status PageStoreImpl::CheckSequenceLimit() const {
  if (sequences_.size() < kSequencesMax) return absl::OkStatus();
  return FieldError(absl::StatusCode::kResourceExhausted, "open sequences", absl::StrCat(sequences_.size()),
                    absl::StrCat("below ", kSequencesMax, " to open another"));
}

std::unique_ptr<Sequence> PageStoreImpl::NewSequence(const std::shared_ptr<Cache>& cache) {
  auto sequence = std::make_unique<Sequence>();
  sequence->cache = cache;
  sequence->tokens.assign(cache->layers(), 0);
  sequence->aged.assign(cache->layers(), 0);
  sequence->settled.assign(cache->layers(), 0);
  return sequence;
}

SequenceId PageStoreImpl::Show(std::unique_ptr<Sequence> sequence) {
  const SequenceId id = next_sequence_++;
  sequence->id = id;
  ++sequence->cache->sequences;
  sequence->cache->wanted = true;
  metrics_->sequences.Increment();
  sequences_.emplace(id, std::move(sequence));
  return id;
}

void PageStoreImpl::ReleaseBlocks(Sequence& sequence) {
  while (!sequence.blocks.empty()) DetachLast(sequence);
}

SequenceInfo PageStoreImpl::InfoOf(const Sequence& sequence) const {
  SequenceInfo info;
  info.sequence = sequence.id;
  info.cache = sequence.cache->id;
  info.tokens = sequence.TokensInEveryLayer();
  info.hit_blocks = sequence.hit_blocks;
  info.arriving = sequence.arriving;
  for (const Block* block : sequence.blocks) {
    info.published_blocks += block->published;
    info.bytes += block->bytes;
  }
  return info;
}

absl::StatusOr<SequenceInfo> PageStoreImpl::DescribeSequence(SequenceId id) const {
  KV_ASSIGN_OR_RETURN(const Sequence* sequence, FindSequence(id));
  return InfoOf(*sequence);
}

std::vector<SequenceInfo> PageStoreImpl::Sequences() const {
  std::vector<SequenceInfo> all;
  for (const auto& [id, sequence] : sequences_) all.push_back(InfoOf(*sequence));
  std::sort(all.begin(), all.end(),
            [](const SequenceInfo& a, const SequenceInfo& b) { return a.sequence < b.sequence; });
  return all;
}

absl::Status PageStoreImpl::CheckPrompt(const Cache& cache, uint64_t prompt_tokens) {
  const uint64_t tokens_max = kSequenceBlocksMax * cache.page_tokens();
  if (prompt_tokens <= tokens_max) return absl::OkStatus();
  return InvalidField("prompt_tokens", prompt_tokens, absl::StrCat("at most ", tokens_max, ", a sequence's limit"));
}

std::vector<Block*> PageStoreImpl::FindPrefix(Cache& cache, absl::Span<const BlockName> names, LookIn where,
                                              MatchResult* match) {
  std::vector<Block*> found;
  const bool moves = where == LookIn::kLowerTiersToo && cache.tier->can_move();
  const std::shared_ptr<Cache> counterpart = moves ? LowerCounterpart(cache) : nullptr;
  for (const BlockName& name : names) {
    const uint32_t index = static_cast<uint32_t>(found.size());
    Block* block = FindVerified(cache, name, index, &match->reason);
    if (block == nullptr && match->reason == MissReason::kNotFound && moves) {
      const auto arriving = cache.arriving.find(name.key);
      if (arriving != cache.arriving.end() && arriving->second->index == index &&
          arriving->second->name.tokens == name.tokens) {
        match->reason = MissReason::kNone;
        block = arriving->second;
        Hold(block);
      } else if (counterpart != nullptr) {
        block = FindVerified(*counterpart, name, index, &match->reason);
      }
    }
    if (block == nullptr) break;
    found.push_back(block);
  }
  match->hit_blocks = static_cast<int>(found.size());
  return found;
}

void PageStoreImpl::CountHits(const MatchResult& match) {
  if (match.reason != MissReason::kNone) {
    metrics_->prefix_misses[static_cast<size_t>(match.reason)]->Increment();
  }
  metrics_->prefix_hit_blocks.Increment(static_cast<double>(match.hit_blocks));
}

absl::StatusOr<MatchResult> PageStoreImpl::Match(CacheId id, absl::Span<const BlockName> names) {
  KV_ASSIGN_OR_RETURN(const auto cache, FindCache(id));
  KV_RETURN_IF_ERROR(CheckNames(names));
  MatchResult result;
  std::vector<Block*> found = FindPrefix(*cache, names, LookIn::kLowerTiersToo, &result);
  if (result.reason != MissReason::kNone) metrics_->prefix_misses[static_cast<size_t>(result.reason)]->Increment();
  for (; !found.empty(); found.pop_back()) Release(found.back());
  return result;
}

absl::StatusOr<CreateResult> PageStoreImpl::CreateSequence(CacheId id, absl::Span<const BlockName> prefix,
                                                           uint64_t prompt_tokens) {
  KV_ASSIGN_OR_RETURN(const auto cache, FindCache(id));
  KV_RETURN_IF_ERROR(CheckNames(prefix));
  KV_RETURN_IF_ERROR(CheckPrompt(*cache, prompt_tokens));
  KV_RETURN_IF_ERROR(CheckSequenceLimit());
  CreateResult result;
  const std::vector<Block*> found = FindPrefix(*cache, prefix, LookIn::kItsMemory, &result.match);
  metrics_->prefix_asked_blocks.Increment(static_cast<double>(prefix.size()));
  CountHits(result.match);
  auto sequence = NewSequence(cache);
  sequence->hit_blocks = result.match.hit_blocks;
  // A hit is taken as it is found: its pages have aged.
  std::fill(sequence->aged.begin(), sequence->aged.end(), static_cast<uint32_t>(found.size()));
  std::fill(sequence->tokens.begin(), sequence->tokens.end(), uint64_t{found.size()} * cache->page_tokens());
  for (Block* block : found) Attach(*sequence, block);
  MakeIndex(*sequence, {prompt_tokens, 0}, sequence->tokens[0]);
  AdvanceIndexes(*sequence);
  result.sequence = Show(std::move(sequence));
  return result;
}

absl::StatusOr<SequenceId> PageStoreImpl::Fork(SequenceId id, std::vector<OpenCopy>* copies) {
  KV_ASSIGN_OR_RETURN(const Sequence* source, FindWhole(id));
  KV_RETURN_IF_ERROR(CheckSequenceLimit());
  if (!source->LayersAreEqual()) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "tokens",
                      absl::StrCat("different in the layers, ", source->TokensInEveryLayer(), " in the shortest"),
                      "equal in all layers to fork");
  }
  const std::shared_ptr<Cache> cache = source->cache;
  const uint64_t tokens = source->tokens[0];
  const size_t full_blocks = tokens / cache->page_tokens();
  const int open_tokens = static_cast<int>(tokens % cache->page_tokens());
  Reservation slots(cache->tier->pool());
  if (open_tokens > 0) KV_RETURN_IF_ERROR(cache->tier->Reserve(*cache, {.raw = cache->layers()}, &slots));
  auto fork = NewSequence(cache);
  fork->tokens = source->tokens;
  fork->aged = source->aged;
  fork->hit_blocks = source->hit_blocks;
  for (size_t i = 0; i < full_blocks; ++i) {
    Hold(source->blocks[i]);
    Attach(*fork, source->blocks[i]);
  }
  if (open_tokens > 0) {
    const Block* from = source->blocks[full_blocks];
    Block* copy = NewBlock(cache, static_cast<uint32_t>(full_blocks));
    for (uint32_t layer = 0; layer < cache->layers(); ++layer) {
      const PageId slot = slots.TakeRaw();
      cache->tier->memory().CopyOpen(*cache, layer, from->pages[layer], slot, open_tokens, copies);
      Apply({copy, layer}, PageEvent::kOpen, {slot, PageId()});
    }
    Attach(*fork, copy);
  }
  CopyIndex(*source, *fork);
  metrics_->forks.Increment();
  return Show(std::move(fork));
}

absl::Status PageStoreImpl::Crop(SequenceId id, uint64_t tokens, std::vector<OpenCopy>* copies) {
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
      Reservation slots(cache->tier->pool());
      KV_RETURN_IF_ERROR(cache->tier->Reserve(*cache, {.raw = cache->layers()}, &slots));
      copy = NewBlock(cache, index);
      for (uint32_t layer = 0; layer < cache->layers(); ++layer) {
        const PageId slot = slots.TakeRaw();
        cache->tier->memory().CopyOpen(*cache, layer, block->pages[layer], slot, rest, copies);
        Apply({copy, layer}, PageEvent::kOpen, {slot, PageId()});
      }
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
  CropIndex(*sequence, tokens);
  sequence->hit_blocks = std::min(sequence->hit_blocks, static_cast<int>(index));
  if (copy != nullptr) Attach(*sequence, copy);
  return absl::OkStatus();
}

absl::StatusOr<PublishResult> PageStoreImpl::Publish(SequenceId id, absl::Span<const BlockName> names) {
  KV_ASSIGN_OR_RETURN(Sequence * sequence, FindWhole(id));
  KV_RETURN_IF_ERROR(CheckNames(names));
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
    Block* equal = FindVerified(cache, names[i], i, &reason);
    if (equal == nullptr) {
      if (block->corrupt) continue;
      block->name = names[i];
      cache.table.Insert(block);
      metrics_->published_blocks.Increment();
      ++result.published;
      continue;
    }
    const bool aged = std::all_of(sequence->aged.begin(), sequence->aged.end(), [i](uint32_t n) { return n > i; });
    if (aged) {
      Release(block);  // it has no raw hold of this sequence any more
      block = equal;
      for (uint32_t layer = 0; layer < cache.layers(); ++layer) {
        NoteChange(*sequence, layer, i);
        sequence->settled[layer] = std::min(sequence->settled[layer], i);  // the other block may still be encoded
      }
      ++result.shared;
    } else {
      deferred.push_back(equal);
    }
  }
  result.deferred = static_cast<int>(deferred.size());
  for (; !deferred.empty(); deferred.pop_back()) Release(deferred.back());
  metrics_->published.Increment(result.published);
  metrics_->published_shared.Increment(result.shared);
  return result;
}

void PageStoreImpl::Drop(SequenceId id) {
  const auto found = sequences_.find(id);
  if (found == sequences_.end()) return;
  const std::unique_ptr<Sequence> sequence = std::move(found->second);
  sequences_.erase(found);
  DropIndex(*sequence);
  ReleaseBlocks(*sequence);
  --sequence->cache->sequences;
  metrics_->sequences.Decrement();
}

}  // namespace kvmanager
