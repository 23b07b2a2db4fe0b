#include "kvmanager/store/device_walk.h"

#include <algorithm>
#include <iterator>

#include "kvmanager/base/status.h"

namespace kvmanager::device_walk {

using testing::MakeConfig;

DeviceWalk::DeviceWalk(uint64_t seed)
    : random_(seed),
      moves_(seed % 2 == 0),
      test_(moves_ ? (seed % 4 == 0 ? 8 << 20 : 48 << 20) : 2 << 20,
            seed % 4 == 0   ? 4 << 20
            : seed % 3 == 0 ? 32 << 20
                            : 8 << 20,
            moves_) {
  store().report().SetSampler(&sampler_);
  OpenCaches();
  for (Client*& client : clients_) client = NewClient();
}

void DeviceWalk::Step() {
  switch (Below(moves_ ? 30 : 26)) {
    case 24:
    case 25:
      sendings_.empty() || Below(4) == 0 ? SendOne() : GoOnSending();
      break;
    case 28:
      CopyOne();
      break;
    case 26:
    case 29:
      for (uint64_t n = Below(5); n > 0 && test_.device.mover.moves() > 0; --n) test_.device.mover.FinishOne();
      break;
    case 27:
      for (uint64_t n = Below(5); n > 0 && test_.executor.jobs() > 0; --n)
        test_.executor.FinishOne(Below(test_.executor.jobs()));
      break;
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
      ExtendSome();
      break;
    case 8:
    case 9:
      ReadSome();
      break;
    case 10:
      ForkOne();
      break;
    case 11:
      CropOne();
      break;
    case 12:
    case 13:
      PublishOne();
      break;
    case 14:
      if (Below(3) == 0) DropOne();
      break;
    case 15:
      if (Below(12) == 0) KillClient();
      if (Below(60) == 0) Purge();
      break;
    case 16:
    case 17:
    case 18:
      RunJobs();
      break;
    default:
      all_clients_[Below(all_clients_.size())]->stream.Run(Below(6));
      clients_[Below(kClients)]->stream.Run(Below(6));
      break;
  }
  if (::testing::Test::HasFatalFailure()) return;
  SubmitWaiting();
  if (::testing::Test::HasFatalFailure()) return;
  CommitArrivals();
  if (::testing::Test::HasFatalFailure()) return;
  TellWrites(/*all=*/false);
  if (::testing::Test::HasFatalFailure()) return;
  BuryClients();
  if (sampler_.held() > 0 && samples_() % 3 == 0) sampler_.FinishOne(samples_() % sampler_.held());
  store().report().CheckInvariants();
}

void DeviceWalk::Finish() {
  for (bool busy = true; busy;) {
    for (auto& client : all_clients_) client->stream.Run(UINT64_MAX);
    while (!jobs_.empty()) RunJob(0);
    test_.device.mover.FinishAll();
    test_.executor.FinishAll();
    SubmitWaiting();
    if (::testing::Test::HasFatalFailure()) return;
    CommitArrivals();
    if (::testing::Test::HasFatalFailure()) return;
    TellWrites(/*all=*/true);
    for (size_t i = 0; i < sendings_.size();) {
      const size_t before = sendings_.size();
      GoOnSending(i);
      if (::testing::Test::HasFatalFailure()) return;
      i += sendings_.size() == before;
    }
    busy = !waiting_.empty() || !arrivals_.empty() || test_.device.mover.moves() > 0 || test_.executor.jobs() > 0 ||
           std::any_of(all_clients_.begin(), all_clients_.end(),
                       [](const auto& client) { return client->stream.queued() > 0; });
  }
  while (!sequences_.empty()) Drop(sequences_.begin()->first);
  sendings_.clear();
  while (sampler_.held() > 0) sampler_.FinishOne(0);
  BuryClients();
  store().report().CheckInvariants();
  store().caches().PurgeAll();
  store().report().CheckInvariants();
  ASSERT_TRUE(store().caches().List().empty());
  ASSERT_EQ(test_.device.executor.jobs(), 0u);
  // Every plan was released, so nothing that was given up has to wait.
  std::vector<PageId> reusable;
  test_.device.epochs.Collect(&reusable);
  for (const PageId slot : reusable) test_.device.pool->Free(slot);
  ASSERT_EQ(test_.device.pool->used_bytes(), 0u);
  ASSERT_EQ(test_.pool->used_bytes(), 0u);
}

void DeviceWalk::OpenCaches() {
  const CacheConfig configs[] = {MakeConfig("fake", 1, "a"),         MakeConfig("fake", 0, "b", 3),
                                 MakeConfig("declining", 2, "a"),    MakeConfig("raw", 1, "b"),
                                 MakeConfig("declining", 0, "c", 1), MakeConfig("uneven", 1, "a", 4)};
  caches_.resize(std::size(configs));
  for (size_t i = 0; i < std::size(configs); ++i) {
    ModelCache& cache = caches_[i];
    cache.config = configs[i];
    cache.config.device = TestDevice::kOrdinal;
    cache.id = test_.Open(cache.config);
    cache.codec = store().caches().codec(cache.id);
  }
}

Client* DeviceWalk::NewClient() {
  all_clients_.push_back(std::make_unique<Client>(&test_.device, &counts.kernels));
  return all_clients_.back().get();
}

uint64_t DeviceWalk::OpenPlan(Client* client) {
  if (client->stream.queued() >= kQueuedMax) client->stream.Run(1 + Below(kQueuedMax));
  return client->stream.OpenPlan();
}

Submission DeviceWalk::NewSubmission(size_t cache) const {
  Submission submission;
  submission.config = caches_[cache].config;
  submission.codec = caches_[cache].codec;
  return submission;
}

void DeviceWalk::TakeChanges(SequenceId sequence, int first_layer, int layers, Submission* submission) {
  for (int layer = first_layer; layer < first_layer + layers; ++layer) {
    Submission::Update update{sequence, layer, {}};
    ASSERT_TRUE(store().tables().TakeChanges(sequence, layer, &update.pages).ok());
    for (size_t i = 1; i < update.pages.size(); ++i) ASSERT_LT(update.pages[i - 1].page, update.pages[i].page);
    submission->updates.push_back(std::move(update));
  }
}

void DeviceWalk::RunJob(size_t index) {
  const Job job = jobs_[index];
  KV_CHECK(job.client->stream.ran() >= job.after);
  jobs_.erase(jobs_.begin() + index);
  test_.device.executor.FinishOne(index);
}

void DeviceWalk::RunJobs() {
  if (Below(64) == 0) slow_encoding_ = !slow_encoding_;
  for (uint64_t n = Below(6); n > 0 && !jobs_.empty(); --n) {
    // While encoding is slow, old jobs stay behind.
    const size_t stuck = slow_encoding_ && Below(16) > 0 ? (jobs_.size() + 1) / 2 : 0;
    if (stuck == jobs_.size()) return;
    const size_t index = stuck + Below(jobs_.size() - stuck);
    if (jobs_[index].client->stream.ran() >= jobs_[index].after) RunJob(index);
  }
}

void DeviceWalk::KillClient() {
  Client*& slot = clients_[Below(kClients)];
  Client* client = slot;
  client->dead = true;
  ++counts.deaths;
  if (Below(2)) {
    client->stream.Abandon();
  }
  std::erase_if(sendings_, [client](const Sending& sending) { return sending.client == client; });
  if (Below(2)) DropSequencesOf(client);
  if (Below(2)) std::erase_if(waiting_, [client](const Waiting& step) { return step.client == client; });
  slot = NewClient();
}

void DeviceWalk::BuryClients() {
  for (auto& client : all_clients_) {
    if (!client->dead || client->stream.closed() || client->stream.queued() > 0 || Below(4) > 0) continue;
    DropSequencesOf(client.get());
    client->stream.Close();
  }
}

void DeviceWalk::Purge() {
  ASSERT_TRUE(store().caches().Purge(caches_[Below(caches_.size())].id).ok());
  lost_names_ = true;
  OpenCaches();
}

}  // namespace kvmanager::device_walk
