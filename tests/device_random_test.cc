// Random operations of engines on a small pool of a GPU, each against its counterpart in host memory of the same
// daemon.
//
// The engines run at once, each on a thread with connections of its own: one attends in the daemon, two in their own
// process. All are of one tenant and one cache, so that they find, share and evict one another's blocks. Now and then
// an engine floods the pool: what is refused then must leave its sequences as they were. In the end nothing may be
// left.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/device.h"
#include "kvmanager/memory/device_testing.h"
#include "tests/device_engines.h"
#include "tests/device_fixture.h"
#include "tests/harness.h"
#include "tests/matchers.h"

namespace kvmanager::testing {
namespace {

using client::Client;
using client::DeviceClient;

constexpr int kStepsOfEngine = 260;
constexpr int64_t kLongestMs = 9000;  // of an engine's steps
constexpr uint64_t kTokensMax = 480;  // of a sequence
constexpr size_t kSequencesMax = 6;   // of an engine, but for floods
constexpr uint64_t kPromptShifts[] = {0, 97, 194};
constexpr int kOtherShifts = 400;
constexpr int kPromptMax = 300;  // where it is said; codecs whose queries choose what they read take notice
constexpr int kAtOnce = 130, kQueriesMax = 16, kBatchMax = 4;
constexpr int kFloodBatch = 64, kFloodBatches = 5, kFloodStays = 8;
constexpr double kStepError = 4e-3, kRunError = 2e-3;
/// A CPU rounds q more than a GPU does where it looks centroids up (codecs/million/million_attention.h).
constexpr double kLookUpStepError = 2e-2, kLookUpRunError = 1e-2;
constexpr char kArtifact[] = "made";
constexpr char kZack[] = "zack:mode=balanced,rate=0.5,calibration=made";
constexpr char kMillion[] = "million:m=64,bits=8,calibration=made";

struct Case {
  const char* name;
  const char* codec;
  int lag_pages;
  const char* pool;

  bool looks_up() const { return absl::StartsWith(codec, "million"); }
  double step_error() const { return looks_up() ? kLookUpStepError : kStepError; }
  double run_error() const { return looks_up() ? kLookUpRunError : kRunError; }
};

/// What the engines of a run share.
struct Shared {
  const DaemonProcess* daemon;
  const Text* text;
  const Case* shape;
  std::string artifacts;  // the daemon's directory of them
  std::mutex no_purge;    // held while a cache is opened that nothing holds yet
};

/// An engine with its sequences and their counterparts.
class Actor {
 public:
  Actor(Shared* shared, Way way, uint64_t seed) : shared_(*shared), way_(way), seed_(seed), random_(seed) {}
  ~Actor() { Disconnect(); }

  void Run() {
    Connect();
    const int64_t until = NowMs() + kLongestMs * kSlowdown;
    while (steps_ < kStepsOfEngine && NowMs() < until && !::testing::Test::HasFailure()) Step();
    Disconnect();
  }

  const StepDifference& difference() const { return all_; }
  int64_t count(const std::string& what) const {
    const auto found = counts_.find(what);
    return found == counts_.end() ? 0 : found->second;
  }
  std::string Describe() const {
    std::string text;
    for (const auto& [what, n] : counts_) absl::StrAppend(&text, " ", what, " ", n);
    return text;
  }

 private:
  struct Live {
    std::unique_ptr<client::Sequence> gpu, cpu;
    std::vector<uint64_t> shifts;  // of each token
    uint64_t tokens() const { return shifts.size(); }
  };

  int Uniform(int low, int high) { return std::uniform_int_distribution<int>(low, high)(random_); }
  uint64_t RandomShift() { return kPromptShifts[Uniform(0, int(std::size(kPromptShifts)) - 1)]; }
  uint64_t NextShift(const Live& live) {
    if (Uniform(0, 11) == 0) return uint64_t(Uniform(0, kOtherShifts));
    return live.shifts.empty() ? RandomShift() : live.shifts.back();
  }
  const Text& text() const { return *shared_.text; }
  static bool IsFull(const absl::Status& status) { return status.code() == absl::StatusCode::kResourceExhausted; }

