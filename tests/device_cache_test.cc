// A daemon and engines with caches on its GPU: what they attend to equals what the CPU does with the same K, V and
// queries, in the daemon and in the engine's own process; and what becomes of pages when engines err or die.
//
// K, V and queries are a model's where KVMANAGER_TEST_CAPTURE names a capture (docs/calibration.md), else random. The
// engines that are killed are this program again, with a mode in the environment.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "client/device.h"
#include "codecs/calibrate/capture.h"
#include "kvmanager/base/half.h"
#include "kvmanager/memory/device_region.h"
#include "kvmanager/memory/device_testing.h"
#include "tests/device_cache_kernels.h"
#include "tests/device_engines.h"
#include "tests/device_fixture.h"
#include "tests/harness.h"
#include "tests/matchers.h"

namespace kvmanager::testing {
namespace {

using calibrate::Capture;
using client::Client;
using client::DeviceClient;
using client::StepEntry;

constexpr char kAddressVariable[] = "KVMANAGER_TEST_DAEMON";
constexpr char kCaptureVariable[] = "KVMANAGER_TEST_CAPTURE";
constexpr uint8_t kScribble = 0x3c;  // as an fp16 number: 1.06

absl::StatusOr<Text> ModelsText() {
  const char* const path = std::getenv(kCaptureVariable);
  if (path == nullptr) return RandomText(1);
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Capture> capture, Capture::Open(path));
  Text text;
  const CalibrationModel& model = capture->model();
  text.layers = model.layers, text.kv_heads = model.kv_heads, text.query_heads = model.query_heads;
  text.head_dim = model.head_dim;
  text.tokens = capture->tokens();
  const auto read = [&](int layer, Capture::Part part, int heads, std::vector<uint16_t>* out) {
    const size_t row = size_t(heads) * text.head_dim;
    std::vector<float> rows(text.tokens * row);
    for (int head = 0; head < heads; ++head) {
      capture->CopyRows(layer, part, head, 0, text.tokens, rows.data() + head * text.head_dim, row);
    }
    for (const float x : rows) out->push_back(FloatToHalf(x));
  };
  text.q.resize(text.layers), text.k.resize(text.layers), text.v.resize(text.layers);
  for (int layer = 0; layer < text.layers; ++layer) {
    read(layer, Capture::Part::kQ, text.query_heads, &text.q[layer]);
    read(layer, Capture::Part::kK, text.kv_heads, &text.k[layer]);
    read(layer, Capture::Part::kV, text.kv_heads, &text.v[layer]);
  }
  return text;
}

struct Case {
  const char* name;
  std::string codec;
  Way way;
  int look_up_layers = 0;  // the first so many look centroids up
};

class DeviceCacheTest : public DeviceDaemonTest {
 protected:
  absl::StatusOr<std::unique_ptr<Engine>> Make(Way way, const client::CacheOptions& options) {
    return MakeEngine(way, client_.get(), device_.get(), options, artifacts_.path());
  }
};

/// Layers with codecs of their own, a page of sinks; a layer whose pages are never encoded.
constexpr char kPolicy[] = "hack:k_bits=2,v_bits=2;0=hack:k_bits=4,v_bits=3;sinks=64";
constexpr char kRawLayer[] = "hack:k_bits=3,v_bits=2;1=raw";
// Codecs with artifacts.
constexpr char kArtifact[] = "made";
constexpr char kMillion[] = "million:m=64,bits=8,calibration=made";
constexpr char kMillionNarrow[] = "million:k_m=64,k_bits=6,v_m=32,v_bits=8,calibration=made";
constexpr char kZack[] = "zack:mode=balanced,rate=0.5,calibration=made";
constexpr char kZackHack[] = "zack+hack:mode=balanced,bytes=56,calibration=made";
constexpr char kZackMillion[] = "zack+million:mode=joint,m=64,bits=8,calibration=made";
constexpr char kZackMillionNarrow[] = "zack+million:mode=balanced,m=32,bits=8,calibration=made";
constexpr char kMixedPolicy[] =
    "zack+hack:mode=balanced,bytes=56,calibration=made;0=million:m=64,bits=8,calibration=made;sinks=64";
constexpr int kAllLayers = 1024;

/// Of layers in which a GPU rounds what a CPU does, and as a CPU does.
constexpr double kSame = 2e-3;
/// Where it looks centroids up, a CPU rounds P, and q more than a GPU does (codecs/million/million_attention.h).
double LookUps() { return std::getenv(kCaptureVariable) == nullptr ? 1e-2 : 5e-3; }

class DeviceCacheWaysTest : public DeviceCacheTest, public ::testing::WithParamInterface<Case> {};

TEST_P(DeviceCacheWaysTest, AttendsAsTheCpuDoes) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_OK_AND_ASSIGN(const Text text, ModelsText());
  if (absl::StrContains(GetParam().codec, "calibration=")) {
    WriteArtifact(text, {kMillion, kMillionNarrow, kZackMillion, kZackMillionNarrow}, artifacts_.path(), kArtifact);
  }
  Counterparts counterparts;
  ASSERT_OK_AND_ASSIGN(counterparts.gpu, Make(GetParam().way, OptionsFor(text, GetParam().codec, 0)));
  ASSERT_OK_AND_ASSIGN(counterparts.cpu, HostEngine::Make(client_.get(), OptionsFor(text, GetParam().codec, -1)));
  EXPECT_EQ(counterparts.gpu->cache().description().digest, counterparts.cpu->cache().description().digest);
  const auto create = [&](Engine& engine, absl::Span<const BlockName> prefix = {}) {
    auto made = engine.cache().CreateSequence(prefix);
    EXPECT_OK(made);
    return std::move(made->sequence);
  };
  auto gpu_a = create(*counterparts.gpu), cpu_a = create(*counterparts.cpu);
  auto gpu_b = create(*counterparts.gpu), cpu_b = create(*counterparts.cpu);
  const std::pair<client::Sequence*, client::Sequence*> a{gpu_a.get(), cpu_a.get()}, b{gpu_b.get(), cpu_b.get()};
  // Prompts in pieces that cross pages, then tokens one by one across two more boundaries.
  ASSERT_OK(counterparts.Step(text, {a, b}, {0, 0}, {200, 64}, true));
  ASSERT_OK(counterparts.Step(text, {a, b}, {200, 64}, {101, 3}, true));
  for (uint64_t i = 0; i < 150; ++i) ASSERT_OK(counterparts.Step(text, {a, b}, {301 + i, 67 + i}, {1, 1}, true));
  // Queries alone.
  ASSERT_OK(counterparts.Step(text, {a}, {440}, {11}, false));

