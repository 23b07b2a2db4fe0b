// Thousands of random operations on caches of a GPU, against a model of what every query must read.
//
// The GPU is simulated: each client has a stream, whose submissions run late and in order, each under a plan; encode
// jobs run behind the writes of their client. In half of the walks pages move to the host and back, when the walk says
// so: what was fetched, or copied to the host and back, is queried as all else. Sequences are sent while they grow:
// what is offered must be there when it is, and stay.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <set>

#include "kvmanager/base/status.h"
#include "kvmanager/store/simulated_gpu.h"
#include "kvmanager/store/store_testing.h"

namespace kvmanager {
namespace {

using testing::MakeConfig;
using testing::SimulatedRows;
using testing::SimulatedStream;
using testing::TestDevice;
using testing::TestStore;
using testing::Text;
using Submission = testing::SimulatedSubmission;

constexpr int kSteps = 12000;  // short walks do not come everywhere
#ifdef KVMANAGER_SANITIZED
constexpr uint64_t kSeeds = 2;
#else
constexpr uint64_t kSeeds = 6;
#endif
constexpr int kClients = 4;
constexpr int kBlocksMax = 10;  // of a sequence
constexpr size_t kSequencesMax = 24;
constexpr size_t kQueuedMax = 24;   // submissions of a client
constexpr size_t kWaitingMax = 12;  // steps of all clients
constexpr size_t kSendingMax = 6;   // hand-offs

struct Client {
  Client(TestDevice* device, SimulatedStream::Counts* counts) : stream(device, counts) {}
  SimulatedStream stream;
  bool dead = false;
};

struct ModelCache {
  CacheConfig config;
  CacheId id = 0;
  std::shared_ptr<const Codec> codec;
  std::set<Digest> published;
};

struct ModelSequence {
  Client* client = nullptr;
  size_t cache = 0;
  Text text;
  std::vector<uint64_t> tokens;   // [layers]
  std::vector<uint32_t> aged;     // [layers]
  std::vector<uint32_t> waiting;  // [layers] steps that wait for encoding
  uint64_t written_by = 0;        // its client's submission after which all its tokens are there
  uint64_t TokensInEveryLayer() const { return *std::min_element(tokens.begin(), tokens.end()); }
  uint64_t TokensInSomeLayer() const { return *std::max_element(tokens.begin(), tokens.end()); }
  bool waits() const {
    return std::any_of(waiting.begin(), waiting.end(), [](uint32_t n) { return n > 0; });
  }
};

/// A step whose queries are submitted once the pages that they read are encoded.
struct Waiting {
  Client* client = nullptr;
  size_t cache = 0;
  int first_layer = 0, layers = 0;
  std::vector<AttendEntry> entries;
  std::unique_ptr<DeviceLease> lease;
  std::shared_ptr<bool> called = std::make_shared<bool>(false);
};

/// A sequence on its way between the GPU and the host.
struct Arrival {
  size_t cache = 0;
  Text text;  // of a fetch
  std::unique_ptr<ArrivalLease> lease;
  std::optional<ModelSequence> copied;  // of a copy: as it was
  SequenceId on_host = 0;               // of a copy back: where it comes from
  std::shared_ptr<bool> called = std::make_shared<bool>(false);
};

/// A sequence that is sent while it grows.
struct Sending {
  const Client* client = nullptr;
  SequenceId id = 0;
  size_t cache = 0;
  bool by_host = false;
  uint64_t tokens = 0;
  std::unique_ptr<ExportLease> lease;
  Text text;                            // once it is finished, or dropped
  std::vector<testing::SentPage> sent;  // that were offered
};

/// What is to be told of a submission once it has run.
struct Write {
  const Client* client = nullptr;
  uint64_t number = 0;
  SequenceId id = 0;
  int first_layer = 0;
  std::vector<uint64_t> tokens;  // by layer
};

/// Keeps some of the pages that were encoded for a while, whose bytes must stay meanwhile.
class HoldingSampler final : public PageSampler {
 public:
  static constexpr size_t kHeldMax = 16;
  bool Wants(CacheId, uint32_t) override { return held_.size() < kHeldMax && ++asked_ % 2 == 0; }
  void Compare(const PageSample& page, absl::AnyInvocable<void()> done) override {
    const uint8_t* const raw_end = page.raw + page.codec->layout().raw_bytes();
    const uint8_t* const encoded_end = page.encoded + page.codec->info().page_bytes(int(page.layer));
    held_.push_back({page, {page.raw, raw_end}, {page.encoded, encoded_end}, std::move(done)});
  }
  size_t held() const { return held_.size(); }
  uint64_t compared() const { return compared_; }
  void FinishOne(size_t index) {
    Held held = std::move(held_[index]);
    held_.erase(held_.begin() + index);
    ++compared_;
    EXPECT_EQ(held.page.device, TestDevice::kOrdinal);
    EXPECT_TRUE(std::equal(held.raw.begin(), held.raw.end(), held.page.raw));
    EXPECT_TRUE(std::equal(held.encoded.begin(), held.encoded.end(), held.page.encoded));
    held.done();
  }