  void Connect() {
    const std::lock_guard lock(shared_.no_purge);
    ASSERT_OK_AND_ASSIGN(gpu_client_, Client::Connect(shared_.daemon->listen(), {}));
    ASSERT_OK_AND_ASSIGN(cpu_client_, Client::Connect(shared_.daemon->listen(), {}));
    ASSERT_OK_AND_ASSIGN(device_, DeviceClient::Open(gpu_client_.get(), 0));
    client::CacheOptions options = OptionsFor(text(), shared_.shape->codec, 0);
    options.lag_pages = shared_.shape->lag_pages;
    ASSERT_OK_AND_ASSIGN(gpu_, MakeEngine(way_, gpu_client_.get(), device_.get(), options, shared_.artifacts));
    options.device = -1;
    ASSERT_OK_AND_ASSIGN(cpu_, HostEngine::Make(cpu_client_.get(), options));
    // Empty sequences: a purge closes caches that nothing holds.
    ASSERT_OK_AND_ASSIGN(auto gpu, gpu_->cache().CreateSequence());
    ASSERT_OK_AND_ASSIGN(auto cpu, cpu_->cache().CreateSequence());
    anchors_ = {std::move(gpu.sequence), std::move(cpu.sequence), {}};
  }
  void Disconnect() {
    while (!live_.empty()) Drop(live_.size() - 1);
    DropFlood();
    anchors_ = {};
    gpu_.reset();
    cpu_.reset();
    device_.reset();
    gpu_client_.reset();
    cpu_client_.reset();
  }
  void Drop(size_t i) {
    if (gpu_ != nullptr) gpu_->Forget(*live_[i].gpu);
    live_.erase(live_.begin() + ptrdiff_t(i));
  }
  void DropFlood() {
    for (const auto& sequence : flood_) gpu_->Forget(*sequence);
    flood_.clear();
  }

  void Step() {
    ++steps_;
    SCOPED_TRACE(::testing::Message() << shared_.shape->name << " way " << int(way_) << " seed " << seed_ << " step "
                                      << steps_);
    if (!flood_.empty() && --flood_stays_ == 0) DropFlood();
    const int choice = Uniform(0, 99);
    if (live_.empty() || (choice < 10 && live_.size() < kSequencesMax)) {
      Create();
    } else if (choice < 46) {
      Append();
    } else if (choice < 56) {
      Query();
    } else if (choice < 63) {
      Fork();
    } else if (choice < 71) {
      Crop();
    } else if (choice < 79) {
      Publish();
    } else if (choice < 84) {
      Drop(size_t(Uniform(0, int(live_.size()) - 1)));
    } else if (choice < 90) {
      BothWays();
    } else if (choice < 93) {
      Refusals();
    } else if (choice < 96) {
      Flood();
    } else if (choice < 98) {
      const std::lock_guard lock(shared_.no_purge);
      EXPECT_OK(gpu_client_->Purge(Client::kAllCaches));
    } else if (choice < 99) {
      ++counts_["reconnects"];
      Disconnect();
      Connect();
    } else {
      Inspect();
    }
  }

  std::vector<BlockName> NamesOf(const std::vector<uint64_t>& shifts) {
    std::vector<uint32_t> ids;
    for (size_t i = 0; i < shifts.size(); ++i) ids.push_back(uint32_t(i * 1000 + shifts[i]));
    std::vector<BlockName> names;
    NameBlocks(gpu_->cache().description().digest, ids, kPage, &names);
    return names;
  }

