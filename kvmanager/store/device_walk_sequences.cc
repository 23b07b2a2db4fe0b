// A walk's operations on single sequences.
#include <algorithm>

#include "kvmanager/store/device_walk.h"

namespace kvmanager::device_walk {

void DeviceWalk::Create() {
  if (sequences_.size() >= kSequencesMax) return;
  const size_t which = Below(caches_.size());
  ModelCache& cache = caches_[which];
  const int page_tokens = cache.config.layout.page_tokens;
  Text text;
  for (uint64_t n = Below(kBlocksMax * page_tokens); n > 0; --n) text.Add(NextId(text));
  const auto names = test_.Names(cache.id, text);
  size_t known = 0;
  while (known < names.size() && cache.published.count(names[known].key)) ++known;
  if (moves_ && Below(4) > 0) {
    auto lease = store().Fetch(cache.id, names);
    if (lease.ok()) {
      const auto match = store().caches().Match(cache.id, names);
      ASSERT_TRUE(match.ok());
      ASSERT_LE(match->hit_blocks, static_cast<int>(known));
      Await({which, text, *std::move(lease), {}, 0});
      return;
    }
    ASSERT_EQ(lease.status().code(), absl::StatusCode::kResourceExhausted) << lease.status();
    ++counts.exhausted;
  }
  const auto made = store().Create(cache.id, names);
  ASSERT_TRUE(made.ok()) << made.status();
  const int hit = made->match.hit_blocks;
  ASSERT_LE(hit, static_cast<int>(known));
  if (test_.store_metrics.evicted_blocks.Value() == 0 && !lost_names_) {
    ASSERT_EQ(hit, static_cast<int>(known));
  }
  AddSequence(which, text, *made);
}

void DeviceWalk::AddSequence(size_t which, Text text, const CreateResult& made) {
  const ModelCache& cache = caches_[which];
  const int hit = made.match.hit_blocks;
  counts.hits += hit;
  ModelSequence model;
  model.client = clients_[Below(kClients)];
  model.cache = which;
  text.Truncate(hit * cache.config.layout.page_tokens);
  model.text = text;
  model.tokens.assign(cache.config.layers, hit * cache.config.layout.page_tokens);
  model.aged.assign(cache.config.layers, hit);
  model.waiting.assign(cache.config.layers, 0);
  sequences_.emplace(made.sequence, model);
}

void DeviceWalk::ForkOne() {
  auto it = Pick();
  if (it == sequences_.end() || it->second.client->dead || sequences_.size() >= kSequencesMax) return;
  const ModelSequence model = it->second;
  Submission submission = NewSubmission(model.cache);
  const auto fork = store().Fork(it->first, &submission.copies);
  if (model.TokensInEveryLayer() != model.TokensInSomeLayer()) {
    ASSERT_EQ(fork.status().code(), absl::StatusCode::kFailedPrecondition);
    return;
  }
  if (fork.status().code() == absl::StatusCode::kResourceExhausted) {
    ++counts.exhausted;
    counts.awaited += store().tables().AwaitsRelease(TestDevice::kOrdinal);
    return;
  }
  ASSERT_TRUE(fork.ok()) << fork.status();
  counts.copies += submission.copies.size();
  submission.epoch = OpenPlan(model.client);
  ModelSequence copy = model;
  std::fill(copy.waiting.begin(), copy.waiting.end(), 0);
  copy.written_by = model.client->stream.Submit(std::move(submission));
  // What follows differs.
  copy.text.Truncate(model.tokens[0]);
  if (Below(2)) copy.text.Add(1000 + static_cast<uint32_t>(Below(1000)));
  sequences_.emplace(*fork, copy);
}

void DeviceWalk::CropOne() {
  auto it = Pick();
  if (it == sequences_.end() || it->second.waits() || it->second.client->dead) return;
  ModelSequence& model = it->second;
  const ModelCache& cache = caches_[model.cache];
  const int page_tokens = cache.config.layout.page_tokens;
  const uint64_t every = model.TokensInEveryLayer();
  uint64_t tokens = Below(every + 2);
  if (Below(2)) tokens = std::max(tokens, every > 20 ? every - Below(20) : 0);
  if (Below(4) == 0) tokens = tokens / page_tokens * page_tokens;
  Submission submission = NewSubmission(model.cache);
  // Before: a page that the crop gives up is still copied from.
  submission.epoch = OpenPlan(model.client);
  const absl::Status status = store().Crop(it->first, tokens, &submission.copies);
  ASSERT_TRUE(status.ok() || submission.copies.empty());
  const bool crops = tokens < model.TokensInSomeLayer();
  if (status.ok() && crops) submission.truncates.push_back({it->first, (tokens + page_tokens - 1) / page_tokens});
  counts.copies += submission.copies.size();
  const uint64_t number = model.client->stream.Submit(std::move(submission));
  if (tokens > every) {
    ASSERT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return;
  }
  if (crops && IsSent(it->first)) {
    ASSERT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    return;
  }
  if (model.CropCutsAged(tokens, cache.config) && !cache.codec->info().identity) {
    ASSERT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    return;
  }
  if (status.code() == absl::StatusCode::kResourceExhausted) {
    ++counts.exhausted;
    counts.awaited += store().tables().AwaitsRelease(TestDevice::kOrdinal);
    return;
  }
  ASSERT_TRUE(status.ok()) << status;
  model.Crop(tokens, cache.config);
  model.written_by = number;
  if (Below(2)) model.text.Add(1000 + static_cast<uint32_t>(Below(1000)));  // another text from here on
}

void DeviceWalk::PublishOne() {
  auto it = Pick();
  if (it == sequences_.end() || it->second.client->dead) return;
  const ModelSequence& model = it->second;
  ModelCache& cache = caches_[model.cache];
  // Whether what was written is finite is looked at first, so it was written.
  if (model.client->stream.ran() < model.written_by)
    model.client->stream.Run(model.written_by - model.client->stream.ran());
  if (::testing::Test::HasFatalFailure()) return;
  Text text = model.text;
  text.Truncate(model.TokensInEveryLayer());
  auto names = test_.Names(cache.id, text);
  names.resize(Below(names.size() + 1));
  const auto published = store().Publish(it->first, names);
  ASSERT_TRUE(published.ok()) << published.status();
  counts.shared += published->shared;
  if (published->shared > 0) published_ = it->first;
  for (const BlockName& name : names) cache.published.insert(name.key);
  const auto match = store().caches().Match(cache.id, names);
  ASSERT_TRUE(match.ok());
  ASSERT_EQ(match->hit_blocks, static_cast<int>(names.size()));
}

void DeviceWalk::Drop(SequenceId id) {
  for (Sending& sending : sendings_) {
    if (sending.id == id && !sending.lease->finished()) sending.text = sequences_.at(id).text;
  }
  store().Drop(id);
  sequences_.erase(id);
}

void DeviceWalk::DropOne() {
  auto it = Pick();
  if (it != sequences_.end()) Drop(it->first);
}

void DeviceWalk::DropSequencesOf(const Client* client) {
  for (auto it = sequences_.begin(); it != sequences_.end();) {
    if (it->second.client == client) store().Drop(it->first);
    it = it->second.client == client ? sequences_.erase(it) : std::next(it);
  }
}

}  // namespace kvmanager::device_walk