 private:
  struct Held {
    PageSample page;
    std::vector<uint8_t> raw, encoded;  // as they were
    absl::AnyInvocable<void()> done;
  };
  std::vector<Held> held_;
  uint64_t asked_ = 0, compared_ = 0;
};

/// An encode job runs behind this submission of its client.
struct Job {
  const Client* client = nullptr;
  uint64_t after = 0;
};

class DeviceRandomTest {
 public:
  explicit DeviceRandomTest(uint64_t seed)
      : random_(seed),
        moves_(seed % 2 == 0),
        test_(moves_ ? (seed % 4 == 0 ? 8 << 20 : 48 << 20) : 2 << 20,
              seed % 4 == 0   ? 4 << 20
              : seed % 3 == 0 ? 32 << 20
                              : 8 << 20,
              moves_) {
    store().SetSampler(&sampler_);
    OpenCaches();
    for (Client*& client : clients_) client = NewClient();
  }

  void Step() {
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
    store().CheckInvariants();
  }

  void Finish() {
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
    store().CheckInvariants();
    store().PurgeAll();
    store().CheckInvariants();
    ASSERT_TRUE(store().Caches().empty());
    ASSERT_EQ(test_.device.executor.jobs(), 0u);
    // Every plan was released, so nothing that was given up has to wait.
    std::vector<PageId> reusable;
    test_.device.epochs.Collect(&reusable);
    for (const PageId slot : reusable) test_.device.pool->Free(slot);
    ASSERT_EQ(test_.device.pool->used_bytes(), 0u);
    ASSERT_EQ(test_.pool->used_bytes(), 0u);
  }

  struct Counts {
    uint64_t hits = 0, shared = 0, exhausted = 0, awaited = 0, waits = 0, refused = 0, deaths = 0, copies = 0;
    uint64_t sampled = 0, tried_again = 0, demoted = 0, fetched = 0, waited_arrivals = 0, copied_out = 0,
             copied_back = 0;
    uint64_t sent = 0, sent_by_host = 0, sent_early = 0, withdrawn = 0;
    SimulatedStream::Counts kernels;
  };
  Counts counts;
  uint64_t sampled() const { return sampler_.compared(); }
  uint64_t demoted() const { return static_cast<uint64_t>(test_.store_metrics.demoted_blocks.Value()); }
  uint64_t fetched() const { return static_cast<uint64_t>(test_.store_metrics.fetched_blocks.Value()); }

 private:
  uint64_t Below(uint64_t n) { return random_() % n; }
  PageStore& store() { return *test_.store; }

  // Opens what a purge may have closed; names known so far stay, as an upper bound of what can be hit.
  void OpenCaches() {
    const CacheConfig configs[] = {MakeConfig("fake", 1, "a"),         MakeConfig("fake", 0, "b", 3),
                                   MakeConfig("declining", 2, "a"),    MakeConfig("raw", 1, "b"),
                                   MakeConfig("declining", 0, "c", 1), MakeConfig("uneven", 1, "a", 4)};
    caches_.resize(std::size(configs));
    for (size_t i = 0; i < std::size(configs); ++i) {
      ModelCache& cache = caches_[i];
      cache.config = configs[i];
      cache.config.device = TestDevice::kOrdinal;
      cache.id = test_.Open(cache.config);
      cache.codec = store().codec(cache.id);
    }
  }

  Client* NewClient() {
    all_clients_.push_back(std::make_unique<Client>(&test_.device, &counts.kernels));
    return all_clients_.back().get();
  }

  std::map<SequenceId, ModelSequence>::iterator Pick() {
    return sequences_.empty() ? sequences_.end() : std::next(sequences_.begin(), Below(sequences_.size()));
  }

  // Few different texts, so that sequences meet.
  uint32_t NextId(const Text& text) { return text.ids.size() % 48 == 3 ? static_cast<uint32_t>(Below(2)) : 7; }

  // --- streams ---

  uint64_t OpenPlan(Client* client) {
    if (client->stream.queued() >= kQueuedMax) client->stream.Run(1 + Below(kQueuedMax));
    return client->stream.OpenPlan();
  }

