// Hand-offs straight from one GPU's pool into another's, between two daemons, of whole prompts and of such that grow:
// what the receiving GPU attends to is what the sender's does, bit for bit; and what becomes of pages when a daemon
// dies or is full. Of two GPUs where there are two; else both daemons have the one.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
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

constexpr uint64_t kPrompt = 700;  // tokens
constexpr uint64_t kHostBytes = 256 << 20;

// A daemon on one GPU, and a client of it.
struct Side {
  int gpu = 0;
  std::unique_ptr<DaemonProcess> daemon;
  std::unique_ptr<Client> client;
  std::unique_ptr<DeviceClient> device;

  absl::Status Start(int ordinal, const std::string& pool_bytes, const std::string& artifacts) {
    gpu = ordinal;
    DaemonOptions options;
    options.host_pool_bytes = kHostBytes;
    options.more_flags = {"--devices",         absl::StrCat(gpu), "--device-pool-bytes", pool_bytes,
                          "--calibration-dir", artifacts,         "--hand-off-lease-ms", "5000"};
    KV_ASSIGN_OR_RETURN(daemon, DaemonProcess::Start(options));
    KV_ASSIGN_OR_RETURN(client, Client::Connect(daemon->listen(), {}));
    KV_ASSIGN_OR_RETURN(device, DeviceClient::Open(client.get(), gpu));
    return absl::OkStatus();
  }
  double Metric(const std::string& name) const {
    const auto page = Scrape(*daemon);
    return page.ok() ? page->Sum(absl::StrCat("kvmanager_", name)) : -1;
  }
  double received() const {
    const auto page = Scrape(*daemon);
    return page.ok() ? page->Sum("kvmanager_transport_pages_total", {"direction=\"received\""}) : -1;
  }
  double pages() const {
    const auto page = Scrape(*daemon);
    return page.ok() ? page->Sum("kvmanager_pages", {absl::StrCat("tier=\"gpu", gpu, "\"")}) : -1;
  }
  void Use() const { EXPECT_OK(device->device().Use()); }
};

class DeviceHandOffTest : public GpuTest {
 protected:
  void Start(const std::string& receiver_bytes = "2GiB", const std::string& sender_bytes = "2GiB") {
    int gpus = 0;
    ASSERT_CUDA(cudaGetDeviceCount(&gpus));
    other_gpu_ = gpus > 1 ? 1 : 0;
    std::printf("%d GPUs: pages go from GPU 0 to GPU %d\n", gpus, other_gpu_);
    ASSERT_OK(a_.Start(0, sender_bytes, artifacts_.path()));
    ASSERT_OK(b_.Start(other_gpu_, receiver_bytes, artifacts_.path()));
    // What goes by way of the host needs that.
    for (const Side* side : {&a_, &b_}) {
      ASSERT_TRUE(Eventually([&] { return side->Metric("pool_pinned_bytes") >= double(kHostBytes); }));
    }
  }
  void TearDown() override {
    for (Side* side : {&b_, &a_}) {
      if (side->device != nullptr) side->Use();
      side->device.reset();
      side->client.reset();
      side->daemon.reset();
    }
  }
  absl::StatusOr<std::unique_ptr<Engine>> Make(Side& side, Way way, const Text& text, const std::string& codec,
                                               const std::string& tenant, int lag_pages = 1) {
    side.Use();
    client::CacheOptions options = OptionsFor(text, codec, side.gpu, tenant);
    options.lag_pages = lag_pages;
    return MakeEngine(way, side.client.get(), side.device.get(), options, artifacts_.path());
  }
  // Appends to a sequence that is handed over meanwhile, in chunks. Before the last one the pages of the others arrive.
  // before: pages that the receiver had received when it began. sent: the answers of the last chunk.
  void Grow(Engine& from, const Text& text, uint64_t sequence, uint64_t first, double before, LayerRows* sent) {
    uint64_t at = first;
    for (const uint64_t end : {uint64_t{250}, uint64_t{251}, uint64_t{500}, kPrompt}) {
      if (end <= at) continue;
      if (end == kPrompt) {
        const double full = double(text.layers) * double(at / kPage);
        EXPECT_TRUE(Eventually([&] { return b_.received() - before >= full; }))
            << b_.received() - before << " of " << full << " pages";
      }
      a_.Use();
      ASSERT_OK(from.Step(text, {{sequence, at, int(end - at)}}, true, sent));
      at = end;
    }
  }
  // Once nothing holds them: no page is lost, and no lease.
  void ExpectEmpty(Side& side) {
    EXPECT_TRUE(Eventually(
        [&] {
          EXPECT_OK(side.client->Purge(Client::kAllCaches).status());
          return side.pages() == 0 && side.Metric("leases") == 0;
        },
        30000))
        << "GPU " << side.gpu << " keeps " << side.pages() << " pages, under " << side.Metric("leases") << " leases";
  }