  void Create() {
    Live live;
    std::vector<BlockName> names;
    if (Uniform(0, 3) != 0) {
      live.shifts.assign(size_t(Uniform(1, 6)) * kPage, RandomShift());
      names = NamesOf(live.shifts);
    }
    // Other engines publish and purge meanwhile: the counterpart holds what it found while the GPU's may find less.
    ASSERT_OK_AND_ASSIGN(auto held, cpu_->cache().CreateSequence(names));
    names.resize(size_t(held.match.hit_blocks));
    const uint64_t prompt = Uniform(0, 1) == 0 ? 0 : uint64_t(Uniform(1, kPromptMax));
    ASSERT_OK_AND_ASSIGN(auto gpu, gpu_->cache().CreateSequence(names, prompt));
    names.resize(size_t(gpu.match.hit_blocks));
    ASSERT_OK_AND_ASSIGN(auto cpu, cpu_->cache().CreateSequence(names, prompt));
    ASSERT_EQ(cpu.match.hit_blocks, gpu.match.hit_blocks);
    counts_["hits"] += gpu.match.hit_blocks;
    live.shifts.resize(names.size() * kPage);
    live.gpu = std::move(gpu.sequence);
    live.cpu = std::move(cpu.sequence);
    live_.push_back(std::move(live));
  }

  std::vector<size_t> PickSome() {
    std::vector<size_t> all(live_.size());
    for (size_t i = 0; i < all.size(); ++i) all[i] = i;
    std::shuffle(all.begin(), all.end(), random_);
    all.resize(std::min<size_t>(all.size(), size_t(Uniform(1, kBatchMax))));
    return all;
  }
  std::vector<Part> On(const std::vector<size_t>& of, std::vector<Part> parts, bool gpu) {
    for (size_t i = 0; i < of.size(); ++i) parts[i].sequence = (gpu ? live_[of[i]].gpu : live_[of[i]].cpu)->id();
    return parts;
  }
  static std::string Named(const std::vector<Part>& parts) {
    std::string text;
    for (const Part& part : parts) absl::StrAppend(&text, " ", part.first, "+", part.tokens);
    return text;
  }
  /// The counterparts' answers, and what was asked for.
  void Compare(const LayerRows& got, const LayerRows& expected, const std::vector<Part>& parts, const char* what) {
    StepDifference step;
    ASSERT_EQ(got.size(), expected.size());
    step.Add(text(), parts, got, expected);
    EXPECT_LT(step.same.relative(), shared_.shape->step_error()) << what << Named(parts) << Parts(got, expected, parts);
    const bool raw = absl::StartsWith(shared_.shape->codec, "raw") || absl::StartsWith(shared_.shape->codec, "pq");
    EXPECT_LT(step.decoded.relative(), raw ? kStepError : StepDifference::kDecodedError)
        << what << Named(parts) << Parts(got, expected, parts);
    all_.Add(step);
    ++counts_[what];
  }
  /// The error of each layer and entry.
  std::string Parts(const LayerRows& got, const LayerRows& expected, const std::vector<Part>& parts) {
    std::string text_of;
    for (size_t layer = 0; layer < got.size(); ++layer) {
      auto g = got[layer].begin(), e = expected[layer].begin();
      for (const Part& part : parts) {
        const ptrdiff_t rows = ptrdiff_t(size_t(part.tokens) * text().q_row());
        if (got[layer].end() - g < rows) break;
        Difference difference;
        difference.Add({g, g + rows}, {e, e + rows});
        absl::StrAppend(&text_of, "; layer ", layer, ": ", difference.relative());
        g += rows, e += rows;
      }
    }
    return text_of;
  }