  Submission NewSubmission(size_t cache) const {
    Submission submission;
    submission.config = caches_[cache].config;
    submission.codec = caches_[cache].codec;
    return submission;
  }

  void TakeChanges(SequenceId sequence, int first_layer, int layers, Submission* submission) {
    for (int layer = first_layer; layer < first_layer + layers; ++layer) {
      Submission::Update update{sequence, layer, {}};
      ASSERT_TRUE(store().TakeChanges(sequence, layer, &update.pages).ok());
      for (size_t i = 1; i < update.pages.size(); ++i) ASSERT_LT(update.pages[i - 1].page, update.pages[i].page);
      submission->updates.push_back(std::move(update));
    }
  }

  void RunJob(size_t index) {
    const Job job = jobs_[index];
    KV_CHECK(job.client->stream.ran() >= job.after);
    jobs_.erase(jobs_.begin() + index);
    test_.device.executor.FinishOne(index);
  }

  void RunJobs() {
    if (Below(64) == 0) slow_encoding_ = !slow_encoding_;
    for (uint64_t n = Below(6); n > 0 && !jobs_.empty(); --n) {
      // While encoding is slow, old jobs stay behind.
      const size_t stuck = slow_encoding_ && Below(16) > 0 ? (jobs_.size() + 1) / 2 : 0;
      if (stuck == jobs_.size()) return;
      const size_t index = stuck + Below(jobs_.size() - stuck);
      if (jobs_[index].client->stream.ran() >= jobs_[index].after) RunJob(index);
    }
  }

  // --- operations ---

  void Create() {
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
        const auto match = store().Match(cache.id, names);
        ASSERT_TRUE(match.ok());
        ASSERT_LE(match->hit_blocks, static_cast<int>(known));
        Await({which, text, *std::move(lease), {}, 0});
        return;
      }
      ASSERT_EQ(lease.status().code(), absl::StatusCode::kResourceExhausted) << lease.status();
      ++counts.exhausted;
    }
    const auto made = store().CreateSequence(cache.id, names);
    ASSERT_TRUE(made.ok()) << made.status();
    const int hit = made->match.hit_blocks;
    ASSERT_LE(hit, static_cast<int>(known));
    if (test_.store_metrics.evicted_blocks.Value() == 0 && !lost_names_) {
      ASSERT_EQ(hit, static_cast<int>(known));
    }
    AddSequence(which, text, *made);
  }