  TempDir artifacts_;
  Side a_, b_;
  int other_gpu_ = 0;
};

TEST_F(DeviceHandOffTest, AttendsToTheSameOnTheOtherGpu) {
  ASSERT_NO_FATAL_FAILURE(Start("6GiB", "6GiB"));  // slabs of eight tenants, for each size of their slots
  Text shape;
  shape.kv_heads = 8, shape.query_heads = 32;
  const Text text = RandomText(11, shape);
  const std::string zack_hack = "zack+hack:mode=balanced,bytes=56,calibration=made";
  WriteArtifact(text, {}, artifacts_.path(), "made");
  int hand_offs = 0;
  for (const std::string& codec : {std::string("raw"), std::string("hack:k_bits=3,v_bits=2"), zack_hack,
                                   std::string("hack:k_bits=2,v_bits=2;1=raw;sinks=64")}) {
    for (const Way way : {Way::kDaemon, Way::kOwn}) {
      SCOPED_TRACE(absl::StrCat(codec, " ", int(way)));
      const std::string tenant = absl::StrCat("tenant", hand_offs);
      ASSERT_OK_AND_ASSIGN(auto from, Make(a_, way, text, codec, tenant));
      ASSERT_OK_AND_ASSIGN(auto to, Make(b_, way, text, codec, tenant));
      a_.Use();
      ASSERT_OK_AND_ASSIGN(auto made, from->cache().CreateSequence());
      LayerRows sent, received;
      ASSERT_OK(from->Step(text, {{made.sequence->id(), 0, int(kPrompt)}}, true, &sent));
      ASSERT_OK(made.sequence->Publish(NamesOf(from->cache(), 640, 3)).status());
      ASSERT_OK_AND_ASSIGN(const auto outcome, made.sequence->HandOff(b_.daemon->peer(), "first token: 17"));
      b_.Use();
      ASSERT_OK_AND_ASSIGN(auto claimed, to->cache().Claim(outcome.ticket));
      EXPECT_EQ(b_.Metric("hand_offs_between_gpus_total"), ++hand_offs);
      EXPECT_EQ(claimed.tokens, kPrompt);
      EXPECT_EQ(claimed.blob, "first token: 17");
      // Queries alone, of the whole lag window; then both go on.
      for (const auto& [first, tokens, append] : {std::tuple<uint64_t, int, bool>{kPrompt - 1, 1, false},
                                                  {kPrompt, 1, true},
                                                  {kPrompt + 1, 90, true},
                                                  {kPrompt + 91, 1, true},
                                                  {kPrompt + 92, 3, true}}) {
        a_.Use();
        ASSERT_OK(from->Step(text, {{made.sequence->id(), first, tokens}}, append, &sent));
        b_.Use();
        ASSERT_OK(to->Step(text, {{claimed.sequence->id(), first, tokens}}, append, &received));
        EXPECT_EQ(sent, received) << first;
      }
      // What was published came along.
      ASSERT_OK_AND_ASSIGN(auto hit, to->cache().CreateSequence(NamesOf(to->cache(), 640, 3)));
      EXPECT_EQ(hit.match.hit_blocks, 10);
      // And back: blocks that are there are not sent.
      ASSERT_OK_AND_ASSIGN(const auto back, claimed.sequence->HandOff(a_.daemon->peer(), ""));
      EXPECT_GT(back.pages_skipped, 0u);
      a_.Use();
      ASSERT_OK_AND_ASSIGN(auto returned, from->cache().Claim(back.ticket));
      ASSERT_OK(from->Step(text, {{made.sequence->id(), kPrompt + 95, 1}}, true, &sent));
      ASSERT_OK(from->Step(text, {{returned.sequence->id(), kPrompt + 95, 1}}, true, &received));
      EXPECT_EQ(sent, received);
      from->Forget(*made.sequence);
      from->Forget(*returned.sequence);
      made = {}, returned = {};
      from.reset();
      b_.Use();
      to->Forget(*claimed.sequence);
      claimed = {}, hit = {};
      to.reset();
    }
  }
  ExpectEmpty(a_);
  ExpectEmpty(b_);
}