  // A fork goes its own way, a crop goes back.
  ASSERT_OK_AND_ASSIGN(auto gpu_f, gpu_a->Fork());
  ASSERT_OK_AND_ASSIGN(auto cpu_f, cpu_a->Fork());
  ASSERT_OK(counterparts.gpu->After(*gpu_f));
  const std::pair<client::Sequence*, client::Sequence*> f{gpu_f.get(), cpu_f.get()};
  ASSERT_OK(counterparts.Step(text, {a, f}, {451, 451}, {1, 30}, true));
  ASSERT_OK(gpu_f->Crop(460));
  ASSERT_OK(cpu_f->Crop(460));
  ASSERT_OK(counterparts.gpu->After(*gpu_f));
  ASSERT_OK(counterparts.Step(text, {f, a}, {460, 452}, {40, 5}, true));

  // What is published is found, by another sequence, and read as it is.
  const auto gpu_names = NamesOf(counterparts.gpu->cache(), 448, 5),
             cpu_names = NamesOf(counterparts.cpu->cache(), 448, 5);
  ASSERT_EQ(gpu_names.size(), 7u);
  ASSERT_OK_AND_ASSIGN(const client::PublishOutcome published, gpu_a->Publish(gpu_names));
  EXPECT_EQ(published.published, 7);
  ASSERT_OK(cpu_a->Publish(cpu_names));
  auto gpu_h = create(*counterparts.gpu, gpu_names), cpu_h = create(*counterparts.cpu, cpu_names);
  const std::pair<client::Sequence*, client::Sequence*> h{gpu_h.get(), cpu_h.get()};
  ASSERT_OK(counterparts.Step(text, {h, a}, {448, 457}, {70, 1}, true));
  ASSERT_OK(counterparts.Step(text, {h}, {518}, {1}, true));

  const bool raw = GetParam().codec == "raw";
  const Difference &same = counterparts.difference.same, &decoded = counterparts.difference.decoded;
  for (int layer = 0; layer < text.layers; ++layer) {
    EXPECT_LT(counterparts.difference.same_of_layer.at(size_t(layer)).relative(),
              layer < GetParam().look_up_layers ? LookUps() : kSame)
        << "layer " << layer;
  }
  EXPECT_LT(decoded.relative(), raw ? 2e-3 : StepDifference::kDecodedRunError);
  std::printf("%s: relative L2 of GPU against CPU %.1e, of long entries %.1e\n", GetParam().name, same.relative(),
              decoded.relative());
  for (auto* sequence : {gpu_a.get(), gpu_b.get(), gpu_f.get(), gpu_h.get()}) counterparts.gpu->Forget(*sequence);
}

INSTANTIATE_TEST_SUITE_P(
    Ways, DeviceCacheWaysTest,
    ::testing::Values(Case{"raw_daemon", "raw", Way::kDaemon}, Case{"raw_own", "raw", Way::kOwn},
                      Case{"k2v2_daemon", "hack:k_bits=2,v_bits=2", Way::kDaemon},
                      Case{"k2v2_own", "hack:k_bits=2,v_bits=2", Way::kOwn},
                      Case{"k2v2_own_but_encoding", "hack:k_bits=2,v_bits=2", Way::kOwnButEncoding},
                      Case{"k3v2_daemon", "hack:k_bits=3,v_bits=2", Way::kDaemon},
                      Case{"k3v2_own", "hack:k_bits=3,v_bits=2", Way::kOwn},
                      Case{"policy_daemon", kPolicy, Way::kDaemon}, Case{"policy_own", kPolicy, Way::kOwn},
                      Case{"policy_own_but_encoding", kPolicy, Way::kOwnButEncoding},
                      Case{"raw_layer_own", kRawLayer, Way::kOwn},
                      Case{"million_daemon", kMillion, Way::kDaemon, kAllLayers},
                      Case{"million_own", kMillion, Way::kOwn, kAllLayers},
                      Case{"million_narrow_daemon", kMillionNarrow, Way::kDaemon, kAllLayers},
                      Case{"million_narrow_own_but_encoding", kMillionNarrow, Way::kOwnButEncoding, kAllLayers},
                      Case{"zack_daemon", kZack, Way::kDaemon}, Case{"zack_own", kZack, Way::kOwn},
                      Case{"zack_own_but_encoding", kZack, Way::kOwnButEncoding},
                      Case{"zack_hack_daemon", kZackHack, Way::kDaemon}, Case{"zack_hack_own", kZackHack, Way::kOwn},
                      Case{"zack_million_daemon", kZackMillion, Way::kDaemon, kAllLayers},
                      Case{"zack_million_own", kZackMillion, Way::kOwn, kAllLayers},
                      Case{"zack_million_narrow_own", kZackMillionNarrow, Way::kOwn, kAllLayers},
                      Case{"mixed_policy_daemon", kMixedPolicy, Way::kDaemon, 1},
                      Case{"mixed_policy_own", kMixedPolicy, Way::kOwn, 1}),
    [](const auto& info) { return std::string(info.param.name); });