  void Append() {
    std::vector<size_t> of = PickSome();
    std::erase_if(of, [&](size_t i) { return live_[i].tokens() + kAtOnce > kTokensMax; });
    if (of.empty()) return;
    std::vector<Part> parts;
    for (const size_t i : of) {
      parts.push_back({0, live_[i].tokens(), Uniform(0, 1) == 0 ? 1 : Uniform(1, kAtOnce), NextShift(live_[i])});
    }
    LayerRows got, expected;
    absl::Status status = gpu_->Step(text(), On(of, parts, true), true, &got);
    if (IsFull(status)) {
      ++counts_["full"];
      if (gpu_->failed_layer() == 0) return AskLast(of);
      // Some layers are ahead: the others follow once there is room, or the sequences go.
      DropFlood();
      status = gpu_->Step(text(), On(of, parts, true), true, &got, gpu_->failed_layer());
      if (IsFull(status)) {
        std::sort(of.rbegin(), of.rend());
        for (const size_t i : of) Drop(i);
        return;
      }
      ++counts_["resumed"];
    }
    ASSERT_OK(status) << Named(parts);
    ASSERT_OK(cpu_->Step(text(), On(of, parts, false), true, &expected));
    for (size_t i = 0; i < of.size(); ++i) {
      live_[of[i]].shifts.insert(live_[of[i]].shifts.end(), size_t(parts[i].tokens), parts[i].shift);
    }
    Compare(got, expected, parts, "appends");
  }

  void Ask(const std::vector<size_t>& of, const std::vector<Part>& parts, const char* what) {
    LayerRows got, expected;
    const absl::Status on_gpu = gpu_->Step(text(), On(of, parts, true), false, &got);
    const absl::Status on_cpu = cpu_->Step(text(), On(of, parts, false), false, &expected);
    ASSERT_EQ(on_gpu.code(), on_cpu.code()) << on_gpu << " but " << on_cpu << Named(parts);
    if (on_gpu.ok()) Compare(got, expected, parts, what);
  }
  void AskLast(const std::vector<size_t>& of) {
    std::vector<size_t> some;
    std::vector<Part> parts;
    for (const size_t i : of) {
      if (live_[i].tokens() == 0) continue;
      some.push_back(i);
      parts.push_back({0, live_[i].tokens() - 1, 1, 0});
    }
    if (!some.empty()) Ask(some, parts, "queries_when_full");
  }
  void Query() {
    std::vector<size_t> of = PickSome();
    std::erase_if(of, [&](size_t i) { return live_[i].tokens() == 0; });
    if (of.empty()) return;
    std::vector<Part> parts;
    for (const size_t i : of) {
      const int tokens = int(live_[i].tokens());
      const int first = Uniform(Uniform(0, 1) == 0 ? 0 : std::max(0, tokens - kPage), tokens - 1);
      parts.push_back({0, uint64_t(first), std::min(tokens - first, Uniform(1, kQueriesMax)), RandomShift()});
    }
    Ask(of, parts, "queries");
  }

  void Fork() {
    if (live_.size() >= kSequencesMax) return;
    const Live& live = live_[size_t(Uniform(0, int(live_.size()) - 1))];
    auto gpu = live.gpu->Fork();
    if (IsFull(gpu.status())) {
      ++counts_["full"];
      return;
    }
    ASSERT_OK(gpu);
    ASSERT_OK(gpu_->After(**gpu));
    ASSERT_OK_AND_ASSIGN(auto cpu, live.cpu->Fork());
    Live copy{*std::move(gpu), std::move(cpu), live.shifts};
    live_.push_back(std::move(copy));
    ++counts_["forks"];
  }

  void Crop() {
    Live& live = live_[size_t(Uniform(0, int(live_.size()) - 1))];
    const int tokens = int(live.tokens());
    const uint64_t to = uint64_t(Uniform(Uniform(0, 1) == 0 ? 0 : std::max(0, tokens - kPage), tokens));
    const absl::Status gpu = live.gpu->Crop(to);
    if (IsFull(gpu)) {
      ++counts_["full"];
      return;
    }
    const absl::Status cpu = live.cpu->Crop(to);
    ASSERT_EQ(gpu.code(), cpu.code()) << gpu << " but " << cpu << " of " << tokens << " to " << to;
    ASSERT_OK(gpu_->After(*live.gpu));
    ++counts_[gpu.ok() ? "crops" : "refused_crops"];
    if (gpu.ok()) live.shifts.resize(to);
  }