TEST_F(DeviceHandOffTest, AHostCacheClaimsWhatCameToAGpu) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const Text text = RandomText(12);
  const std::string codec = "hack:k_bits=3,v_bits=2";
  ASSERT_OK_AND_ASSIGN(auto from, Make(a_, Way::kDaemon, text, codec, "a"));
  ASSERT_OK_AND_ASSIGN(auto host, HostEngine::Make(b_.client.get(), OptionsFor(text, codec, -1, "a")));
  ASSERT_OK_AND_ASSIGN(auto made, from->cache().CreateSequence());
  LayerRows sent, received;
  ASSERT_OK(from->Step(text, {{made.sequence->id(), 0, int(kPrompt)}}, true, &sent));
  ASSERT_OK_AND_ASSIGN(const auto outcome, made.sequence->HandOff(b_.daemon->peer(), ""));
  ASSERT_OK_AND_ASSIGN(auto claimed, host->cache().Claim(outcome.ticket));
  EXPECT_EQ(b_.Metric("hand_offs_between_gpus_total"), 1);
  ASSERT_OK(from->Step(text, {{made.sequence->id(), kPrompt, 9}}, true, &sent));
  ASSERT_OK(host->Step(text, {{claimed.sequence->id(), kPrompt, 9}}, true, &received));
  Difference difference;
  for (int layer = 0; layer < text.layers; ++layer) difference.Add(sent[layer], received[layer]);
  EXPECT_LT(difference.relative(), 2e-3);
  claimed = {};
  ExpectEmpty(b_);
}

TEST_F(DeviceHandOffTest, AFullGpuIsPassedByWayOfTheHost) {
  ASSERT_NO_FATAL_FAILURE(Start("256MiB"));  // one slab: raw pages and encoded ones need two
  const Text text = RandomText(13);
  const std::string codec = "hack:k_bits=3,v_bits=2";
  ASSERT_OK_AND_ASSIGN(auto from, Make(a_, Way::kDaemon, text, codec, "a"));
  ASSERT_OK_AND_ASSIGN(auto host, HostEngine::Make(b_.client.get(), OptionsFor(text, codec, -1, "a")));
  ASSERT_OK_AND_ASSIGN(auto made, from->cache().CreateSequence());
  LayerRows sent, received;
  ASSERT_OK(from->Step(text, {{made.sequence->id(), 0, int(kPrompt)}}, true, &sent));
  ASSERT_OK_AND_ASSIGN(const auto outcome, made.sequence->HandOff(b_.daemon->peer(), ""));
  EXPECT_EQ(b_.Metric("hand_offs_between_gpus_total"), 0);
  ASSERT_OK_AND_ASSIGN(auto claimed, host->cache().Claim(outcome.ticket));
  ASSERT_OK(from->Step(text, {{made.sequence->id(), kPrompt, 9}}, true, &sent));
  ASSERT_OK(host->Step(text, {{claimed.sequence->id(), kPrompt, 9}}, true, &received));
  Difference difference;
  for (int layer = 0; layer < text.layers; ++layer) difference.Add(sent[layer], received[layer]);
  EXPECT_LT(difference.relative(), 2e-3);
  EXPECT_EQ(b_.pages(), 0);
}

