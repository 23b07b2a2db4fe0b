// A walk's steps: appends and queries of some sequences of a client.
#include <algorithm>

#include "kvmanager/store/device_walk.h"

namespace kvmanager::device_walk {

void DeviceWalk::PickLayers(const ModelCache& cache, int* first, int* layers) {
  *first = 0;
  *layers = cache.config.layers;
  if (Below(3) > 0) return;
  *first = static_cast<int>(Below(cache.config.layers));
  *layers = 1 + static_cast<int>(Below(cache.config.layers - *first));
}

std::set<SequenceId> DeviceWalk::PickSome(Client** client, size_t* which, int* first, int* layers) {
  std::set<SequenceId> chosen;
  auto begin = Below(3) == 0 ? sequences_.find(published_) : Pick();
  if (begin == sequences_.end()) return chosen;
  *client = begin->second.client;
  *which = begin->second.cache;
  PickLayers(caches_[*which], first, layers);
  for (uint64_t tries = 1 + Below(4); tries > 0; --tries) {
    auto it = tries == 1 ? begin : Pick();
    const ModelSequence& model = it->second;
    if (model.client != *client || model.client->dead || model.cache != *which) continue;
    if (std::any_of(model.waiting.begin() + *first, model.waiting.begin() + *first + *layers,
                    [](uint32_t n) { return n > 0; })) {
      continue;
    }
    chosen.insert(it->first);
  }
  return chosen;
}

void DeviceWalk::ExtendSome() {
  Client* client;
  size_t which;
  int first, layers;
  const std::set<SequenceId> chosen = PickSome(&client, &which, &first, &layers);
  if (chosen.empty()) return;
  const ModelCache& cache = caches_[which];
  const PageLayout& layout = cache.config.layout;
  std::vector<AppendEntry> entries;
  bool even = true;
  for (SequenceId id : chosen) {
    ModelSequence& model = sequences_.at(id);
    const uint64_t at = model.tokens[first];
    const uint64_t tokens_max = uint64_t{kBlocksMax} * layout.page_tokens;
    // Layers drift apart at times, and catch up.
    uint64_t tokens = at == model.TokensInSomeLayer() || Below(4) == 0 ? 1 + Below(Below(2) ? 50 : 8)
                                                                       : model.TokensInSomeLayer() - at;
    tokens = std::min({tokens, tokens_max - at, TokensMax(id) - at});
    if (tokens == 0) continue;
    for (int layer = first; layer < first + layers; ++layer) even &= model.tokens[layer] == at;
    while (model.text.ids.size() < at + tokens) model.text.Add(NextId(model.text));
    AppendEntry entry;
    entry.sequence = id;
    entry.position = at;
    entry.tokens = static_cast<int>(tokens);
    entries.push_back(entry);
  }
  if (entries.empty()) return;
  if (Below(16) == 0) {
    Below(2) ? ++entries[Below(entries.size())].position : entries[Below(entries.size())].position += 16;
    even = false;
  }
  const size_t jobs = test_.device.executor.jobs();
  const absl::Status status = store().Append(cache.id, {first, layers}, entries);
  if (!even) {
    ASSERT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    ++counts.refused;
    return;
  }
  if (status.code() == absl::StatusCode::kResourceExhausted) {
    ++counts.exhausted;
    counts.awaited += store().tables().AwaitsRelease(TestDevice::kOrdinal);
    return;
  }
  ASSERT_TRUE(status.ok()) << status;
  Submission submission = NewSubmission(which);
  std::vector<AttendEntry> queries;
  for (const AppendEntry& entry : entries) {
    ModelSequence& model = sequences_.at(entry.sequence);
    TakeChanges(entry.sequence, first, layers, &submission);
    for (int layer = first; layer < first + layers; ++layer) {
      model.Append(layer, entry.tokens, cache.config);
      submission.writes.push_back(RowsOf(entry.sequence, model, layer, entry.position, entry.tokens));
    }
    model.written_by = client->stream.submitted() + 1;
    queries.push_back({entry.sequence, entry.position, entry.tokens});
  }
  for (size_t job = jobs; job < test_.device.executor.jobs(); ++job)
    jobs_.push_back({client, client->stream.submitted() + 1});
  // Writes and, if nothing is to be waited for, queries in one plan.
  std::unique_ptr<AttendLease> lease;
  if (Below(4) > 0) StartRead(which, first, layers, queries, &lease);
  if (lease != nullptr && lease->ready()) {
    AddQueries(first, layers, queries, *lease, &submission);
    lease = nullptr;
  }
  submission.epoch = OpenPlan(client);
  const uint64_t number = client->stream.Submit(std::move(submission));
  for (const AttendEntry& entry : queries) {
    if (!store().exports().AwaitsWrites(entry.sequence)) continue;
    writes_.push_back(
        {client, number, entry.sequence, first, std::vector<uint64_t>(layers, entry.position + entry.tokens)});
  }
  if (lease != nullptr) Wait(client, which, first, layers, queries, std::move(lease));
}

SimulatedRows DeviceWalk::RowsOf(SequenceId id, const ModelSequence& model, int layer, uint64_t position, int tokens) {
  SimulatedRows rows{id, layer, position, tokens, model.text, model.aged[layer]};
  rows.text.Truncate(model.tokens[layer]);
  return rows;
}

void DeviceWalk::StartRead(size_t which, int first, int layers, const std::vector<AttendEntry>& entries,
                           std::unique_ptr<AttendLease>* out) {
  bool even = true, part_of_aged = false;
  const CacheConfig& config = caches_[which].config;
  for (const AttendEntry& entry : entries) {
    const ModelSequence& model = sequences_.at(entry.sequence);
    for (int layer = first; layer < first + layers; ++layer) even &= model.aged[layer] == model.aged[first];
    part_of_aged |= model.SeesPartOfAged(first, entry, config);
  }
  part_of_aged &= !caches_[which].codec->info().identity;
  auto lease = store().Attend(caches_[which].id, {first, layers}, entries);
  if (!even) {
    ASSERT_EQ(lease.status().code(), absl::StatusCode::kFailedPrecondition) << lease.status();
    ++counts.refused;
    return;
  }
  if (part_of_aged && !lease.ok()) {
    ASSERT_EQ(lease.status().code(), absl::StatusCode::kFailedPrecondition) << lease.status();
    ++counts.refused;
    return;
  }
  ASSERT_TRUE(lease.ok()) << lease.status();
  ASSERT_FALSE(part_of_aged && (*lease)->ready() && config.codec != "declining");
  for (size_t i = 0; i < entries.size(); ++i) {
    ASSERT_EQ((*lease)->aged(i), sequences_.at(entries[i].sequence).aged[first]);
  }
  *out = *std::move(lease);
}

void DeviceWalk::AddQueries(int first, int layers, const std::vector<AttendEntry>& entries, const AttendLease& lease,
                            Submission* submission) {
  for (size_t i = 0; i < entries.size(); ++i) {
    const AttendEntry& entry = entries[i];
    TakeChanges(entry.sequence, first, layers, submission);
    for (int layer = first; layer < first + layers; ++layer) {
      SimulatedRows rows = RowsOf(entry.sequence, sequences_.at(entry.sequence), layer, entry.position, entry.tokens);
      rows.aged = lease.aged(i);
      submission->queries.push_back(std::move(rows));
    }
  }
}

void DeviceWalk::Wait(Client* client, size_t which, int first, int layers, std::vector<AttendEntry> entries,
                      std::unique_ptr<AttendLease> lease) {
  ++counts.waits;
  Waiting step{client, which, first, layers, std::move(entries), std::move(lease)};
  step.lease->OnReady([called = step.called] { *called = true; });
  MarkWaiting(step, +1);
  waiting_.push_back(std::move(step));
}

void DeviceWalk::MarkWaiting(const Waiting& step, int change) {
  for (const AttendEntry& entry : step.entries) {
    const auto found = sequences_.find(entry.sequence);
    if (found == sequences_.end()) continue;
    for (int layer = step.first_layer; layer < step.first_layer + step.layers; ++layer) {
      found->second.waiting[layer] += change;
    }
  }
}

void DeviceWalk::SubmitWaiting() {
  for (size_t i = 0; i < waiting_.size();) {
    ASSERT_EQ(waiting_[i].lease->ready(), *waiting_[i].called);
    if (!waiting_[i].lease->ready()) {
      ++i;
      continue;
    }
    Waiting step = std::move(waiting_[i]);
    waiting_.erase(waiting_.begin() + i);
    MarkWaiting(step, -1);
    step.lease = nullptr;
    const bool gone = std::any_of(step.entries.begin(), step.entries.end(),
                                  [this](const AttendEntry& entry) { return !sequences_.contains(entry.sequence); });
    if (gone || step.client->dead) continue;
    std::unique_ptr<AttendLease> lease;
    ASSERT_NO_FATAL_FAILURE(StartRead(step.cache, step.first_layer, step.layers, step.entries, &lease));
    if (lease == nullptr) continue;
    if (!lease->ready()) {  // pages were replaced by equal ones that are still to be encoded
      Wait(step.client, step.cache, step.first_layer, step.layers, std::move(step.entries), std::move(lease));
      continue;
    }
    Submission submission = NewSubmission(step.cache);
    ASSERT_NO_FATAL_FAILURE(AddQueries(step.first_layer, step.layers, step.entries, *lease, &submission));
    submission.epoch = OpenPlan(step.client);
    step.client->stream.Submit(std::move(submission));
  }
}

void DeviceWalk::ReadSome() {
  if (waiting_.size() >= kWaitingMax) return;
  Client* client;
  size_t which;
  int first, layers;
  const std::set<SequenceId> chosen = PickSome(&client, &which, &first, &layers);
  std::vector<AttendEntry> entries;
  for (SequenceId id : chosen) {
    const ModelSequence& model = sequences_.at(id);
    uint64_t tokens = UINT64_MAX;
    for (int layer = first; layer < first + layers; ++layer) tokens = std::min(tokens, model.tokens[layer]);
    if (tokens == 0) continue;
    const uint64_t position = Below(2) ? tokens - 1 : Below(tokens);
    entries.push_back({id, position, static_cast<int>(1 + Below(tokens - position))});
  }
  if (entries.empty()) return;
  std::unique_ptr<AttendLease> lease;
  ASSERT_NO_FATAL_FAILURE(StartRead(which, first, layers, entries, &lease));
  if (lease == nullptr) return;
  if (!lease->ready()) return Wait(client, which, first, layers, std::move(entries), std::move(lease));
  Submission submission = NewSubmission(which);
  ASSERT_NO_FATAL_FAILURE(AddQueries(first, layers, entries, *lease, &submission));
  submission.epoch = OpenPlan(client);
  client->stream.Submit(std::move(submission));
}

}  // namespace kvmanager::device_walk