  void Publish() {
    Live& live = live_[size_t(Uniform(0, int(live_.size()) - 1))];
    const int full = int(live.tokens() / kPage);
    if (full == 0) return;
    std::vector<BlockName> names = NamesOf(live.shifts);
    names.resize(size_t(Uniform(1, full)));
    // The counterpart first: what the GPU's names, both have.
    const auto cpu = live.cpu->Publish(names);
    const auto gpu = live.gpu->Publish(names);
    ASSERT_EQ(gpu.status().code(), cpu.status().code()) << gpu.status() << " but " << cpu.status();
    ASSERT_OK(gpu);
    counts_["published"] += gpu->published;
    counts_["shared"] += gpu->shared;
    counts_["deferred"] += gpu->deferred;
  }

  /// Steps in the daemon and in this process by turns, on one sequence, all on their way at once.
  void BothWays() {
    if (way_ == Way::kDaemon) return;
    const size_t of = size_t(Uniform(0, int(live_.size()) - 1));
    if (live_[of].tokens() + kAtOnce > kTokensMax) return;
    auto& own = static_cast<OwnEngine&>(*gpu_);
    own.Restart();
    std::vector<client::TensorView> outs;
    std::vector<Part> done;
    const uint64_t shift = NextShift(live_[of]);
    absl::Status status;
    bool uneven = false;
    uint64_t first = live_[of].tokens();
    for (int turn = Uniform(0, 1), turns = turn + Uniform(2, 5); turn < turns; ++turn) {
      const Part part{live_[of].gpu->id(), first, Uniform(0, 1) == 0 ? 1 : Uniform(1, kAtOnce / 5), shift};
      const size_t outs_before = outs.size();
      status =
          turn % 2 == 0 ? own.Submit(text(), {part}, true, &outs) : own.SubmitInDaemon(text(), {part}, true, 0, &outs);
      if (!status.ok()) {
        uneven = own.failed_layer() > 0;
        outs.resize(outs_before);
        break;
      }
      done.push_back(part);
      first += uint64_t(part.tokens);
    }
    LayerRows got, expected;
    ASSERT_OK(own.Collect(outs, &got));
    if (!status.ok()) {
      ASSERT_TRUE(IsFull(status)) << status;
      ++counts_["full"];
    }
    if (uneven) return Drop(of);
    auto turn = got.begin();  // layers of a turn's rows, one turn behind the other
    for (Part part : done) {
      part.sequence = live_[of].cpu->id();
      ASSERT_OK(cpu_->Step(text(), {part}, true, &expected));
      live_[of].shifts.insert(live_[of].shifts.end(), size_t(part.tokens), part.shift);
      Compare({turn, turn + text().layers}, expected, {part}, "both_ways");
      turn += text().layers;
    }
  }

  void Refusals() {
    const size_t of = size_t(Uniform(0, int(live_.size()) - 1));
    Live& live = live_[of];
    const uint64_t tokens = live.tokens();
    LayerRows rows;
    const auto both = [&](const Part& part, bool append) {
      const absl::Status gpu = gpu_->Step(text(), On({of}, {part}, true), append, &rows);
      const absl::Status cpu = cpu_->Step(text(), On({of}, {part}, false), append, &rows);
      EXPECT_FALSE(gpu.ok());
      EXPECT_EQ(gpu.code(), cpu.code()) << gpu << " but " << cpu;
    };
    both({0, tokens + 1, 1, 0}, true);
    if (tokens > 0) both({0, tokens - 1, 1, 0}, true);
    both({0, tokens, 1, 0}, false);
    EXPECT_EQ(live.gpu->Crop(tokens + 1).code(), live.cpu->Crop(tokens + 1).code());
    if (tokens > 0) Ask({of}, {{0, tokens - 1, 1, 0}}, "queries_when_refused");
  }