TEST_F(DeviceHandOffTest, ASenderThatDiesLeavesNothing) {
  ASSERT_NO_FATAL_FAILURE(Start());
  Text shape;
  shape.layers = 8, shape.kv_heads = 8, shape.query_heads = 32, shape.tokens = 2048;
  const Text text = RandomText(14, shape);
  const std::string listen = a_.daemon->listen(), peer = b_.daemon->peer();
  ASSERT_OK_AND_ASSIGN(auto from, Make(a_, Way::kDaemon, text, "raw", "a"));
  ASSERT_OK_AND_ASSIGN(auto made, from->cache().CreateSequence());
  LayerRows out;
  for (uint64_t i = 0; i < 2000; i += 250) ASSERT_OK(from->Step(text, {{made.sequence->id(), i, 250}}, true, &out));
  // Killed while hand-offs follow one another, wherever they are. They are of the thread that made the client.
  std::thread kills([&] {
    EXPECT_TRUE(Eventually([&] { return b_.Metric("hand_offs_between_gpus_total") >= 1; }));
    a_.daemon->Kill();
  });
  absl::Status ended;
  while (ended.ok()) ended = made.sequence->HandOff(peer, "").status();
  kills.join();
  EXPECT_EQ(ended.code(), absl::StatusCode::kUnavailable) << ended;
  // What arrived whole expires; the rest is gone, and the GPU takes others.
  ExpectEmpty(b_);
  ASSERT_OK_AND_ASSIGN(auto to, Make(b_, Way::kDaemon, text, "raw", "b"));
  ASSERT_OK_AND_ASSIGN(auto next, to->cache().CreateSequence());
  for (uint64_t i = 0; i < 2000; i += 250) ASSERT_OK(to->Step(text, {{next.sequence->id(), i, 250}}, true, &out));
  to->Forget(*next.sequence);
  next = {};
  to.reset();
  a_.Use();
  from.reset();
}

TEST_F(DeviceHandOffTest, AttendsToTheSameOfASequenceThatGrewOnItsWay) {
  ASSERT_NO_FATAL_FAILURE(Start("6GiB", "6GiB"));
  Text shape;
  shape.layers = 4, shape.kv_heads = 8, shape.query_heads = 32;
  const Text text = RandomText(21, shape);
  int hand_offs = 0;
  struct Case {
    std::string codec;
    int lag;
    Way way;
  };
  const std::string k3v2 = "hack:k_bits=3,v_bits=2";
  for (const Case& c :
       {Case{"raw", 0, Way::kDaemon}, Case{k3v2, 0, Way::kDaemon}, Case{"raw", 0, Way::kOwn}, Case{k3v2, 0, Way::kOwn},
        Case{k3v2, 1, Way::kOwnButEncoding}, Case{"hack:k_bits=2,v_bits=2;1=raw;sinks=64", 1, Way::kDaemon}}) {
    SCOPED_TRACE(absl::StrCat(c.codec, " ", c.lag, " ", int(c.way)));
    const std::string tenant = absl::StrCat("tenant", hand_offs);
    ASSERT_OK_AND_ASSIGN(auto from, Make(a_, c.way, text, c.codec, tenant, c.lag));
    ASSERT_OK_AND_ASSIGN(auto to, Make(b_, c.way, text, c.codec, tenant, c.lag));
    a_.Use();
    ASSERT_OK_AND_ASSIGN(auto made, from->cache().CreateSequence());
    const uint64_t id = made.sequence->id();
    LayerRows sent, received;
    // Begun while the first tokens are on their way through the stream.
    auto& gpu = static_cast<GpuEngine&>(*from);
    std::vector<client::TensorView> outs;
    gpu.Restart();
    if (c.way == Way::kDaemon) {
      ASSERT_OK(gpu.SubmitInDaemon(text, {{id, 0, 70}}, true, 0, &outs));
    } else {
      ASSERT_OK(static_cast<OwnEngine&>(gpu).Submit(text, {{id, 0, 70}}, true, &outs));
    }
    const double before = b_.received();
    ASSERT_OK_AND_ASSIGN(auto hand_off, made.sequence->BeginHandOff(b_.daemon->peer(), kPrompt));
    auto claim = to->cache().ClaimAsync(hand_off->ticket(), 20000);
    ASSERT_OK(gpu.Collect(outs, &sent));
    // Sinks and raw layers go as early as encoded pages.
    EXPECT_TRUE(Eventually([&] { return b_.received() - before >= text.layers; }));
    ASSERT_NO_FATAL_FAILURE(Grow(*from, text, id, 70, before, &sent));
    EXPECT_EQ(made.sequence->Crop(kPrompt - 1).code(), absl::StatusCode::kFailedPrecondition);
    ASSERT_OK_AND_ASSIGN(const auto outcome, hand_off->Finish("first token: 17"));
    EXPECT_EQ(outcome.ticket, hand_off->ticket());
    ASSERT_OK_AND_ASSIGN(auto claimed, claim.Wait());
    EXPECT_EQ(b_.Metric("hand_offs_between_gpus_total"), ++hand_offs);
    EXPECT_EQ(claimed.tokens, kPrompt);
    EXPECT_EQ(claimed.blob, "first token: 17");
    for (const auto& [first, tokens, append] : {std::tuple<uint64_t, int, bool>{kPrompt - 1, 1, false},
                                                {kPrompt, 1, true},
                                                {kPrompt + 1, 90, true},
                                                {kPrompt + 91, 3, true}}) {
      b_.Use();
      ASSERT_OK(to->Step(text, {{claimed.sequence->id(), first, tokens}}, append, &received));
      a_.Use();
      ASSERT_OK(from->Step(text, {{id, first, tokens}}, append, &sent));
      EXPECT_EQ(sent, received) << first;
    }
    hand_off.reset();
    from->Forget(*made.sequence);
    made = {};
    from.reset();
    b_.Use();
    to->Forget(*claimed.sequence);
    claimed = {};
    to.reset();
    // Closes the caches, too: a connection has few on a GPU.
    ExpectEmpty(a_);
    ExpectEmpty(b_);
  }
}