TEST_F(DeviceCacheTest, BothWaysGiveTheSame) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const Text text = RandomText(2);
  const client::CacheOptions options = OptionsFor(text, "hack:k_bits=2,v_bits=2", 0);
  ASSERT_OK_AND_ASSIGN(auto daemon, Make(Way::kDaemon, options));
  ASSERT_OK_AND_ASSIGN(auto own, Make(Way::kOwn, options));
  ASSERT_OK_AND_ASSIGN(auto made_d, daemon->cache().CreateSequence());
  ASSERT_OK_AND_ASSIGN(auto made_o, own->cache().CreateSequence());
  std::vector<std::vector<uint16_t>> d, o;
  for (const auto& [first, tokens] : {std::pair<uint64_t, int>{0, 130}, {130, 70}, {200, 1}, {201, 16}}) {
    ASSERT_OK(daemon->Step(text, {{made_d.sequence->id(), first, tokens}}, true, &d));
    ASSERT_OK(own->Step(text, {{made_o.sequence->id(), first, tokens}}, true, &o));
    EXPECT_EQ(d, o) << first;
  }
}

TEST_F(DeviceCacheTest, WhatIsNotFiniteIsFoundAndNeverPublished) {
  ASSERT_NO_FATAL_FAILURE(Start());
  Text text = RandomText(3);
  text.v[1][70 * text.kv_row() + 1 * text.head_dim + 9] = FloatToHalf(INFINITY);  // position 70, head 1, channel 9
  for (const Way way : {Way::kDaemon, Way::kOwn}) {
    ASSERT_OK_AND_ASSIGN(auto engine, Make(way, OptionsFor(text, "hack:k_bits=2,v_bits=2", 0)));
    ASSERT_OK_AND_ASSIGN(auto bad, engine->cache().CreateSequence());
    ASSERT_OK_AND_ASSIGN(auto good, engine->cache().CreateSequence());
    std::vector<std::vector<uint16_t>> out;
    ASSERT_OK(engine->Step(text, {{good.sequence->id(), 0, 64}, {bad.sequence->id(), 0, 64}}, true, &out));
    ASSERT_OK(engine->Step(text, {{bad.sequence->id(), 64, 64}}, true, &out));
    const absl::Status published = bad.sequence->Publish(NamesOf(engine->cache(), 128, 9)).status();
    EXPECT_EQ(published.code(), absl::StatusCode::kInvalidArgument) << published;
    EXPECT_TRUE(absl::StrContains(published.message(), "v[position 70][layer 1][head 1][channel 9]")) << published;
    const absl::Status again = engine->Step(text, {{bad.sequence->id(), 128, 1}}, true, &out);
    EXPECT_EQ(again.code(), absl::StatusCode::kInvalidArgument) << again;
    ASSERT_OK(engine->Step(text, {{good.sequence->id(), 64, 1}}, true, &out));
    ASSERT_OK(good.sequence->Publish(NamesOf(engine->cache(), 64, 10 + uint32_t(way))).status());
    engine->Forget(*bad.sequence);
    engine->Forget(*good.sequence);
  }
}