  void Flood() {
    DropFlood();
    flood_stays_ = Uniform(1, kFloodStays);
    LayerRows out;
    absl::Status status;
    for (int batch = Uniform(0, kFloodBatches - 1); batch < kFloodBatches && status.ok(); ++batch) {
      std::vector<Part> parts;
      for (int i = 0; i < kFloodBatch; ++i) {
        ASSERT_OK_AND_ASSIGN(auto made, gpu_->cache().CreateSequence());
        parts.push_back({made.sequence->id(), 0, 1, 0});
        flood_.push_back(std::move(made.sequence));
      }
      status = gpu_->Step(text(), parts, true, &out);
    }
    if (!status.ok()) {
      ASSERT_TRUE(IsFull(status)) << status;
      ++counts_["full"];
    }
    ++counts_["floods"];
  }

  void Inspect() {
    for (const Live& live : live_) {
      ASSERT_OK_AND_ASSIGN(const auto gpu, live.gpu->Info());
      ASSERT_OK_AND_ASSIGN(const auto cpu, live.cpu->Info());
      EXPECT_EQ(gpu.tokens, live.tokens());
      EXPECT_EQ(cpu.tokens, live.tokens());
    }
  }

  Shared& shared_;
  const Way way_;
  const uint64_t seed_;
  std::mt19937_64 random_;
  int steps_ = 0, flood_stays_ = 0;
  StepDifference all_;
  std::map<std::string, int64_t> counts_;
  std::unique_ptr<Client> gpu_client_, cpu_client_;
  std::unique_ptr<DeviceClient> device_;
  std::unique_ptr<Engine> gpu_, cpu_;
  Live anchors_;
  std::vector<Live> live_;
  std::vector<std::unique_ptr<client::Sequence>> flood_;
};

class DeviceRandomTest : public GpuTest, public ::testing::WithParamInterface<Case> {};

/// Everything is given back: no lease, sequence or byte is left but slabs that this process may still map.
void ExpectNothingLeft(const DaemonProcess& daemon) {
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon.listen(), {}));
  EXPECT_TRUE(Eventually([&] {
    const auto status = client->Status();
    return status.ok() && status->leases == 0 && status->connections == 1;
  }));
  ASSERT_OK(client->Purge(Client::kAllCaches));
  client::DaemonDescription last;
  EXPECT_TRUE(Eventually([&] {
    const auto status = client->Status();
    if (status.ok()) last = *status;
    if (!status.ok() || last.published_blocks != 0 || last.pools.at(0).used_bytes != 0) return false;
    return last.pools.at(1).used_bytes % last.pools.at(1).slab_bytes == 0;
  })) << "blocks "
      << last.published_blocks << ", pages of the host " << last.pools.at(0).used_bytes << ", of the GPU "
      << last.pools.at(1).used_bytes;
  ASSERT_OK_AND_ASSIGN(const auto page, Scrape(daemon));
  for (const char* const gauge : {"kvmanager_page_bytes", "kvmanager_pages", "kvmanager_sequences", "kvmanager_leases",
                                  "kvmanager_published_blocks"}) {
    EXPECT_EQ(page.Sum(gauge), 0) << gauge;
  }
}