TEST_F(DeviceHandOffTest, WhatGrowsGoesByTheHostWhereTheOtherGpuIsFull) {
  ASSERT_NO_FATAL_FAILURE(Start("256MiB"));
  const Text text = RandomText(22);
  const std::string codec = "hack:k_bits=3,v_bits=2";
  for (const Way way : {Way::kDaemon, Way::kOwn}) {
    const std::string tenant = absl::StrCat("tenant", int(way));
    ASSERT_OK_AND_ASSIGN(auto from, Make(a_, way, text, codec, tenant, 0));
    client::CacheOptions options = OptionsFor(text, codec, -1, tenant);
    options.lag_pages = 0;
    ASSERT_OK_AND_ASSIGN(auto host, HostEngine::Make(b_.client.get(), options));
    ASSERT_OK_AND_ASSIGN(auto made, from->cache().CreateSequence());
    LayerRows sent, received;
    const double before = b_.received();
    ASSERT_OK_AND_ASSIGN(auto hand_off, made.sequence->BeginHandOff(b_.daemon->peer(), kPrompt));
    auto claim = host->cache().ClaimAsync(hand_off->ticket(), 20000);
    ASSERT_NO_FATAL_FAILURE(Grow(*from, text, made.sequence->id(), 0, before, &sent));
    ASSERT_OK(hand_off->Finish("").status());
    ASSERT_OK_AND_ASSIGN(auto claimed, claim.Wait());
    EXPECT_EQ(b_.Metric("hand_offs_between_gpus_total"), 0);
    ASSERT_OK(from->Step(text, {{made.sequence->id(), kPrompt, 9}}, true, &sent));
    ASSERT_OK(host->Step(text, {{claimed.sequence->id(), kPrompt, 9}}, true, &received));
    Difference difference;
    for (int layer = 0; layer < text.layers; ++layer) difference.Add(sent[layer], received[layer]);
    EXPECT_LT(difference.relative(), 2e-3);
    hand_off.reset();
    from->Forget(*made.sequence);
    made = {};
    from.reset();
  }
  EXPECT_EQ(b_.pages(), 0);
  ExpectEmpty(a_);
  EXPECT_EQ(a_.Metric("pages"), 0);  // nor on the host
}