  void AddSequence(size_t which, Text text, const CreateResult& made) {
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

  // --- between the GPU and the host ---

  void Await(Arrival arrival) {
    arrival.lease->OnReady([called = arrival.called] { *called = true; });
    counts.waited_arrivals += !arrival.lease->ready();
    arrivals_.push_back(std::move(arrival));
  }

  void CopyOne() {
    auto it = Pick();
    if (it == sequences_.end() || it->second.client->dead || arrivals_.size() >= kWaitingMax) return;
    const ModelSequence& model = it->second;
    if (model.client->stream.ran() < model.written_by)
      model.client->stream.Run(model.written_by - model.client->stream.ran());
    if (::testing::Test::HasFatalFailure()) return;
    auto lease = store().Copy(it->first, CacheConfig::kHost);
    if (model.TokensInEveryLayer() != model.TokensInSomeLayer()) {
      ASSERT_EQ(lease.status().code(), absl::StatusCode::kFailedPrecondition) << lease.status();
      return;
    }
    if (!lease.ok()) {
      ASSERT_EQ(lease.status().code(), absl::StatusCode::kResourceExhausted) << lease.status();
      ++counts.exhausted;
      return;
    }
    Await({model.cache, {}, *std::move(lease), model, 0});
    // Others come and go, and the sequence itself goes on.
    if (Below(4) == 0) Drop(it->first);
  }

  void CommitArrivals() {
    for (size_t i = 0; i < arrivals_.size();) {
      ASSERT_EQ(arrivals_[i].lease->ready(), *arrivals_[i].called);
      if (Below(40) == 0) {  // given up
        Arrival gone = std::move(arrivals_[i]);
        arrivals_.erase(arrivals_.begin() + i);
        if (gone.on_host != 0) store().Drop(gone.on_host);
        continue;
      }
      if (!*arrivals_[i].called) {
        ++i;
        continue;
      }
      if (arrivals_[i].lease->awaits_room() && Below(4) > 0) {
        ++counts.tried_again;
        *arrivals_[i].called = false;
        arrivals_[i].lease->TryAgain();
        arrivals_[i].lease->OnReady([called = arrivals_[i].called] { *called = true; });
        ++i;
        continue;
      }
      Arrival arrival = std::move(arrivals_[i]);
      arrivals_.erase(arrivals_.begin() + i);
      const auto made = arrival.lease->Commit();
      arrival.lease = nullptr;
      if (arrival.on_host != 0) store().Drop(arrival.on_host);
      if (made.status().code() == absl::StatusCode::kResourceExhausted) {
        ++counts.exhausted;
        continue;
      }
      ASSERT_TRUE(made.ok()) << made.status();
      if (!arrival.copied.has_value()) {
        AddSequence(arrival.cache, arrival.text, *made);
      } else if (arrival.on_host == 0) {
        ASSERT_NO_FATAL_FAILURE(CheckOnHost(made->sequence, *arrival.copied));
        ++counts.copied_out;
        auto back = store().Copy(made->sequence, TestDevice::kOrdinal);
        if (back.ok()) {
          Await({arrival.cache, {}, *std::move(back), arrival.copied, made->sequence});
        } else {
          ASSERT_EQ(back.status().code(), absl::StatusCode::kResourceExhausted) << back.status();
          ++counts.exhausted;
          store().Drop(made->sequence);
        }
      } else {
        ++counts.copied_back;
        ModelSequence model = *arrival.copied;
        model.client = clients_[Below(kClients)];
        model.written_by = 0;
        model.text.Truncate(model.tokens[0]);
        std::fill(model.waiting.begin(), model.waiting.end(), 0);
        if (Below(2)) model.text.Add(1000 + static_cast<uint32_t>(Below(1000)));
        sequences_.emplace(made->sequence, model);
      }
    }
  }

  // What a hand-off would send of it.
  void CheckOnHost(SequenceId id, const ModelSequence& model) {
    const auto lease = store().Export(id);
    if (lease.status().code() == absl::StatusCode::kResourceExhausted) return;  // of the open page's copy
    ASSERT_TRUE(lease.ok()) << lease.status();
    ASSERT_NE((*lease)->last(), nullptr);
    const uint64_t all_tokens = (*lease)->first().tokens;
    const ModelCache& cache = caches_[model.cache];
    const PageLayout& layout = cache.config.layout;
    ASSERT_EQ(all_tokens, model.tokens[0]);
    for (const testing::SentPage& sent : testing::TakeAll(**lease)) {
      const HandOffPage& page = sent.page;
      const uint64_t begin = uint64_t{page.block} * layout.page_tokens;
      const int tokens = static_cast<int>(std::min<uint64_t>(layout.page_tokens, all_tokens - begin));
      const int layer = static_cast<int>(page.layer);
      std::vector<uint8_t> expected = testing::MakeRawPage(layout, model.text, page.block, tokens, layer);
      if (sent.encoded) expected = testing::MakeEncodedPage(*cache.codec, expected, page.block, layer);
      ASSERT_EQ(page.bytes, expected.size());
      ASSERT_EQ(std::memcmp(sent.bytes.bytes.data(), expected.data(), expected.size()), 0)
          << "page " << page.block << " of layer " << page.layer;
      ASSERT_EQ(sent.bytes.checksum, testing::Checksum(expected));
    }
  }

  // --- sending ---

  bool IsSent(SequenceId id) const {
    return std::any_of(sendings_.begin(), sendings_.end(),
                       [id](const Sending& sending) { return sending.id == id && !sending.lease->finished(); });
  }
  uint64_t TokensMax(SequenceId id) const {
    uint64_t tokens = UINT64_MAX;
    for (const Sending& sending : sendings_) {
      if (sending.id == id && !sending.lease->finished()) tokens = std::min(tokens, sending.tokens);
    }
    return tokens;
  }

  // Who submits for a sequence says when that has run; of a client that died nobody says anything.
  void TellWrites(bool all) {
    for (size_t i = 0; i < writes_.size();) {
      const Write& write = writes_[i];
      if (!write.client->dead && (write.client->stream.ran() < write.number || (!all && Below(3) == 0))) {
        ++i;
        continue;
      }
      if (!write.client->dead) store().Written(write.id, write.first_layer, write.tokens);
      writes_.erase(writes_.begin() + i);
    }
  }

  void SendOne() {
    auto it = Pick();
    // What a codec declines is of interest.
    for (int tries = 0; tries < 3 && it != sequences_.end(); ++tries) {
      if (caches_[it->second.cache].config.codec == "declining") break;
      it = Pick();
    }
    if (it == sequences_.end() || it->second.client->dead || sendings_.size() >= kSendingMax) return;
    const ModelSequence& model = it->second;
    const ModelCache& cache = caches_[model.cache];
    const uint64_t tokens_max = uint64_t{kBlocksMax} * cache.config.layout.page_tokens;
    const uint64_t has = model.TokensInSomeLayer();
    Sending sending;
    sending.client = model.client;
    sending.id = it->first;
    sending.cache = model.cache;
    sending.by_host = moves_ && Below(2) == 0;
    sending.tokens = has + Below(tokens_max - has + 1);
    if (Below(4) > 0) sending.tokens = std::min(tokens_max, has + Below(20));
    auto lease = store().ExportGrowing(it->first, sending.tokens, /*goes_on=*/Below(2) == 0,
                                       sending.by_host ? ExportWay::kByHost : ExportWay::kDirect);
    if (lease.status().code() == absl::StatusCode::kResourceExhausted) {
      ASSERT_TRUE(sending.by_host);
      ++counts.exhausted;
      return;
    }
    ASSERT_TRUE(lease.ok()) << lease.status();
    sending.lease = *std::move(lease);
    sendings_.push_back(std::move(sending));
    writes_.push_back({model.client, model.client->stream.submitted(), it->first, 0, model.tokens});
  }

  void GoOnSending() {
    const size_t index = Below(sendings_.size());
    Sending& sending = sendings_[index];
    const auto found = sequences_.find(sending.id);
    if (Below(200) == 0 || (found == sequences_.end() && Below(8) == 0)) {  // given up
      sendings_.erase(sendings_.begin() + index);
      return;
    }
    GoOnSending(index);
  }
  void GoOnSending(size_t index) {
    Sending& sending = sendings_[index];
    const auto found = sequences_.find(sending.id);
    if (!sending.lease->finished() && found != sequences_.end()) {
      const bool whole = found->second.TokensInEveryLayer() == sending.tokens;
      if (whole || Below(4) == 0) {
        const absl::Status status = sending.lease->Finish();
        if (status.code() == absl::StatusCode::kResourceExhausted) {
          ++counts.exhausted;
        } else {
          ASSERT_EQ(status.ok(), whole) << status;
        }
        if (status.ok()) sending.text = found->second.text;
      }
    }
    ASSERT_TRUE(sending.lease->status().ok()) << sending.lease->status();
    const HandOffFirst& first = sending.lease->first();
    for (const ExportedPage& page : sending.lease->TakeReady()) {
      sending.sent.push_back({first.pages[page.page], true, false, page});
      counts.sent_early += !sending.lease->finished();
      const Text& text = sending.lease->finished() || found == sequences_.end() ? sending.text : found->second.text;
      ASSERT_NO_FATAL_FAILURE(ExpectSent(sending, text, sending.sent.back()));
    }
    if (sending.lease->last() == nullptr) return;
    // Everything was offered, and nothing has changed since.
    const HandOffLast& last = *sending.lease->last();
    ASSERT_EQ(sending.sent.size() + last.withdrawn.size(), first.pages.size());
    counts.withdrawn += last.withdrawn.size();
    testing::CopyOpenPages(*sending.lease);
    for (size_t i = 0; i < last.pages.size(); ++i) {
      sending.sent.push_back({last.pages[i], false, false, sending.lease->last_pages()[i]});
    }
    for (const testing::SentPage& page : sending.sent) {
      ASSERT_NO_FATAL_FAILURE(ExpectSent(sending, sending.text, page));
    }
    ++(sending.by_host ? counts.sent_by_host : counts.sent);
    sendings_.erase(sendings_.begin() + index);
  }

  void ExpectSent(const Sending& sending, const Text& text, const testing::SentPage& sent) {
    const ModelCache& cache = caches_[sending.cache];
    const PageLayout& layout = cache.config.layout;
    const uint64_t begin = uint64_t{sent.page.block} * layout.page_tokens;
    const int tokens = static_cast<int>(std::min<uint64_t>(layout.page_tokens, sending.tokens - begin));
    ASSERT_LE(begin + tokens, text.ids.size());
    const int layer = static_cast<int>(sent.page.layer);
    std::vector<uint8_t> expected = testing::MakeRawPage(layout, text, sent.page.block, tokens, layer);
    if (sent.encoded) expected = testing::MakeEncodedPage(*cache.codec, expected, sent.page.block, layer);
    ASSERT_EQ(sent.bytes.bytes.size(), expected.size());
    ASSERT_EQ(std::memcmp(sent.bytes.bytes.data(), expected.data(), expected.size()), 0)
        << "page " << sent.page.block << " of layer " << layer << (sending.by_host ? ", on the host" : "");
    if (sending.by_host) {
      ASSERT_EQ(sent.bytes.checksum, testing::Checksum(expected));
    }
  }

  // A cache's layers, all or some.
  void PickLayers(const ModelCache& cache, int* first, int* layers) {
    *first = 0;
    *layers = cache.config.layers;
    if (Below(3) > 0) return;
    *first = static_cast<int>(Below(cache.config.layers));
    *layers = 1 + static_cast<int>(Below(cache.config.layers - *first));
  }

  // Some sequences of one client and cache whose layers do not wait, begun by a random one; perhaps none.
  std::set<SequenceId> PickSome(Client** client, size_t* which, int* first, int* layers) {
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

  void ExtendSome() {
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
    const absl::Status status = store().Extend(cache.id, first, layers, entries);
    if (!even) {
      ASSERT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      ++counts.refused;
      return;
    }
    if (status.code() == absl::StatusCode::kResourceExhausted) {
      ++counts.exhausted;
      counts.awaited += store().AwaitsRelease(TestDevice::kOrdinal);
      return;
    }
    ASSERT_TRUE(status.ok()) << status;
    Submission submission = NewSubmission(which);
    std::vector<AttendEntry> queries;
    for (const AppendEntry& entry : entries) {
      ModelSequence& model = sequences_.at(entry.sequence);
      TakeChanges(entry.sequence, first, layers, &submission);
      for (int layer = first; layer < first + layers; ++layer) {
        const int64_t aged = static_cast<int64_t>(entry.position / layout.page_tokens) - cache.config.lag_pages;
        if (aged > model.aged[layer]) model.aged[layer] = static_cast<uint32_t>(aged);
        model.tokens[layer] += entry.tokens;
        submission.writes.push_back(RowsOf(entry.sequence, model, layer, entry.position, entry.tokens));
      }
      model.written_by = client->stream.submitted() + 1;
      queries.push_back({entry.sequence, entry.position, entry.tokens});
    }
    for (size_t job = jobs; job < test_.device.executor.jobs(); ++job)
      jobs_.push_back({client, client->stream.submitted() + 1});
    // Writes and, if nothing is to be waited for, queries in one plan.
    std::unique_ptr<DeviceLease> lease;
    if (Below(4) > 0) StartRead(which, first, layers, queries, &lease);
    if (lease != nullptr && lease->ready()) {
      AddQueries(first, layers, queries, *lease, &submission);
      lease = nullptr;
    }
    submission.epoch = OpenPlan(client);
    const uint64_t number = client->stream.Submit(std::move(submission));
    for (const AttendEntry& entry : queries) {
      if (!store().AwaitsWrites(entry.sequence)) continue;
      writes_.push_back(
          {client, number, entry.sequence, first, std::vector<uint64_t>(layers, entry.position + entry.tokens)});
    }
    if (lease != nullptr) Wait(client, which, first, layers, queries, std::move(lease));
  }

  static SimulatedRows RowsOf(SequenceId id, const ModelSequence& model, int layer, uint64_t position, int tokens) {
    SimulatedRows rows{id, layer, position, tokens, model.text, model.aged[layer]};
    rows.text.Truncate(model.tokens[layer]);
    return rows;
  }

  // nullptr: refused, as it must be.
  void StartRead(size_t which, int first, int layers, const std::vector<AttendEntry>& entries,
                 std::unique_ptr<DeviceLease>* out) {
    bool even = true, part_of_aged = false;
    const CacheConfig& config = caches_[which].config;
    const uint64_t page_tokens = config.layout.page_tokens;
    for (const AttendEntry& entry : entries) {
      const ModelSequence& model = sequences_.at(entry.sequence);
      for (int layer = first; layer < first + layers; ++layer) even &= model.aged[layer] == model.aged[first];
      // Behind the last token of its page, if it begins with that, an entry has queries that see a part of theirs.
      uint64_t position = entry.position;
      if ((position + 1) % page_tokens == 0) ++position;
      part_of_aged |= position < entry.position + entry.tokens && position / page_tokens < model.aged[first];
    }
    part_of_aged &= !caches_[which].codec->info().identity;
    auto lease = store().Read(caches_[which].id, first, layers, entries);
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

  void AddQueries(int first, int layers, const std::vector<AttendEntry>& entries, const DeviceLease& lease,
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

  void Wait(Client* client, size_t which, int first, int layers, std::vector<AttendEntry> entries,
            std::unique_ptr<DeviceLease> lease) {
    ++counts.waits;
    Waiting step{client, which, first, layers, std::move(entries), std::move(lease)};
    step.lease->OnReady([called = step.called] { *called = true; });
    MarkWaiting(step, +1);
    waiting_.push_back(std::move(step));
  }

  void MarkWaiting(const Waiting& step, int change) {
    for (const AttendEntry& entry : step.entries) {
      const auto found = sequences_.find(entry.sequence);
      if (found == sequences_.end()) continue;
      for (int layer = step.first_layer; layer < step.first_layer + step.layers; ++layer) {
        found->second.waiting[layer] += change;
      }
    }
  }

  // Queries of steps that waited: what they read is encoded now, and another look tells which slots that left.
  void SubmitWaiting() {
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
      std::unique_ptr<DeviceLease> lease;
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

  void ReadSome() {
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
    std::unique_ptr<DeviceLease> lease;
    ASSERT_NO_FATAL_FAILURE(StartRead(which, first, layers, entries, &lease));
    if (lease == nullptr) return;
    if (!lease->ready()) return Wait(client, which, first, layers, std::move(entries), std::move(lease));
    Submission submission = NewSubmission(which);
    ASSERT_NO_FATAL_FAILURE(AddQueries(first, layers, entries, *lease, &submission));
    submission.epoch = OpenPlan(client);
    client->stream.Submit(std::move(submission));
  }

  void ForkOne() {
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
      counts.awaited += store().AwaitsRelease(TestDevice::kOrdinal);
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

  void CropOne() {
    auto it = Pick();
    if (it == sequences_.end() || it->second.waits() || it->second.client->dead) return;
    ModelSequence& model = it->second;
    const ModelCache& cache = caches_[model.cache];
    const int page_tokens = cache.config.layout.page_tokens;
    const uint64_t every = model.TokensInEveryLayer();
    uint64_t tokens = Below(every + 2);
    if (Below(2)) tokens = std::max(tokens, every > 20 ? every - Below(20) : 0);
    if (Below(4) == 0) tokens = tokens / page_tokens * page_tokens;
    const uint32_t index = static_cast<uint32_t>(tokens / page_tokens);
    // A crop ages by the newest token first.
    std::vector<uint32_t> aged_by_newest = model.aged;
    bool aged = false;
    for (size_t layer = 0; layer < model.aged.size(); ++layer) {
      if (model.tokens[layer] > tokens) {
        const int64_t n = static_cast<int64_t>((model.tokens[layer] - 1) / page_tokens) - cache.config.lag_pages;
        if (n > aged_by_newest[layer]) aged_by_newest[layer] = static_cast<uint32_t>(n);
      }
      aged |= index < aged_by_newest[layer];
    }
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
    if (tokens % page_tokens != 0 && crops && aged && !cache.codec->info().identity) {
      ASSERT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
      return;
    }
    if (status.code() == absl::StatusCode::kResourceExhausted) {
      ++counts.exhausted;
      counts.awaited += store().AwaitsRelease(TestDevice::kOrdinal);
      return;
    }
    ASSERT_TRUE(status.ok()) << status;
    if (crops) {
      for (size_t layer = 0; layer < model.aged.size(); ++layer) {
        model.aged[layer] = std::min(aged_by_newest[layer], index);
      }
    }
    std::fill(model.tokens.begin(), model.tokens.end(), tokens);
    model.written_by = number;
    model.text.Truncate(tokens);
    if (Below(2)) model.text.Add(1000 + static_cast<uint32_t>(Below(1000)));  // another text from here on
  }

  void PublishOne() {
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
    const auto match = store().Match(cache.id, names);
    ASSERT_TRUE(match.ok());
    ASSERT_EQ(match->hit_blocks, static_cast<int>(names.size()));
  }

  void Drop(SequenceId id) {
    for (Sending& sending : sendings_) {
      if (sending.id == id && !sending.lease->finished()) sending.text = sequences_.at(id).text;
    }
    store().Drop(id);
    sequences_.erase(id);
  }

  void DropOne() {
    auto it = Pick();
    if (it != sequences_.end()) Drop(it->first);
  }

  // Its stream runs on, or what is left of it never runs.
  void KillClient() {
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

  void DropSequencesOf(const Client* client) {
    for (auto it = sequences_.begin(); it != sequences_.end();) {
      if (it->second.client == client) store().Drop(it->first);
      it = it->second.client == client ? sequences_.erase(it) : std::next(it);
    }
  }

  // Of dead clients whose streams are empty nothing is left.
  void BuryClients() {
    for (auto& client : all_clients_) {
      if (!client->dead || client->stream.closed() || client->stream.queued() > 0 || Below(4) > 0) continue;
      DropSequencesOf(client.get());
      client->stream.Close();
    }
  }

  void Purge() {
    ASSERT_TRUE(store().Purge(caches_[Below(caches_.size())].id).ok());
    lost_names_ = true;
    OpenCaches();
  }

  std::mt19937_64 random_;
  const bool moves_;
  HoldingSampler sampler_;      // outlives the store
  std::mt19937_64 samples_{1};  // apart from the walk's, which goes where it goes without them
  TestStore test_;
  std::vector<std::unique_ptr<Client>> all_clients_;  // dead ones too
  Client* clients_[kClients];                         // live ones
  std::vector<ModelCache> caches_;
  std::map<SequenceId, ModelSequence> sequences_;
  std::vector<Waiting> waiting_;
  std::vector<Arrival> arrivals_;
  std::vector<Sending> sendings_;
  std::vector<Write> writes_;
  std::vector<Job> jobs_;  // of the executor, by its index
  bool lost_names_ = false;
  bool slow_encoding_ = false;
  SequenceId published_ = 0;  // the last one that shares what it published: it is looked at often
};

TEST(PageStoreDeviceRandom, KernelsReadWhatTheModelSays) {
  DeviceRandomTest::Counts sum;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    DeviceRandomTest test(seed);
    for (int step = 0; step < kSteps; ++step) {
      SCOPED_TRACE(::testing::Message() << "step " << step);
      test.Step();
      if (::testing::Test::HasFatalFailure()) return;
    }
    test.Finish();
    if (::testing::Test::HasFatalFailure()) return;
    auto& counts = test.counts;
    counts.demoted = test.demoted();
    counts.fetched = test.fetched();
    std::printf("seed %d: %d demoted, %d fetched, %d arrivals waited, %d copied out, %d back\n", int(seed),
                int(counts.demoted), int(counts.fetched), int(counts.waited_arrivals), int(counts.copied_out),
                int(counts.copied_back));
    sum.sampled += test.sampled();
    sum.demoted += counts.demoted;
    sum.fetched += counts.fetched;
    sum.waited_arrivals += counts.waited_arrivals;
    sum.copied_out += counts.copied_out;
    sum.copied_back += counts.copied_back;
    sum.tried_again += counts.tried_again;
    std::printf("seed %d: %d sent, %d by the host, %d pages early, %d withdrawn; %d tried again\n", int(seed),
                int(counts.sent), int(counts.sent_by_host), int(counts.sent_early), int(counts.withdrawn),
                int(counts.tried_again));
    sum.sent += counts.sent;
    sum.sent_by_host += counts.sent_by_host;
    sum.sent_early += counts.sent_early;
    sum.withdrawn += counts.withdrawn;
    std::printf(
        "seed %d: %d hits, %d shared, %d copies, %d exhausted (%d awaited), %d waits, %d refused, %d deaths, %d "
        "queries "
        "of %d raw, %d encoded, %d declined pages\n",
        int(seed), int(counts.hits), int(counts.shared), int(counts.copies), int(counts.exhausted), int(counts.awaited),
        int(counts.waits), int(counts.refused), int(counts.deaths), int(counts.kernels.queries),
        int(counts.kernels.raw), int(counts.kernels.encoded), int(counts.kernels.declined));
    sum.hits += counts.hits;
    sum.shared += counts.shared;
    sum.copies += counts.copies;
    sum.exhausted += counts.exhausted;
    sum.awaited += counts.awaited;
    sum.waits += counts.waits;
    sum.deaths += counts.deaths;
    sum.kernels.encoded += counts.kernels.encoded;
    sum.kernels.declined += counts.kernels.declined;
  }
  // The walk went where it should.
  EXPECT_GT(sum.hits, 0u);
  EXPECT_GT(sum.shared, 0u);
  EXPECT_GT(sum.copies, 0u);
  EXPECT_GT(sum.exhausted, 0u);
  EXPECT_GT(sum.awaited, 0u);
  EXPECT_GT(sum.waits, 0u);
  EXPECT_GT(sum.deaths, 0u);
  EXPECT_GT(sum.kernels.encoded, 0u);
  EXPECT_GT(sum.kernels.declined, 0u);
  EXPECT_GT(sum.sampled, 1000u);
  EXPECT_GT(sum.demoted, 0u);
  EXPECT_GT(sum.fetched, 0u);
  EXPECT_GT(sum.waited_arrivals, 0u);
  EXPECT_GT(sum.copied_out, 0u);
  EXPECT_GT(sum.copied_back, 0u);
  EXPECT_GT(sum.tried_again, 0u);
  EXPECT_GT(sum.sent, 0u);
  EXPECT_GT(sum.sent_by_host, 0u);
  EXPECT_GT(sum.sent_early, 0u);
  EXPECT_GT(sum.withdrawn, 0u);
}

}  // namespace
}  // namespace kvmanager