TEST_P(DeviceRandomTest, EnginesAtOnce) {
  static const Text text = RandomText(11, {.layers = 4, .kv_heads = 8, .query_heads = 32});
  DaemonOptions options;
  options.host_pool_bytes = uint64_t{3} << 30;  // the counterparts' blocks stay
  const TempDir artifacts;
  if (absl::StrContains(GetParam().codec, "calibration=")) {
    WriteArtifact(text, {kMillion}, artifacts.path(), kArtifact);
  }
  options.more_flags = {"--device-pool-bytes", GetParam().pool, "--calibration-dir", artifacts.path()};
  ASSERT_OK_AND_ASSIGN(auto daemon, DaemonProcess::Start(options));
  Shared shared{daemon.get(), &text, &GetParam(), artifacts.path()};
  std::vector<std::unique_ptr<Actor>> actors;
  const int64_t from = NowMs();
  {
    std::vector<std::thread> threads;
    for (const Way way : {Way::kDaemon, Way::kOwn, Way::kOwnButEncoding}) {
      actors.push_back(std::make_unique<Actor>(&shared, way, 10 * uint64_t(GetParam().lag_pages) + uint64_t(way)));
      threads.emplace_back([actor = actors.back().get()] { actor->Run(); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  StepDifference all;
  int64_t hits = 0, full = 0;
  for (const auto& actor : actors) {
    std::printf("%s:%s; relative L2 %.1e, of long entries %.1e\n", GetParam().name, actor->Describe().c_str(),
                actor->difference().same.relative(), actor->difference().decoded.relative());
    all.Add(actor->difference());
    hits += actor->count("hits"), full += actor->count("full");
  }
  std::printf("%s: %lld ms\n", GetParam().name, static_cast<long long>(NowMs() - from));
  EXPECT_LT(all.same.relative(), GetParam().run_error());
  EXPECT_LT(all.decoded.relative(), StepDifference::kDecodedRunError);
  if (!HasFailure()) {
    EXPECT_GT(hits, 0);
    EXPECT_GT(full, 0);
  }
  actors.clear();
  ExpectNothingLeft(*daemon);
}

INSTANTIATE_TEST_SUITE_P(Codecs, DeviceRandomTest,
                         ::testing::Values(Case{"raw", "raw", 1, "256MiB"},
                                           Case{"pq", "pq:m=4,bits=4,ratio=0.2,sinks=8,iterations=2", 1, "768MiB"},
                                           Case{"k2v2_lag0", "hack:k_bits=2,v_bits=2", 0, "512MiB"},
                                           Case{"k2v2_lag1", "hack:k_bits=2,v_bits=2", 1, "512MiB"},
                                           Case{"k2v2_lag2", "hack:k_bits=2,v_bits=2", 2, "512MiB"},
                                           Case{"zack", kZack, 1, "512MiB"}, Case{"million", kMillion, 1, "512MiB"},
                                           Case{"policy", "hack:k_bits=2,v_bits=2;0=hack:k_bits=4,v_bits=3;sinks=64", 1,
                                                "512MiB"}),
                         [](const auto& info) { return std::string(info.param.name); });

class DeviceClosedCachesTest : public GpuTest {};

/// A purge closes a cache that nothing holds: a connection may open it again as often as it likes.
TEST_F(DeviceClosedCachesTest, ACacheIsOpenedAgainAfterPurges) {
  DaemonOptions options;
  options.more_flags = {"--device-pool-bytes", "256MiB"};
  ASSERT_OK_AND_ASSIGN(auto daemon, DaemonProcess::Start(options));
  {
    ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->listen(), {}));
    ASSERT_OK_AND_ASSIGN(auto device, DeviceClient::Open(client.get(), 0));
    const Text text = RandomText(12, {.tokens = 64});
    for (int i = 0; i < 7; ++i) {
      ASSERT_OK_AND_ASSIGN(auto engine,
                           MakeEngine(Way::kDaemon, client.get(), device.get(), OptionsFor(text, "raw", 0)));
      ASSERT_OK_AND_ASSIGN(auto made, engine->cache().CreateSequence());
      LayerRows out;
      ASSERT_OK(engine->Step(text, {{made.sequence->id(), 0, 3}}, true, &out)) << i;
      made.sequence.reset();
      ASSERT_OK(client->Purge(Client::kAllCaches));
    }
  }
  ExpectNothingLeft(*daemon);
}

}  // namespace
}  // namespace kvmanager::testing