TEST_F(DeviceHandOffTest, WhatIsNotFiniteOrGivenUpIsNotHandedOver) {
  ASSERT_NO_FATAL_FAILURE(Start());
  Text text = RandomText(23);
  text.k[1][300 * text.kv_row() + 7] = 0x7e00;  // NaN
  int claims = 0;
  for (const bool finishes : {true, false}) {
    for (const Way way : {Way::kDaemon, Way::kOwn}) {
      const std::string tenant = absl::StrCat("tenant", ++claims);
      ASSERT_OK_AND_ASSIGN(auto from, Make(a_, way, text, "raw", tenant, 0));
      ASSERT_OK_AND_ASSIGN(auto to, Make(b_, Way::kDaemon, text, "raw", tenant, 0));
      ASSERT_OK_AND_ASSIGN(auto made, from->cache().CreateSequence());
      LayerRows rows;
      ASSERT_OK_AND_ASSIGN(auto hand_off, made.sequence->BeginHandOff(b_.daemon->peer(), 320));
      auto claim = to->cache().ClaimAsync(hand_off->ticket(), 20000);
      a_.Use();
      // Found while it steps, or behind that.
      const absl::Status stepped = from->Step(text, {{made.sequence->id(), 0, 320}}, true, &rows);
      EXPECT_TRUE(stepped.ok() || stepped.code() == absl::StatusCode::kInvalidArgument) << stepped;
      if (finishes) {
        EXPECT_EQ(hand_off->Finish("").status().code(), absl::StatusCode::kInvalidArgument);
      }
      hand_off.reset();
      from->Forget(*made.sequence);
      made = {};
      EXPECT_EQ(claim.Wait().status().code(), absl::StatusCode::kUnavailable);
    }
  }
  ExpectEmpty(a_);
  ExpectEmpty(b_);
}

TEST_F(DeviceHandOffTest, ASenderThatDiesWhileItComputesLeavesNothing) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const Text text = RandomText(24);
  ASSERT_OK_AND_ASSIGN(auto from, Make(a_, Way::kDaemon, text, "hack:k_bits=3,v_bits=2", "a", 0));
  ASSERT_OK_AND_ASSIGN(auto to, Make(b_, Way::kDaemon, text, "hack:k_bits=3,v_bits=2", "a", 0));
  ASSERT_OK_AND_ASSIGN(auto made, from->cache().CreateSequence());
  ASSERT_OK_AND_ASSIGN(auto hand_off, made.sequence->BeginHandOff(b_.daemon->peer(), kPrompt));
  auto claim = to->cache().ClaimAsync(hand_off->ticket(), 20000);
  LayerRows rows;
  a_.Use();
  ASSERT_OK(from->Step(text, {{made.sequence->id(), 0, 300}}, true, &rows));
  EXPECT_TRUE(Eventually([&] { return b_.received() >= 4 * text.layers; }));
  EXPECT_GT(b_.pages(), 0);
  a_.daemon->Kill();
  EXPECT_EQ(hand_off->Finish("").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(claim.Wait().status().code(), absl::StatusCode::kUnavailable);
  to.reset();
  ExpectEmpty(b_);
}

