#include "kvmanager/store/backends_walk.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "kvmanager/base/status.h"

namespace kvmanager::backends_walk {

using testing::MakeConfig;

BackendsWalk::BackendsWalk(uint64_t seed) : random_(seed), ample_(seed % 3 == 0) {
  const uint64_t large = 256 << 20, small = 12 << 20;
  // Each policy has its walks.
  const EvictionKind eviction = static_cast<EvictionKind>(seed % 3);
  tests_[kHost] = std::make_unique<TestStore>(ample_ ? large : small, 0, false, eviction);
  tests_[kGpu] = std::make_unique<TestStore>(2 << 20,
                                             ample_          ? large
                                             : seed % 3 == 1 ? small
                                                             : small + (2 << 20),
                                             false, eviction);
  OpenCaches();
  for (Client*& client : clients_) client = NewClient();
}

void BackendsWalk::Step() {
  switch (Below(24)) {
    case 0:
    case 1:
      Create();
      break;
    case 2:
    case 3:
    case 4:
    case 5:
    case 6:
    case 7:
      AppendSome();
      break;
    case 8:
    case 9:
    case 10:
      AttendSome();
      break;
    case 11:
      LoadSome();
      break;
    case 12:
      ForkOne();
      break;
    case 13:
      CropOne();
      break;
    case 14:
    case 15:
      PublishOne();
      break;
    case 16:
      if (!sequences_.empty() && Below(3) == 0) Drop(Pick()->first);
      break;
    case 17:
      StartSend();
      break;
    case 18:
      Below(2) ? FinishSend() : ReceiveOne();
      break;
    case 19:
      if (Below(12) == 0) KillClient();
      if (Below(25) == 0) Purge(Below(caches_.size()));
      if (Below(50) == 0) ClearCache();
      break;
    case 20:
      Describe();
      if (!ample_ && Below(8) == 0) SetQuotas();
      if (Below(3) == 0) RetainSome();
      break;
    default:
      RunSome();
      break;
  }
  if (::testing::Test::HasFailure()) return;
  CheckReads();
  CheckLoads();
  BuryClients();
  for (const Memory memory : kMemories) store(memory).report().CheckInvariants();
}

void BackendsWalk::Finish() {
  do {
    for (auto& client : all_clients_) client->stream.Run(UINT64_MAX);
    while (!jobs_.empty()) RunGpuJob(0);
    tests_[kHost]->executor.FinishAll();
    CheckReads();
    CheckLoads();
    if (::testing::Test::HasFailure()) return;
  } while (std::any_of(all_clients_.begin(), all_clients_.end(),
                       [](const auto& client) { return client->stream.queued() > 0; }));
  for (const Read& read : reads_) ASSERT_TRUE(read.compared || read.gpu_given_up);
  for (const Load& load : loads_) ASSERT_TRUE(load.compared);
  while (!reads_.empty()) EndRead(0);
  while (!loads_.empty()) EndLoad(0);
  sends_.clear();
  while (!sequences_.empty()) Drop(sequences_.begin()->first);
  for (auto& client : all_clients_) {
    if (!client->stream.closed()) client->stream.Close();
  }
  for (const Memory memory : kMemories) {
    store(memory).report().CheckInvariants();
    store(memory).caches().PurgeAll();
    store(memory).report().CheckInvariants();
    ASSERT_TRUE(store(memory).caches().List().empty());
  }
  store(kGpu).tables().CollectReleased();
  ASSERT_EQ(tests_[kGpu]->device.pool->used_bytes(), 0u);
  ASSERT_EQ(tests_[kGpu]->pool->used_bytes(), 0u);
  ASSERT_EQ(tests_[kHost]->pool->used_bytes(), 0u);
}

void BackendsWalk::OpenCaches() {
  CacheConfig configs[] = {MakeConfig("fake", 1, "a"),         MakeConfig("fake", 0, "b", 3),
                           MakeConfig("declining", 2, "a"),    MakeConfig("raw", 1, "b"),
                           MakeConfig("declining", 0, "c", 1), MakeConfig("uneven", 1, "a", 4),
                           MakeConfig("sinks", 1, "c")};
  // Some keep activations in host memory, in slots as large as raw pages: the pools have few slabs, each of one size.
  for (const size_t i : {1, 3, 4}) configs[i].hidden = 256;
  caches_.resize(std::size(configs));
  for (size_t i = 0; i < std::size(configs); ++i) {
    WalkedCache& cache = caches_[i];
    cache.config = configs[i];
    cache.ids[kHost] = tests_[kHost]->Open(configs[i]);
    configs[i].device = TestDevice::kOrdinal;
    cache.ids[kGpu] = tests_[kGpu]->Open(configs[i]);
    cache.codec = store(kHost).caches().codec(cache.ids[kHost]);
    EXPECT_EQ(store(kHost).caches().Describe(cache.ids[kHost])->digest,
              store(kGpu).caches().Describe(cache.ids[kGpu])->digest);
  }
}

// Other room for each: what it is full of changes, and nothing else.
void BackendsWalk::SetQuotas() {
  Quotas quotas;
  quotas.most_percent = 50 + Below(51);
  for (const char* tenant : {"a", "b", "c"}) {
    if (Below(3) == 0) continue;
    Quotas::InPool& of = quotas.tenants[tenant].host;
    of.guaranteed_bytes = Below(2) * (1 << 20);
    if (Below(2) == 0) of.most_bytes = (6 + Below(7)) << 20;
    quotas.tenants[tenant].gpu = of;
  }
  // The GPU's store has one slab in host memory, which cannot be guaranteed to several.
  Quotas of_gpu = quotas;
  for (auto& [name, tenant] : of_gpu.tenants) tenant.host = {};
  ASSERT_TRUE(store(kHost).report().SetQuotas(quotas).ok());
  ASSERT_TRUE(store(kGpu).report().SetQuotas(of_gpu).ok());
}

Client* BackendsWalk::NewClient() {
  all_clients_.push_back(std::make_unique<Client>(&tests_[kGpu]->device, &counts.kernels));
  return all_clients_.back().get();
}

// Its stream runs on, or what is left of it never runs.
void BackendsWalk::KillClient() {
  Client*& slot = clients_[Below(kClients)];
  Client* const client = slot;
  client->dead = true;
  ++counts.deaths;
  if (Below(2)) client->stream.Abandon();
  for (size_t i = reads_.size(); i-- > 0;) {
    if (reads_[i].client == client) EndRead(i);
  }
  for (size_t i = loads_.size(); i-- > 0;) {
    if (loads_[i].client == client) EndLoad(i);
  }
  std::erase_if(sends_, [client](const Send& send) { return send.client == client; });
  for (auto it = sequences_.begin(); it != sequences_.end();) {
    const auto next = std::next(it);
    if (it->second.client == client) Drop(it->first);
    it = next;
  }
  slot = NewClient();
}

void BackendsWalk::BuryClients() {
  for (auto& client : all_clients_) {
    if (client->dead && !client->stream.closed() && client->stream.queued() == 0) client->stream.Close();
  }
}

void BackendsWalk::RunSome() {
  testing::ManualExecutor& host = tests_[kHost]->executor;
  for (uint64_t n = Below(6); n > 0 && host.jobs() > 0; --n) host.FinishOne(Below(host.jobs()));
  all_clients_[Below(all_clients_.size())]->stream.Run(Below(6));
  clients_[Below(kClients)]->stream.Run(Below(12));
  for (uint64_t n = Below(8); n > 0 && !jobs_.empty(); --n) {
    const size_t index = Below(jobs_.size());
    const Job& job = jobs_[index];
    if (job.client == nullptr || job.client->stream.ran() >= job.after) RunGpuJob(index);
  }
}

void BackendsWalk::RunGpuJob(size_t index) {
  const Job job = jobs_[index];
  KV_CHECK(job.client == nullptr || job.client->stream.ran() >= job.after);
  jobs_.erase(jobs_.begin() + index);
  tests_[kGpu]->device.executor.FinishOne(index);
}

void BackendsWalk::RunWrites(const WalkedSequence& model) {
  testing::SimulatedStream& stream = model.client->stream;
  if (stream.ran() < model.written_by) stream.Run(model.written_by - stream.ran());
}

BackendsWalk::Answer BackendsWalk::Compare(const absl::Status& host, const absl::Status& gpu, bool no_room_in_part) {
  ++counts.statuses;
  const bool no_host = absl::IsResourceExhausted(host), no_gpu = absl::IsResourceExhausted(gpu);
  if (no_host || no_gpu) {
    EXPECT_FALSE(ample_) << host << " in host memory, on the GPU " << gpu;
    // What is wrong is refused before room is looked for.
    EXPECT_TRUE((no_host || host.ok()) && (no_gpu || gpu.ok())) << host << " in host memory, on the GPU " << gpu;
    const bool both = no_host && no_gpu && !no_room_in_part;
    ++(both ? counts.no_room : counts.room_differs);
    return both ? Answer::kNoRoom : Answer::kRoomDiffers;
  }
  EXPECT_EQ(host.code(), gpu.code()) << host << " in host memory, on the GPU " << gpu;
  EXPECT_EQ(DetailOf(host).field, DetailOf(gpu).field) << host << " in host memory, on the GPU " << gpu;
  counts.refused += !host.ok();
  return host.ok() ? Answer::kOk : Answer::kRefused;
}

bool BackendsWalk::NamesAreEqual(const WalkedCache& cache) const {
  return !cache.names_differ && std::all_of(std::begin(kMemories), std::end(kMemories), [&](Memory memory) {
    return tests_[memory]->store_metrics.evicted_blocks.Value() == cache.evicted[memory];
  });
}

Submission BackendsWalk::NewSubmission(size_t cache) const {
  Submission submission;
  submission.config = caches_[cache].config;
  submission.codec = caches_[cache].codec;
  return submission;
}

uint64_t BackendsWalk::OpenPlan(Client* client) {
  if (client->stream.queued() >= device_walk::kQueuedMax) client->stream.Run(1 + Below(device_walk::kQueuedMax));
  return client->stream.OpenPlan();
}

void BackendsWalk::TakeChanges(const WalkedSequence& model, int first_layer, int layers, Submission* submission) {
  for (int layer = first_layer; layer < first_layer + layers; ++layer) {
    Submission::Update update{model.ids[kGpu], layer, {}};
    ASSERT_TRUE(store(kGpu).tables().TakeChanges(model.ids[kGpu], layer, &update.pages).ok());
    submission->updates.push_back(std::move(update));
  }
}

void BackendsWalk::NoteJobs(const Client* client, uint64_t after) {
  while (jobs_.size() < tests_[kGpu]->device.executor.jobs()) jobs_.push_back({client, after});
}

testing::SimulatedRows BackendsWalk::RowsOf(const WalkedSequence& model, int layer, uint64_t position,
                                            int tokens) const {
  testing::SimulatedRows rows{model.ids[kGpu], layer, position, tokens, model.text, model.aged[layer]};
  rows.text.Truncate(model.tokens[layer]);
  return rows;
}

}  // namespace kvmanager::backends_walk