TEST_F(DeviceCacheTest, AStepThatIsAskedForMayBeRefusedOrGivenUp) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const Text text = RandomText(5);
  ASSERT_OK_AND_ASSIGN(
      auto engine, OwnEngine::Make(client_.get(), device_.get(), OptionsFor(text, "hack:k_bits=2,v_bits=2", 0), true));
  client::InProcess& run = engine->run();
  ASSERT_OK_AND_ASSIGN(auto dropped, engine->cache().CreateSequence());
  ASSERT_OK_AND_ASSIGN(auto kept, engine->cache().CreateSequence());
  std::vector<std::vector<uint16_t>> out;
  ASSERT_OK(engine->Step(text, {{kept.sequence->id(), 0, 64}, {dropped.sequence->id(), 0, 64}}, true, &out));

  // Refused: the answer comes with Start, and nothing has begun.
  const StepEntry gap{kept.sequence->id(), 99, 1}, next{dropped.sequence->id(), 64, 64};
  ASSERT_OK(run.Ask({&gap, 1}, true, true));
  EXPECT_EQ(run.Start().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(run.Start().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(run.End().code(), absl::StatusCode::kFailedPrecondition);

  // Given up: what the daemon reserved is never published, and it does not wait for it.
  ASSERT_OK(run.Ask({&next, 1}, true, true));
  EXPECT_EQ(run.Ask({&next, 1}, true, true).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(run.Append(0, nullptr, nullptr).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_OK(run.End());
  const absl::Status published = dropped.sequence->Publish(NamesOf(engine->cache(), 128, 11)).status();
  EXPECT_EQ(published.code(), absl::StatusCode::kInvalidArgument) << published;

  ASSERT_OK(engine->Step(text, {{kept.sequence->id(), 64, 64}}, true, &out));
  ASSERT_OK(kept.sequence->Publish(NamesOf(engine->cache(), 128, 12)).status());
  engine->Forget(*dropped.sequence);
  const StepEntry last{kept.sequence->id(), 128, 1};
  ASSERT_OK(run.Ask({&last, 1}, true, true));  // and the run ends
}

TEST_F(DeviceCacheTest, WhatIsWrongIsRefused) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const Text text = RandomText(4);
  const auto code = [&](const client::CacheOptions& options) { return client_->OpenCache(options).status().code(); };
  EXPECT_EQ(code(OptionsFor(text, "raw", 1)), absl::StatusCode::kNotFound);
  EXPECT_EQ(code(OptionsFor(text, "raw", -2)), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(code(OptionsFor(text, "hack:k_axis=token", 0)), absl::StatusCode::kFailedPrecondition);
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(OptionsFor(text, "raw", 0)));
  ASSERT_OK_AND_ASSIGN(auto made, cache->CreateSequence());
  const StepEntry entry{made.sequence->id(), 0, 1};
  const std::vector<uint16_t> rows(text.q_row());
  client::StepBatch batch;
  batch.entries = {&entry, 1};
  batch.q_dtype = DType::kFloat16;
  batch.k = batch.v = client::TensorView::Inline(rows.data(), text.kv_row() * 2);
  EXPECT_EQ(cache->Step(batch).status().code(), absl::StatusCode::kInvalidArgument);  // no bytes by the socket
  ASSERT_OK_AND_ASSIGN(auto host, client_->CreateArena(1 << 20));
  batch.k = batch.v = host->View(0, text.kv_row() * 2);
  EXPECT_EQ(cache->Step(batch).status().code(), absl::StatusCode::kNotFound);
  ASSERT_OK_AND_ASSIGN(auto arena, device_->CreateArena(2 << 20));
  batch.k = batch.v = arena->View(0, text.kv_row() * 2);
  batch.q = arena->View(4096, text.q_row() * 4);
  batch.out = arena->View(65536, text.q_row() * 4);
  batch.q_dtype = DType::kFloat32;
  EXPECT_EQ(cache->Step(batch).status().code(), absl::StatusCode::kInvalidArgument);
  batch.q = batch.out = {};
  batch.q_dtype = DType::kFloat16;
  ASSERT_OK(cache->Step(batch).status());
  EXPECT_EQ(cache->Step(batch).status().code(), absl::StatusCode::kFailedPrecondition);  // the position again
}

TEST_F(DeviceCacheTest, AFullPoolSaysSoAndHasRoomAgain) {
  ASSERT_NO_FATAL_FAILURE(Start("256MiB"));
  const Text text = RandomText(5);
  ASSERT_OK_AND_ASSIGN(auto engine, Make(Way::kDaemon, OptionsFor(text, "raw", 0)));
  // A page of one layer is 64 KiB: 2,048 pages of both layers fit.
  std::vector<std::unique_ptr<client::Sequence>> sequences;
  std::vector<std::vector<uint16_t>> out;
  absl::Status full;
  while (full.ok()) {
    ASSERT_LT(sequences.size(), 400u);
    ASSERT_OK_AND_ASSIGN(auto made, engine->cache().CreateSequence());
    full = engine->Step(text, {{made.sequence->id(), 0, 1024}}, true, &out);
    sequences.push_back(std::move(made.sequence));
  }
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_TRUE(absl::StrContains(full.message(), "device-pool-bytes")) << full;
  EXPECT_GE(sequences.size(), 100u);
  const absl::Status again = engine->Step(text, {{sequences[0]->id(), 1023, 1}}, false, &out);
  EXPECT_OK(again);
  sequences.resize(sequences.size() / 2);
  ASSERT_OK_AND_ASSIGN(auto made, engine->cache().CreateSequence());
  EXPECT_OK(engine->Step(text, {{made.sequence->id(), 0, 1024}}, true, &out));
}

/// An engine on one of the daemon's GPUs and its counterpart on the CPU, on connections of their own. Its thread's
/// device is that GPU.
absl::Status AttendOn(const std::string& address, int gpu, Way way, Difference* difference) {
  KV_ASSIGN_OR_RETURN(auto client, Client::Connect(address, {}));
  KV_ASSIGN_OR_RETURN(auto device, DeviceClient::Open(client.get(), gpu));
  const Text text = RandomText(20 + 2 * uint64_t(gpu) + uint64_t(way));
  const std::string codec = "hack:k_bits=2,v_bits=2", tenant = absl::StrCat("engine", gpu, int(way));
  Counterparts counterparts;
  KV_ASSIGN_OR_RETURN(counterparts.gpu,
                      MakeEngine(way, client.get(), device.get(), OptionsFor(text, codec, gpu, tenant)));
  KV_ASSIGN_OR_RETURN(counterparts.cpu, HostEngine::Make(client.get(), OptionsFor(text, codec, -1, tenant)));
  KV_ASSIGN_OR_RETURN(auto on_gpu, counterparts.gpu->cache().CreateSequence());
  KV_ASSIGN_OR_RETURN(auto on_cpu, counterparts.cpu->cache().CreateSequence());
  const std::pair<client::Sequence*, client::Sequence*> s{on_gpu.sequence.get(), on_cpu.sequence.get()};
  KV_RETURN_IF_ERROR(counterparts.Step(text, {s}, {0}, {300}, true));
  for (uint64_t i = 0; i < 100; ++i) KV_RETURN_IF_ERROR(counterparts.Step(text, {s}, {300 + i}, {1}, true));
  counterparts.gpu->Forget(*s.first);
  *difference = counterparts.difference.same;
  EXPECT_LT(counterparts.difference.decoded.relative(), StepDifference::kDecodedRunError);
  return absl::OkStatus();
}

TEST_F(DeviceCacheTest, TwoGpusAtOnceOneDaemon) {
  int gpus = 0;
  ASSERT_CUDA(cudaGetDeviceCount(&gpus));
  if (gpus < 2) GTEST_SKIP() << "one GPU here: this takes two";
  ASSERT_NO_FATAL_FAILURE(Start("2GiB", {"--devices", "0,1"}));
  struct Engine {
    int gpu;
    Way way;
    absl::Status status;
    Difference difference;
  };
  Engine engines[] = {
      {0, Way::kDaemon, {}, {}}, {1, Way::kDaemon, {}, {}}, {0, Way::kOwn, {}, {}}, {1, Way::kOwn, {}, {}}};
  std::vector<std::thread> threads;
  for (Engine& e : engines) {
    threads.emplace_back([this, &e] { e.status = AttendOn(daemon_->listen(), e.gpu, e.way, &e.difference); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Engine& e : engines) {
    EXPECT_OK(e.status) << "GPU " << e.gpu << ", way " << int(e.way);
    EXPECT_GT(e.difference.norm, 0);
    EXPECT_LT(e.difference.relative(), 2e-3) << "GPU " << e.gpu << ", way " << int(e.way);
  }
  // The same cache on each: the same digest and names of blocks, but pages of its own GPU alone.
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon_->listen(), {}));
  ASSERT_OK_AND_ASSIGN(auto device, DeviceClient::Open(client.get(), 1));
  const Text text = RandomText(30);
  ASSERT_OK_AND_ASSIGN(auto other, MakeEngine(Way::kDaemon, client.get(), device.get(), OptionsFor(text, "raw", 1)));
  ASSERT_OK(device_->device().Use());
  ASSERT_OK_AND_ASSIGN(auto one, Make(Way::kDaemon, OptionsFor(text, "raw", 0)));
  EXPECT_EQ(one->cache().description().digest, other->cache().description().digest);
  ASSERT_OK_AND_ASSIGN(auto made, one->cache().CreateSequence());
  LayerRows out, again;
  ASSERT_OK(one->Step(text, {{made.sequence->id(), 0, 128}}, true, &out));
  const std::vector<BlockName> names = NamesOf(one->cache(), 128, 30);
  ASSERT_OK(made.sequence->Publish(names).status());
  ASSERT_OK(device->device().Use());
  ASSERT_OK_AND_ASSIGN(auto empty, other->cache().CreateSequence(names));
  EXPECT_EQ(empty.match.hit_blocks, 0);
  ASSERT_OK(other->Step(text, {{empty.sequence->id(), 0, 128}}, true, &again));
  EXPECT_EQ(out, again);
  ASSERT_OK(device_->device().Use());
  ASSERT_OK_AND_ASSIGN(auto found, one->cache().CreateSequence(names));
  EXPECT_EQ(found.match.hit_blocks, 2);
  ASSERT_OK_AND_ASSIGN(const client::DaemonDescription status, client_->Status());
  ASSERT_EQ(status.pools.size(), 3u);
  EXPECT_GT(status.pools[1].used_bytes, 0u);
  EXPECT_GT(status.pools[2].used_bytes, 0u);
  // What belongs to one GPU goes with that GPU current.
  found = {}, made = {};
  one.reset();
  ASSERT_OK(device->device().Use());
  empty = {};
  other.reset();
  device.reset();
}

class DeviceTiersTest : public DeviceCacheTest, public ::testing::WithParamInterface<Case> {
 protected:
  static constexpr uint64_t kPrompt = 960, kTail = 40;  // tokens

  // Steps behind the prompt `names`, of which `blocks` are to be found; the rows of every layer.
  LayerRows Continue(Engine& engine, const Text& text, const std::vector<BlockName>& names, int blocks) {
    auto made = engine.cache().CreateSequence(names);
    EXPECT_OK(made);
    if (!made.ok()) return {};
    EXPECT_EQ(made->match.hit_blocks, blocks);
    LayerRows out;
    EXPECT_OK(engine.Step(text, {{made->sequence->id(), kPrompt, int(kTail)}}, true, &out));
    engine.Forget(*made->sequence);
    return out;
  }
};

TEST_P(DeviceTiersTest, WhatIsEvictedComesBackFromTheHost) {
  // Three slabs: of raw pages, and of encoded ones.
  constexpr uint64_t kHostBytes = uint64_t{1} << 30;
  ASSERT_NO_FATAL_FAILURE(Start("768MiB", {"--eviction", "lru"}, kHostBytes));  // what returned would stay otherwise
  ASSERT_TRUE(Eventually([&] { return Metric("pool_pinned_bytes") >= double(kHostBytes); }));
  Text shape;
  shape.kv_heads = 8, shape.query_heads = 32;
  const Text text = RandomText(8, shape);
  ASSERT_OK_AND_ASSIGN(auto engine, Make(GetParam().way, OptionsFor(text, GetParam().codec, 0)));
  const auto publish = [&](uint32_t salt) {
    ASSERT_OK_AND_ASSIGN(auto made, engine->cache().CreateSequence());
    LayerRows out;
    ASSERT_OK(engine->Step(text, {{made.sequence->id(), 0, int(kPrompt)}}, true, &out));
    ASSERT_OK(made.sequence->Publish(NamesOf(engine->cache(), kPrompt, salt)).status());
    engine->Forget(*made.sequence);
  };
  ASSERT_NO_FATAL_FAILURE(publish(1));
  const auto names = NamesOf(engine->cache(), kPrompt, 1);
  const LayerRows first = Continue(*engine, text, names, int(names.size()));
  // Until it is gone from the GPU.
  uint32_t salt = 2;
  for (double evicted = 0; evicted < 2 * double(names.size()); evicted = Metric("evicted_blocks_total")) {
    ASSERT_LT(salt, 20000u);
    for (int i = 0; i < 16; ++i) ASSERT_NO_FATAL_FAILURE(publish(salt++));
  }
  EXPECT_GE(Metric("demoted_blocks_total"), double(names.size()));
  EXPECT_EQ(Metric("fetched_blocks_total"), 0);
  EXPECT_EQ(Continue(*engine, text, names, int(names.size())), first);
  EXPECT_GE(Metric("fetched_blocks_total"), 1);
  EXPECT_EQ(Metric("lost_moves_total"), 0);
  std::printf("%s: %u prompts; %.0f blocks demoted, %.0f evicted, %.0f fetched\n", GetParam().name, salt,
              Metric("demoted_blocks_total"), Metric("evicted_blocks_total"), Metric("fetched_blocks_total"));
}

INSTANTIATE_TEST_SUITE_P(Ways, DeviceTiersTest,
                         ::testing::Values(Case{"raw_daemon", "raw", Way::kDaemon}, Case{"raw_own", "raw", Way::kOwn},
                                           Case{"k2v2_daemon", "hack:k_bits=2,v_bits=2", Way::kDaemon},
                                           Case{"k3v2_own", "hack:k_bits=3,v_bits=2", Way::kOwn},
                                           Case{"policy_daemon", kPolicy, Way::kDaemon}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(DeviceCacheTest, IsHandedFromGpuToGpuAndToTheHost) {
  ASSERT_NO_FATAL_FAILURE(Start("2GiB"));
  DaemonOptions options;
  options.more_flags = {"--device-pool-bytes", "2GiB"};
  ASSERT_OK_AND_ASSIGN(auto receiver, DaemonProcess::Start(options));
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(receiver->listen(), {}));
  ASSERT_OK_AND_ASSIGN(auto device, DeviceClient::Open(client.get(), 0));
  const Text text = RandomText(9);
  for (const std::string codec : {"raw", "hack:k_bits=2,v_bits=2"}) {
    for (const Way way : {Way::kDaemon, Way::kOwn}) {
      SCOPED_TRACE(absl::StrCat(codec, " ", int(way)));
      const std::string tenant = absl::StrCat(codec == "raw" ? "raw" : "hack", int(way));
      ASSERT_OK_AND_ASSIGN(auto from, Make(way, OptionsFor(text, codec, 0, tenant)));
      ASSERT_OK_AND_ASSIGN(auto to, MakeEngine(way, client.get(), device.get(), OptionsFor(text, codec, 0, tenant)));
      ASSERT_OK_AND_ASSIGN(auto host, HostEngine::Make(client.get(), OptionsFor(text, codec, -1, tenant)));
      ASSERT_OK_AND_ASSIGN(auto made, from->cache().CreateSequence());
      LayerRows sent, received;
      ASSERT_OK(from->Step(text, {{made.sequence->id(), 0, 300}}, true, &sent));
      ASSERT_OK(made.sequence->Publish(NamesOf(from->cache(), 192, 3)).status());
      absl::StatusOr<client::HandOffOutcome> outcome;
      // At first the host pools may not be pinned yet.
      ASSERT_TRUE(Eventually([&] {
        outcome = made.sequence->HandOff(receiver->peer(), "first token: 17");
        return !absl::IsUnavailable(outcome.status());
      }));
      ASSERT_OK(outcome.status());
      absl::StatusOr<client::ClaimedSequence> claimed;
      ASSERT_TRUE(Eventually([&] {
        claimed = to->cache().Claim(outcome->ticket);
        return !absl::IsUnavailable(claimed.status());
      }));
      ASSERT_OK(claimed.status());
      EXPECT_EQ(claimed->tokens, 300u);
      EXPECT_EQ(claimed->blob, "first token: 17");
      EXPECT_EQ(to->cache().Claim(outcome->ticket).status().code(), absl::StatusCode::kNotFound);
      for (uint64_t i = 300; i < 400; i += 25) {
        ASSERT_OK(from->Step(text, {{made.sequence->id(), i, 25}}, true, &sent));
        ASSERT_OK(to->Step(text, {{claimed->sequence->id(), i, 25}}, true, &received));
        EXPECT_EQ(sent, received) << i;
      }
      // The same to an engine that attends in host memory.
      ASSERT_OK_AND_ASSIGN(const auto again, made.sequence->HandOff(receiver->peer(), ""));
      ASSERT_OK_AND_ASSIGN(auto on_host, host->cache().Claim(again.ticket));
      EXPECT_EQ(on_host.tokens, 400u);
      ASSERT_OK(from->Step(text, {{made.sequence->id(), 400, 9}}, true, &sent));
      ASSERT_OK(host->Step(text, {{on_host.sequence->id(), 400, 9}}, true, &received));
      Difference difference;
      for (int layer = 0; layer < text.layers; ++layer) difference.Add(sent[layer], received[layer]);
      EXPECT_LT(difference.relative(), 2e-3);
      from->Forget(*made.sequence);
      to->Forget(*claimed->sequence);
      // What was published came along, and is found on the other GPU by way of its host.
      ASSERT_OK_AND_ASSIGN(auto hit, to->cache().CreateSequence(NamesOf(to->cache(), 192, 3)));
      EXPECT_EQ(hit.match.hit_blocks, 3);
    }
  }
}

/// An engine with a cache of its own in a batch over several.
struct CacheOfBatch {
  std::string codec;
  std::unique_ptr<Client> client;
  std::unique_ptr<DeviceClient> device;
  std::unique_ptr<OwnEngine> gpu;
  std::unique_ptr<Engine> cpu;
  std::vector<std::unique_ptr<client::Sequence>> on_gpu, on_cpu;
  StepDifference difference;

  std::vector<Part> Parts(const std::vector<std::unique_ptr<client::Sequence>>& of, uint64_t step) const {
    return {{of[0]->id(), 200 + step, 1}, {of[1]->id(), 61 + step, 1}};
  }
};

TEST_F(DeviceCacheTest, CachesOfSeveralCodecsShareAStreamAndAGraph) {
  constexpr uint64_t kSteps = 80;  // over two boundaries of pages, each
  ASSERT_NO_FATAL_FAILURE(Start("2GiB"));
  const Text text = RandomText(40);
  WriteArtifact(text, {}, artifacts_.path(), kArtifact);
  cudaStream_t stream = nullptr;
  ASSERT_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  std::vector<CacheOfBatch> caches(3);
  caches[0].codec = "hack:k_bits=3,v_bits=2", caches[1].codec = kZack, caches[2].codec = "raw";
  for (CacheOfBatch& of : caches) {
    ASSERT_OK_AND_ASSIGN(of.client, Client::Connect(daemon_->listen(), {}));
    ASSERT_OK_AND_ASSIGN(of.device, DeviceClient::Open(of.client.get(), 0));
    ASSERT_OK_AND_ASSIGN(of.gpu, OwnEngine::Make(of.client.get(), of.device.get(), OptionsFor(text, of.codec, 0), true,
                                                 artifacts_.path(), stream));
    ASSERT_OK_AND_ASSIGN(of.cpu, HostEngine::Make(of.client.get(), OptionsFor(text, of.codec, -1)));
    for (const int prompt : {200, 61}) {
      ASSERT_OK_AND_ASSIGN(auto gpu, of.gpu->cache().CreateSequence());
      ASSERT_OK_AND_ASSIGN(auto cpu, of.cpu->cache().CreateSequence());
      LayerRows rows;
      ASSERT_OK(of.gpu->Step(text, {{gpu.sequence->id(), 0, prompt}}, true, &rows));
      ASSERT_OK(of.cpu->Step(text, {{cpu.sequence->id(), 0, prompt}}, true, &rows));
      of.on_gpu.push_back(std::move(gpu.sequence));
      of.on_cpu.push_back(std::move(cpu.sequence));
    }
  }
  cudaGraphExec_t graph = nullptr;
  for (uint64_t step = 0; step < kSteps; ++step) {
    for (CacheOfBatch& of : caches) ASSERT_OK(of.gpu->BeginStep(text, of.Parts(of.on_gpu, step)));
    if (graph == nullptr) {
      cudaGraph_t captured = nullptr;
      ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (CacheOfBatch& of : caches) ASSERT_OK(of.gpu->LaunchStep());
      ASSERT_CUDA(cudaStreamEndCapture(stream, &captured));
      ASSERT_CUDA(cudaGraphInstantiate(&graph, captured, 0));
      ASSERT_CUDA(cudaGraphDestroy(captured));
    }
    ASSERT_CUDA(cudaGraphLaunch(graph, stream));
    for (CacheOfBatch& of : caches) {
      LayerRows got, expected;
      ASSERT_OK(of.gpu->EndStep(&got));
      ASSERT_OK(of.cpu->Step(text, of.Parts(of.on_cpu, step), true, &expected));
      of.difference.Add(text, of.Parts(of.on_gpu, step), got, expected);
    }
  }
  for (CacheOfBatch& of : caches) {
    EXPECT_GT(of.difference.same.norm, 0) << of.codec;
    EXPECT_LT(of.difference.same.relative(), kSame) << of.codec;
    for (const auto& sequence : of.on_gpu) of.gpu->Forget(*sequence);
  }
  ASSERT_CUDA(cudaGraphExecDestroy(graph));
  caches.clear();
  ASSERT_CUDA(cudaStreamDestroy(stream));
}

/// The second process: its kernel writes over pages it appended, long after it said so.
TEST(EngineProcess, ScribblesOverItsPages) {
  const char* const address = std::getenv(kAddressVariable);
  if (address == nullptr) GTEST_SKIP() << "a process of other tests";
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(address, {}));
  ASSERT_OK_AND_ASSIGN(auto device, DeviceClient::Open(client.get(), 0));
  const Text text = RandomText(6);
  ASSERT_OK_AND_ASSIGN(auto engine,
                       OwnEngine::Make(client.get(), device.get(), OptionsFor(text, "raw", 0, "dying"), true));
  ASSERT_OK_AND_ASSIGN(auto made, engine->cache().CreateSequence());
  std::vector<std::vector<uint16_t>> out;
  ASSERT_OK(engine->Step(text, {{made.sequence->id(), 0, 1000}}, true, &out));
  const StepEntry entry{made.sequence->id(), 1000, 1};
  ASSERT_OK(engine->run().Begin({&entry, 1}, true, false));
  const DeviceRegion& pool = engine->run().pool();
  uint32_t slab = 0;
  while (!pool.IsMapped(slab)) ++slab;
  ASSERT_CUDA(cudaError_t(
      EnqueueScribble(pool.data() + slab * pool.slab_bytes(), uint64_t{64} << 20, kScribble, 60000, engine->stream())));
  std::printf("scribbles\n");
  std::fflush(stdout);
  for (;;) pause();
}

TEST_F(DeviceCacheTest, AnEngineKilledUnderItsKernelLeaksNothing) {
  ASSERT_NO_FATAL_FAILURE(Start("1GiB"));  // four slabs: one dies, two (raw and encoded pages) live
  setenv(kAddressVariable, daemon_->listen().c_str(), 1);
  ASSERT_OK_AND_ASSIGN(auto child, ChildProcess::Start({"/proc/self/exe", "--gtest_filter=EngineProcess.Scribbles*"}));
  unsetenv(kAddressVariable);
  for (;;) {
    ASSERT_OK_AND_ASSIGN(const std::string line, child->ReadLine());
    if (line == "scribbles") break;
  }
  ASSERT_OK_AND_ASSIGN(client::DaemonDescription status, client_->Status());
  EXPECT_GT(status.pools[1].used_bytes, 0u);
  // While it runs, others go on, and its slab is not theirs.
  const Text text = RandomText(7);
  Counterparts counterparts;
  ASSERT_OK_AND_ASSIGN(counterparts.gpu, Make(Way::kDaemon, OptionsFor(text, "hack:k_bits=2,v_bits=2", 0, "living")));
  ASSERT_OK_AND_ASSIGN(counterparts.cpu,
                       HostEngine::Make(client_.get(), OptionsFor(text, "hack:k_bits=2,v_bits=2", -1, "living")));
  ASSERT_OK_AND_ASSIGN(auto gpu, counterparts.gpu->cache().CreateSequence());
  ASSERT_OK_AND_ASSIGN(auto cpu, counterparts.cpu->cache().CreateSequence());
  const std::pair<client::Sequence*, client::Sequence*> s{gpu.sequence.get(), cpu.sequence.get()};
  ASSERT_OK(counterparts.Step(text, {s}, {0}, {300}, true));
  child->Signal(SIGKILL);
  ASSERT_OK(child->Wait().status());
  // Its pages come back once its process is gone, and its kernel with it.
  EXPECT_TRUE(Eventually([&] {
    const auto now = client_->Status();
    return now.ok() && now->leases == 2 && now->pools[1].free_slabs == 2;
  }));
  // A tenant that gets its slab finds zeros where it wrote nothing.
  ASSERT_OK_AND_ASSIGN(auto next,
                       OwnEngine::Make(client_.get(), device_.get(), OptionsFor(text, "raw", 0, "next"), true));
  ASSERT_OK_AND_ASSIGN(auto made, next->cache().CreateSequence());
  std::vector<std::vector<uint16_t>> out;
  ASSERT_OK(next->Step(text, {{made.sequence->id(), 0, 1}}, true, &out));
  std::vector<uint8_t> slab(256 << 20);
  int mapped = 0;
  const DeviceRegion& pool = next->run().pool();
  for (uint32_t i = 0; i < pool.slabs(); ++i) {
    if (!pool.IsMapped(i)) continue;
    ++mapped;
    ASSERT_CUDA(cudaMemcpy(slab.data(), pool.data() + i * pool.slab_bytes(), slab.size(), cudaMemcpyDeviceToHost));
    int64_t others = 0;
    for (const uint8_t byte : slab) others += byte != 0;
    EXPECT_LE(others, int64_t(2 * 2 * text.layers * text.kv_row()));  // its own token
    EXPECT_GT(others, 0);
  }
  EXPECT_EQ(mapped, 1);
  for (uint64_t i = 0; i < 40; ++i) ASSERT_OK(counterparts.Step(text, {s}, {300 + i}, {1}, true));
  EXPECT_LT(counterparts.difference.same.relative(), 2e-3);
  EXPECT_LT(counterparts.difference.decoded.relative(), StepDifference::kDecodedRunError);
}

}  // namespace
}  // namespace kvmanager::testing