// 2,000 tokens in eight layers, of which hand-offs take a while; `length` tokens of it are there.
class StoppedPeerTest : public DeviceHandOffTest {
 protected:
  static constexpr uint64_t kLength = 2000;  // tokens
  static Text TextOf(uint64_t seed) {
    Text shape;
    shape.layers = 8, shape.kv_heads = 8, shape.query_heads = 32, shape.tokens = 2048;
    return RandomText(seed, shape);
  }
  void Begin() {
    ASSERT_NO_FATAL_FAILURE(Start());
    ASSERT_OK_AND_ASSIGN(from_, Make(a_, Way::kDaemon, text_, "raw", "a"));
    ASSERT_NO_FATAL_FAILURE(Fill(text_));
  }
  void TearDown() override {
    if (a_.device != nullptr) a_.Use();  // else there is no GPU
    made_ = {};
    from_.reset();
    DeviceHandOffTest::TearDown();
  }
  void Fill(const Text& text) {
    a_.Use();
    ASSERT_OK_AND_ASSIGN(made_, from_->cache().CreateSequence());
    for (uint64_t i = 0; i < kLength; i += 250) {
      ASSERT_OK(from_->Step(text, {{made_.sequence->id(), i, 250}}, true, &sent_));
    }
  }
  // Stops a side while hand-offs follow one another, wherever they are; `then` is called while it stands.
  std::thread Stop(Side& side, absl::AnyInvocable<void()> then) {
    return std::thread([this, &side, then = std::move(then)]() mutable {
      EXPECT_TRUE(Eventually([&] { return b_.Metric("hand_offs_between_gpus_total") >= 1; }));
      side.daemon->process().Signal(SIGSTOP);
      then();
    });
  }
  absl::Status HandOff() { return made_.sequence->HandOff(b_.daemon->peer(), "").status(); }
  // The sequence goes, and is attended to there as here.
  void ExpectGoes(const Text& text) {
    ASSERT_OK_AND_ASSIGN(const auto outcome, made_.sequence->HandOff(b_.daemon->peer(), ""));
    ASSERT_OK_AND_ASSIGN(auto to, Make(b_, Way::kDaemon, text, "raw", "a"));
    ASSERT_OK_AND_ASSIGN(auto claimed, to->cache().Claim(outcome.ticket));
    LayerRows received;
    ASSERT_OK(to->Step(text, {{claimed.sequence->id(), kLength, 3}}, true, &received));
    to->Forget(*claimed.sequence);
    claimed = {};
    to.reset();
    a_.Use();
    ASSERT_OK(from_->Step(text, {{made_.sequence->id(), kLength, 3}}, true, &sent_));
    EXPECT_EQ(sent_, received);
    from_->Forget(*made_.sequence);
    made_ = {};
  }

  const Text text_ = TextOf(15);
  std::unique_ptr<Engine> from_;
  client::CreatedSequence made_;
  LayerRows sent_;
};

TEST_F(StoppedPeerTest, AReceiverIsGivenUpAndLearnsIt) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  std::thread stops = Stop(b_, [] {});
  absl::Status ended;
  while (ended.ok()) ended = HandOff();
  stops.join();
  EXPECT_EQ(ended.code(), absl::StatusCode::kDeadlineExceeded) << ended;
  // What it had been told to copy may be other bytes by now.
  from_->Forget(*made_.sequence);
  made_ = {};
  const Text others = TextOf(16);
  ASSERT_NO_FATAL_FAILURE(Fill(others));
  b_.daemon->process().Signal(SIGCONT);
  ExpectEmpty(b_);
  ASSERT_NO_FATAL_FAILURE(ExpectGoes(others));
  ExpectEmpty(a_);
  ExpectEmpty(b_);
}

TEST_F(StoppedPeerTest, ASenderIsGivenUpAndLearnsIt) {
  ASSERT_NO_FATAL_FAILURE(Begin());
  std::atomic<bool> will_append{false};
  std::thread stops = Stop(a_, [&] {
    EXPECT_TRUE(Eventually([&] { return b_.Metric("transport_active_transfers") == 0; }, 30000));
    will_append = true;
    a_.daemon->process().Signal(SIGCONT);
  });
  absl::Status ended;
  while (ended.ok() && !will_append) ended = HandOff();
  stops.join();
  // It may have been stopped between two; else the receiver has forgotten the one that it stopped in.
  EXPECT_TRUE(ended.ok() || absl::IsUnavailable(ended) || absl::IsDeadlineExceeded(ended)) << ended;
  ASSERT_NO_FATAL_FAILURE(ExpectGoes(text_));
  ExpectEmpty(a_);
  ExpectEmpty(b_);
}

}  // namespace
}  // namespace kvmanager::testing
