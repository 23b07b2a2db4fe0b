// A walk's operations on sequences.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "kvmanager/base/status.h"
#include "kvmanager/store/backends_walk.h"

namespace kvmanager::backends_walk {

using testing::KeysValues;
using testing::MakeActivations;
using testing::MakeKeysValues;

Text BackendsWalk::RandomText(const WalkedCache& cache) {
  Text text;
  for (uint64_t n = Below(kBlocksMax * cache.config.layout.page_tokens); n > 0; --n) text.Add(NextId(text));
  return text;
}

int BackendsWalk::MatchBoth(const WalkedCache& cache, const std::vector<BlockName>& names) {
  int known = 0;
  while (known < static_cast<int>(names.size()) && cache.published.count(names[known].key)) ++known;
  MatchResult found[2];
  for (const Memory memory : kMemories) {
    const auto match = store(memory).caches().Match(cache.ids[memory], names);
    EXPECT_TRUE(match.ok()) << match.status();
    if (!match.ok()) return 0;
    found[memory] = *match;
    EXPECT_LE(match->hit_blocks, known);
    EXPECT_EQ(match->reason,
              match->hit_blocks == static_cast<int>(names.size()) ? MissReason::kNone : MissReason::kNotFound);
  }
  if (NamesAreEqual(cache)) {
    ++counts.matches;
    EXPECT_EQ(found[kHost].hit_blocks, found[kGpu].hit_blocks);
    EXPECT_EQ(found[kHost].reason, found[kGpu].reason);
    if (!cache.names_lost) {
      EXPECT_EQ(found[kHost].hit_blocks, known);
    }
  }
  return std::min(found[kHost].hit_blocks, found[kGpu].hit_blocks);
}

void BackendsWalk::Create() {
  if (sequences_.size() >= kSequencesMax) return;
  const size_t which = Below(caches_.size());
  const WalkedCache& cache = caches_[which];
  WalkedSequence model;
  model.text = RandomText(cache);
  auto names = tests_[kHost]->Names(cache.ids[kHost], model.text);
  const int hit = MatchBoth(cache, names);
  if (!NamesAreEqual(cache)) names.resize(hit);
  for (const Memory memory : kMemories) {
    const auto made = store(memory).Create(cache.ids[memory], names);
    ASSERT_TRUE(made.ok()) << made.status();
    ASSERT_EQ(made->match.hit_blocks, hit);
    ASSERT_EQ(made->match.reason, hit == static_cast<int>(names.size()) ? MissReason::kNone : MissReason::kNotFound);
    model.ids[memory] = made->sequence;
  }
  counts.hits += hit;
  const int tokens = hit * cache.config.layout.page_tokens;
  model.client = clients_[Below(kClients)];
  model.cache = which;
  model.text.Truncate(tokens);
  model.tokens.assign(cache.config.layers, tokens);
  model.aged.assign(cache.config.layers, hit);
  AddSequence(std::move(model));
}

void BackendsWalk::AddSequence(WalkedSequence model) {
  model.waiting.assign(model.tokens.size(), 0);
  sequences_.emplace(next_number_++, std::move(model));
}

std::vector<uint64_t> BackendsWalk::PickSome(bool waiting, int* first_layer, int* layers) {
  std::vector<uint64_t> chosen;
  const auto begin = Pick();
  if (begin == sequences_.end()) return chosen;
  const WalkedSequence& with = begin->second;
  const int all = caches_[with.cache].config.layers;
  *first_layer = Below(3) == 0 ? 0 : static_cast<int>(Below(all));
  *layers = 1 + static_cast<int>(Below(all - *first_layer));
  for (uint64_t tries = 1 + Below(4); tries > 0; --tries) {
    const auto it = tries == 1 ? begin : Pick();
    const WalkedSequence& model = it->second;
    if (model.client != with.client || model.cache != with.cache || (!waiting && model.waits())) continue;
    if (std::find(chosen.begin(), chosen.end(), it->first) == chosen.end()) chosen.push_back(it->first);
  }
  for (const uint64_t number : chosen) {
    const WalkedSequence& model = sequences_.at(number);
    for (int layer = *first_layer + 1; layer < *first_layer + *layers; ++layer) {
      if (model.tokens[layer] != model.tokens[*first_layer] || model.aged[layer] != model.aged[*first_layer]) {
        *layers = 1;
      }
    }
  }
  return chosen;
}

void BackendsWalk::AppendSome() {
  int first, layers;
  const std::vector<uint64_t> chosen = PickSome(/*waiting=*/false, &first, &layers);
  if (chosen.empty()) return;
  const size_t which = sequences_.at(chosen[0]).cache;
  Client* const client = sequences_.at(chosen[0]).client;
  const WalkedCache& cache = caches_[which];
  const PageLayout& layout = cache.config.layout;
  std::vector<uint64_t> numbers;
  std::array<std::vector<AppendEntry>, 2> entries;
  for (const uint64_t number : chosen) {
    WalkedSequence& model = sequences_.at(number);
    const uint64_t at = model.tokens[first];
    // Layers drift apart at times, and catch up.
    uint64_t tokens = at == model.TokensInSomeLayer() || Below(4) == 0 ? 1 + Below(Below(2) ? 50 : 8)
                                                                       : model.TokensInSomeLayer() - at;
    tokens = std::min(tokens, uint64_t{kBlocksMax} * layout.page_tokens - at);
    if (tokens == 0) continue;
    while (model.text.ids.size() < at + tokens) model.text.Add(NextId(model.text));
    numbers.push_back(number);
    for (const Memory memory : kMemories) {
      entries[memory].push_back({model.ids[memory], at, static_cast<int>(tokens)});
    }
  }
  if (numbers.empty()) return;
  // Pages have activations in some layers, in others not; on a GPU they have none.
  const bool with_x = cache.config.hidden > 0 && Below(10) > 0;
  const uint64_t fault = Below(16);
  absl::Status host;
  int layers_done = 0;
  for (; host.ok() && layers_done < layers; ++layers_done) {
    const int layer = first + layers_done;
    std::vector<KeysValues> data(numbers.size());
    std::vector<std::vector<uint8_t>> x(numbers.size());
    for (size_t i = 0; i < numbers.size(); ++i) {
      AppendEntry& entry = entries[kHost][i];
      const Text& text = sequences_.at(numbers[i]).text;
      data[i] = MakeKeysValues(layout, text, entry.position, entry.tokens, layer);
      entry.k = data[i].k.data();
      entry.v = data[i].v.data();
      if (with_x) x[i] = MakeActivations(cache.config.hidden, text, entry.position, entry.tokens, layer);
      entry.x = with_x ? x[i].data() : nullptr;
    }
    if (fault == 0) return AppendWrong(entries, which, layer);
    if (fault == 1 && layer == first) AppendNotFinite(entries[kHost], which, layer);
    const auto lets_go = Below(2) == 0 ? testing::LetsGo::kAtTheEnd : testing::LetsGo::kWhileItCommits;
    host = Below(3) == 0
               ? testing::AppendInPieces(store(kHost), cache.ids[kHost], layer, entries[kHost], 1 + Below(4), lets_go)
               : store(kHost).Append(cache.ids[kHost], layer, entries[kHost]);
  }
  const absl::Status gpu = store(kGpu).Append(cache.ids[kGpu], {first, layers}, entries[kGpu]);
  const Answer answer = Compare(host, gpu, layers_done > 1);
  ASSERT_NE(answer, Answer::kRefused) << host;
  if (gpu.ok()) {
    Submission submission = NewSubmission(which);
    const uint64_t number = client->stream.submitted() + 1;
    for (size_t i = 0; i < numbers.size(); ++i) {
      const AppendEntry& entry = entries[kGpu][i];
      WalkedSequence& model = sequences_.at(numbers[i]);
      TakeChanges(model, first, layers, &submission);
      for (int layer = first; layer < first + layers; ++layer) {
        model.Append(layer, entry.tokens, cache.config);
        submission.writes.push_back(RowsOf(model, layer, entry.position, entry.tokens));
      }
      model.written_by = number;
    }
    NoteJobs(client, number);
    submission.epoch = OpenPlan(client);
    ASSERT_EQ(client->stream.Submit(std::move(submission)), number);
  }
  if (answer != Answer::kRoomDiffers) return;
  for (const uint64_t number : numbers) Drop(number);
}

void BackendsWalk::AppendWrong(std::array<std::vector<AppendEntry>, 2> entries, size_t which, int layer) {
  const WalkedCache& cache = caches_[which];
  const size_t bad = Below(entries[kHost].size());
  const uint64_t fault = Below(6);
  const auto other = Pick();
  absl::StatusCode code = absl::StatusCode::kInvalidArgument;
  for (const Memory memory : kMemories) {
    AppendEntry& entry = entries[memory][bad];
    if (fault == 0) ++entry.position;
    if (fault == 1) entry.tokens = 0;
    if (fault == 2) entry.sequence = uint64_t{1} << 40;
    if (fault == 3) layer = cache.config.layers;
    if (fault == 4 && other->second.cache != which) entry.sequence = other->second.ids[memory];
    if (fault == 5 || (fault == 4 && other->second.cache == which)) entries[memory].push_back(AppendEntry(entry));
  }
  if (fault == 0) code = absl::StatusCode::kFailedPrecondition;
  if (fault == 2) code = absl::StatusCode::kNotFound;
  const absl::Status host = store(kHost).Append(cache.ids[kHost], layer, entries[kHost]);
  const absl::Status gpu = store(kGpu).Append(cache.ids[kGpu], layer, entries[kGpu]);
  EXPECT_EQ(Compare(host, gpu), Answer::kRefused);
  EXPECT_EQ(host.code(), code) << host;
}

void BackendsWalk::AppendNotFinite(std::vector<AppendEntry> entries, size_t which, int layer) {
  const WalkedCache& cache = caches_[which];
  const size_t bad = Below(entries.size());
  AppendEntry& entry = entries[bad];
  const bool in_x = entry.x != nullptr && entry.position % cache.config.layout.page_tokens == 0 && Below(2) == 0;
  const size_t row = in_x ? cache.config.hidden : cache.config.layout.kv_heads * cache.config.layout.head_dim;
  const uint8_t** const side = in_x ? &entry.x : Below(2) ? &entry.k : &entry.v;
  const uint8_t* const good = *side;
  std::vector<uint8_t> values(good, good + 2 * row * entry.tokens);
  const uint16_t not_finite = Below(2) ? 0x7c00 : 0xfe01;
  std::memcpy(values.data() + 2 * Below(values.size() / 2), &not_finite, 2);
  *side = values.data();
  const absl::Status status =
      Below(2) ? testing::AppendInPieces(store(kHost), cache.ids[kHost], layer, entries, 1 + Below(4))
               : store(kHost).Append(cache.ids[kHost], layer, entries);
  ++counts.refused;
  if (absl::IsResourceExhausted(status) && !ample_) return;
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  const std::string field = absl::StrCat("entries[", bad, "].", in_x ? "x" : side == &entry.k ? "k" : "v", "[token ");
  EXPECT_EQ(DetailOf(status).field.substr(0, field.size()), field) << status;
}

void BackendsWalk::ForkOne() {
  const auto it = Pick();
  if (it == sequences_.end() || sequences_.size() >= kSequencesMax) return;
  const WalkedSequence& model = it->second;
  WalkedSequence copy = model;
  Submission submission = NewSubmission(model.cache);
  const auto host = store(kHost).Fork(model.ids[kHost]);
  const auto gpu = store(kGpu).Fork(model.ids[kGpu], &submission.copies);
  const Answer answer = Compare(host.status(), gpu.status());
  ASSERT_EQ(answer == Answer::kRefused, model.TokensInEveryLayer() != model.TokensInSomeLayer()) << host.status();
  copy.ids = {host.ok() ? *host : 0, gpu.ok() ? *gpu : 0};
  if (gpu.ok()) {
    submission.epoch = OpenPlan(model.client);
    copy.written_by = model.client->stream.Submit(std::move(submission));
  }
  if (answer != Answer::kOk) return DropMade(copy.ids);
  if (Below(2)) {  // another client goes on with it
    RunWrites(copy);
    copy.client = clients_[Below(kClients)];
    copy.written_by = 0;
  }
  // What follows differs.
  copy.text.Truncate(model.tokens[0]);
  if (Below(2)) copy.text.Add(1000 + static_cast<uint32_t>(Below(1000)));
  AddSequence(std::move(copy));
}

void BackendsWalk::CropOne() {
  const auto it = Pick();
  if (it == sequences_.end() || it->second.waits()) return;
  WalkedSequence& model = it->second;
  const WalkedCache& cache = caches_[model.cache];
  const int page_tokens = cache.config.layout.page_tokens;
  const uint64_t every = model.TokensInEveryLayer();
  uint64_t tokens = Below(every + 2);
  if (Below(2)) tokens = std::max(tokens, every > 20 ? every - Below(20) : 0);
  if (Below(4) == 0) tokens = tokens / page_tokens * page_tokens;
  const absl::Status host = store(kHost).Crop(model.ids[kHost], tokens);
  Submission submission = NewSubmission(model.cache);
  // Before: a page that the crop gives up is still copied from.
  submission.epoch = OpenPlan(model.client);
  const absl::Status gpu = store(kGpu).Crop(model.ids[kGpu], tokens, &submission.copies);
  if (gpu.ok() && tokens < model.TokensInSomeLayer()) {
    submission.truncates.push_back({model.ids[kGpu], (tokens + page_tokens - 1) / page_tokens});
  }
  const uint64_t number = model.client->stream.Submit(std::move(submission));
  const Answer answer = Compare(host, gpu);
  if (tokens > every) {
    ASSERT_EQ(host.code(), absl::StatusCode::kInvalidArgument) << host;
    return;
  }
  if (model.CropCutsAged(tokens, cache.config) && !cache.codec->info().identity) {
    ASSERT_EQ(host.code(), absl::StatusCode::kFailedPrecondition) << host;
    const std::string boundary = std::to_string(tokens / page_tokens * page_tokens);
    for (const absl::Status& status : {host, gpu}) {
      ASSERT_EQ(DetailOf(status).bound.substr(0, boundary.size()), boundary) << status;
    }
    return;
  }
  ASSERT_NE(answer, Answer::kRefused) << host;
  if (answer == Answer::kNoRoom) return;
  if (answer == Answer::kRoomDiffers) return Drop(it->first);
  model.Crop(tokens, cache.config);
  model.written_by = number;
  if (Below(2)) model.text.Add(1000 + static_cast<uint32_t>(Below(1000)));  // another text from here on
}

void BackendsWalk::PublishOne() {
  const auto it = Pick();
  if (it == sequences_.end()) return;
  const WalkedSequence& model = it->second;
  WalkedCache& cache = caches_[model.cache];
  RunWrites(model);  // whether what was written is finite is looked at first
  Text text = model.text;
  text.Truncate(model.TokensInEveryLayer());
  auto names = tests_[kHost]->Names(cache.ids[kHost], text);
  const size_t full = names.size();
  names.resize(Below(full + 1));
  const bool too_many = Below(16) == 0, twice = !too_many && names.size() > 1 && Below(16) == 0;
  if (too_many) names.resize(full + 1);
  if (twice) names.back() = names[0];
  const auto host = store(kHost).Publish(model.ids[kHost], names);
  const auto gpu = store(kGpu).Publish(model.ids[kGpu], names);
  const Answer answer = Compare(host.status(), gpu.status());
  if (too_many || twice) {
    ASSERT_EQ(host.status().code(),
              too_many ? absl::StatusCode::kFailedPrecondition : absl::StatusCode::kInvalidArgument)
        << host.status();
    return;
  }
  ASSERT_EQ(answer, Answer::kOk) << host.status();
  for (const auto& published : {*host, *gpu}) {
    ASSERT_LE(published.published + published.shared + published.deferred, static_cast<int>(names.size()));
  }
  if (NamesAreEqual(cache)) {
    ++counts.publishes;
    ASSERT_EQ(host->published, gpu->published);
    ASSERT_EQ(host->shared, gpu->shared);
    ASSERT_EQ(host->deferred, gpu->deferred);
  }
  counts.shared += host->shared;
  for (const BlockName& name : names) cache.published.insert(name.key);
  ASSERT_EQ(MatchBoth(cache, names), static_cast<int>(names.size()));
}

// Of blocks that may be published, in use or gone.
void BackendsWalk::RetainSome() {
  const auto it = Pick();
  if (it == sequences_.end()) return;
  WalkedCache& cache = caches_[it->second.cache];
  const auto names = tests_[kHost]->Names(cache.ids[kHost], it->second.text);
  const uint32_t priority = static_cast<uint32_t>(Below(5) * 25);
  const uint64_t ttl_ms = Below(2) * Below(100);
  uint64_t found[2];
  for (const Memory memory : kMemories) {
    const auto retained = store(memory).caches().Retain(cache.ids[memory], names, priority, ttl_ms);
    ASSERT_TRUE(retained.ok()) << retained.status();
    ASSERT_EQ(retained->bytes > 0, retained->blocks > 0);
    found[memory] = retained->blocks;
    tests_[memory]->clock.AdvanceNs(20000000);
  }
  if (NamesAreEqual(cache)) {
    ASSERT_EQ(found[kHost], found[kGpu]);
  }
}

void BackendsWalk::Describe() {
  const auto it = Pick();
  if (it == sequences_.end()) return;
  const WalkedSequence& model = it->second;
  SequenceInfo infos[2];
  for (const Memory memory : kMemories) {
    const auto info = store(memory).Describe(model.ids[memory]);
    ASSERT_TRUE(info.ok()) << info.status();
    ASSERT_EQ(info->layer_tokens, model.tokens);
    ASSERT_EQ(info->tokens, model.TokensInEveryLayer());
    ASSERT_FALSE(info->arriving);
    infos[memory] = *info;
  }
  ASSERT_EQ(infos[kHost].hit_blocks, infos[kGpu].hit_blocks);
  if (NamesAreEqual(caches_[model.cache])) {
    ASSERT_EQ(infos[kHost].published_blocks, infos[kGpu].published_blocks);
  }
}

void BackendsWalk::Drop(uint64_t number) {
  DropMade(sequences_.at(number).ids);
  sequences_.erase(number);
}

void BackendsWalk::DropMade(const std::array<SequenceId, 2>& ids) {
  for (const Memory memory : kMemories) {
    if (ids[memory] != 0) store(memory).Drop(ids[memory]);
  }
}

void BackendsWalk::Purge(size_t which) {
  WalkedCache& cache = caches_[which];
  const auto is_of = [which](const auto& of) { return of.cache == which; };
  cache.names_differ |= std::any_of(reads_.begin(), reads_.end(), is_of) ||
                        std::any_of(loads_.begin(), loads_.end(), is_of) ||
                        std::any_of(sends_.begin(), sends_.end(), [&](const Send& send) { return is_of(send.model); });
  const auto host = store(kHost).caches().Purge(cache.ids[kHost]);
  const auto gpu = store(kGpu).caches().Purge(cache.ids[kGpu]);
  ASSERT_TRUE(host.ok() && gpu.ok()) << host.status() << gpu.status();
  if (NamesAreEqual(cache)) {
    ASSERT_EQ(*host, *gpu);
    counts.purged += *host;
  }
  cache.names_lost = true;
  OpenCaches();
}

void BackendsWalk::ClearCache() {
  const size_t which = Below(caches_.size());
  WalkedCache& cache = caches_[which];
  for (size_t i = reads_.size(); i-- > 0;) {
    if (reads_[i].cache == which) EndRead(i);
  }
  for (size_t i = loads_.size(); i-- > 0;) {
    if (loads_[i].cache == which) EndLoad(i);
  }
  std::erase_if(sends_, [which](const Send& send) { return send.model.cache == which; });
  for (auto it = sequences_.begin(); it != sequences_.end();) {
    const auto next = std::next(it);
    if (it->second.cache == which) Drop(it->first);
    it = next;
  }
  Purge(which);
  for (const Memory memory : kMemories) {
    cache.evicted[memory] = tests_[memory]->store_metrics.evicted_blocks.Value();
  }
  for (const Memory memory : kMemories) {
    const CacheInfo info = *store(memory).caches().Describe(cache.ids[memory]);
    ASSERT_EQ(info.published_blocks, 0u);
    ASSERT_EQ(info.sequences, 0u);
  }
  cache.published.clear();
  cache.names_lost = cache.names_differ = false;
}

}  // namespace kvmanager::backends_walk
