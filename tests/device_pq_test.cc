// PQ on a daemon's GPU, attended to in the daemon and in the engine's own process: queries read what they read on the
// CPU, across prompts, forks, crops, prefix hits and hand-offs; indexes are memory of their tenant, and come back.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
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
using client::StepEntry;

constexpr char kSmall[] = "pq:m=4,bits=4,ratio=0.2,sinks=8,iterations=3";
constexpr char kPlain[] = "pq:m=4,bits=8,ratio=0.1,sinks=32,iterations=2";

/// Of a row; a token chosen otherwise is more.
constexpr double kRowError = 1e-2;
constexpr double kRunError = 2e-3;

struct Case {
  const char* name;
  const char* codec;
  Way way;
};

/// A sequence on the GPU, and its counterpart on the CPU.
struct Pair {
  std::unique_ptr<client::Sequence> gpu, cpu;
};
struct PairPart {
  const Pair* of;
  uint64_t first;
  int tokens;
  uint64_t shift = 0;
};

class DevicePqTest : public DeviceDaemonTest {
 protected:
  void Start(const std::string& pool_bytes = "1GiB") { DeviceDaemonTest::Start(pool_bytes, {}, 256 << 20); }
  void OpenCounterparts(Way way, const std::string& codec) {
    ASSERT_OK_AND_ASSIGN(gpu_, MakeEngine(way, client_.get(), device_.get(), OptionsFor(text_, codec, 0)));
    ASSERT_OK_AND_ASSIGN(cpu_, HostEngine::Make(client_.get(), OptionsFor(text_, codec, -1)));
  }
  void TearDown() override {
    gpu_.reset();
    cpu_.reset();
    DeviceDaemonTest::TearDown();
  }
  Pair Create(uint64_t prompt, absl::Span<const BlockName> prefix = {}) {
    auto gpu = gpu_->cache().CreateSequence(prefix, prompt), cpu = cpu_->cache().CreateSequence(prefix, prompt);
    EXPECT_OK(gpu);
    EXPECT_OK(cpu);
    EXPECT_EQ(gpu->match.hit_blocks, int(prefix.size()));
    EXPECT_EQ(cpu->match.hit_blocks, int(prefix.size()));
    return {std::move(gpu->sequence), std::move(cpu->sequence)};
  }
  Pair Fork(const Pair& of) {
    auto gpu = of.gpu->Fork(), cpu = of.cpu->Fork();
    EXPECT_OK(gpu);
    EXPECT_OK(cpu);
    EXPECT_OK(gpu_->After(**gpu));
    return {*std::move(gpu), *std::move(cpu)};
  }
  void Crop(const Pair& of, uint64_t tokens) {
    ASSERT_OK(of.gpu->Crop(tokens));
    ASSERT_OK(of.cpu->Crop(tokens));
    ASSERT_OK(gpu_->After(*of.gpu));
  }
  void Drop(Pair pair) { gpu_->Forget(*pair.gpu); }

  /// One step of both; every row is compared.
  void Step(const std::vector<PairPart>& parts, bool append = true) {
    std::vector<Part> gpu, cpu;
    for (const PairPart& part : parts) {
      gpu.push_back({part.of->gpu->id(), part.first, part.tokens, part.shift});
      cpu.push_back({part.of->cpu->id(), part.first, part.tokens, part.shift});
    }
    LayerRows got, expected;
    ASSERT_OK(gpu_->Step(text_, gpu, append, &got));
    ASSERT_OK(cpu_->Step(text_, cpu, append, &expected));
    for (size_t layer = 0; layer < got.size(); ++layer) {
      all_.Add(got[layer], expected[layer]);
      for (size_t at = 0; at < got[layer].size(); at += size_t(text_.head_dim)) {
        Difference row;
        row.Add({got[layer].begin() + ptrdiff_t(at), got[layer].begin() + ptrdiff_t(at) + text_.head_dim},
                {expected[layer].begin() + ptrdiff_t(at), expected[layer].begin() + ptrdiff_t(at) + text_.head_dim});
        worst_ = std::max(worst_, row.relative());
        ASSERT_LT(row.relative(), kRowError)
            << "layer " << layer << " row " << at / text_.q_row() << " head " << at % text_.q_row() / text_.head_dim
            << " of a step from " << parts[0].first << " on";
      }
    }
  }
  void Done(const char* name) {
    EXPECT_GT(all_.norm, 0);
    EXPECT_LT(all_.relative(), kRunError);
    std::printf("%s: relative L2 of GPU against CPU %.1e, of the worst row %.1e\n", name, all_.relative(), worst_);
  }

  Text text_ = RandomText(1);
  std::unique_ptr<Engine> gpu_, cpu_;
  Difference all_;
  double worst_ = 0;
};

class DevicePqWaysTest : public DevicePqTest, public ::testing::WithParamInterface<Case> {};

#define STEP(...) ASSERT_NO_FATAL_FAILURE(Step(__VA_ARGS__))

TEST_P(DevicePqWaysTest, QueriesReadWhatTheyReadOnTheCpu) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_NO_FATAL_FAILURE(OpenCounterparts(GetParam().way, GetParam().codec));
  // Of a prompt that is said, of one that the first single token ends, and of a long one.
  Pair a = Create(300), b = Create(0), c = Create(600);
  STEP({{&a, 0, 200}, {&b, 0, 64}});
  STEP({{&a, 200, 100}, {&b, 64, 203}});
  // Those that choose, those of a prompt and short contexts in one batch.
  for (uint64_t i = 0; i < 40; ++i) STEP({{&a, 300 + i, 1}, {&c, 10 * i, 10}, {&b, 267 + i, 1}});
  // More tokens than the local window has: some are coded by the step that brings them.
  STEP({{&a, 340, 120}, {&b, 307, 3}});
  STEP({{&b, 310, 90}});
  // Queries alone, in the prompt and behind it.
  STEP({{&a, 290, 15}, {&b, 399, 1}}, false);
  STEP({{&c, 390, 10}, {&a, 459, 1}}, false);
  EXPECT_GE(Metric("index_trainings_total"), 2 * 2 * 2);  // of a and b, in two layers, on both sides

  // A fork goes its own way, as its source does.
  Pair f = Fork(a);
  STEP({{&a, 460, 1}, {&f, 460, 30, 100}});
  for (uint64_t i = 0; i < 20; ++i) STEP({{&f, 490 + i, 1, 100}, {&a, 461 + i, 1}});
  // A crop behind the prompt, and into it: other tokens come.
  ASSERT_NO_FATAL_FAILURE(Crop(f, 470));
  STEP({{&f, 470, 1, 200}, {&a, 481, 1}});
  STEP({{&f, 471, 77, 200}});
  ASSERT_NO_FATAL_FAILURE(Crop(f, 280));
  STEP({{&f, 280, 20, 300}});
  STEP({{&f, 300, 1, 300}, {&a, 482, 1}});
  STEP({{&f, 301, 66, 300}});

  // What is published is found, and an index made of it.
  const auto names = NamesOf(gpu_->cache(), 256, 5);
  ASSERT_OK(a.gpu->Publish(names).status());
  ASSERT_OK(a.cpu->Publish(names).status());
  Pair h = Create(280, names);
  STEP({{&h, 256, 24}});
  STEP({{&h, 280, 1}, {&a, 483, 1}});
  STEP({{&h, 281, 50}});
  Pair whole = Create(256, names);  // all of its prompt is there
  STEP({{&whole, 256, 1}});
  STEP({{&whole, 257, 1}, {&h, 331, 1}});
  Done(GetParam().name);

  EXPECT_GT(Metric("index_bytes"), 0);
  EXPECT_GT(Metric("index_selections_total"), 0);
  for (Pair* pair : {&a, &b, &c, &f, &h, &whole}) Drop(std::move(*pair));
  EXPECT_TRUE(Eventually([&] { return Metric("index_bytes") == 0; }));
}

TEST_P(DevicePqWaysTest, LongContextsHaveManyChunksOfCodes) {
  Text shape;
  shape.tokens = 3600;
  text_ = RandomText(2, shape);
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_NO_FATAL_FAILURE(OpenCounterparts(GetParam().way, GetParam().codec));
  Pair a = Create(1000);
  STEP({{&a, 0, 1000}});
  // Across the ends of chunks, in pieces and one by one.
  for (const auto& [first, tokens] : {std::pair<uint64_t, int>{1000, 20}, {1020, 300}, {1320, 700}}) {
    STEP({{&a, first, tokens}});
  }
  for (uint64_t i = 0; i < 40; ++i) STEP({{&a, 2020 + i, 1}});
  Pair f = Fork(a);
  STEP({{&f, 2060, 1, 500}, {&a, 2060, 1}});
  // Chunks below are shared: neither sees what the other has behind.
  ASSERT_NO_FATAL_FAILURE(Crop(a, 1500));
  STEP({{&a, 1500, 500, 700}, {&f, 2061, 1, 500}});
  STEP({{&a, 2000, 300, 700}});
  STEP({{&f, 2062, 300, 500}, {&a, 2300, 1, 700}});
  Pair g = Fork(f);
  ASSERT_NO_FATAL_FAILURE(Crop(g, 1100));
  STEP({{&g, 1099, 1}, {&f, 2361, 1}, {&a, 2300, 1}}, false);
  STEP({{&g, 1100, 200, 900}, {&a, 2301, 200, 700}, {&f, 2362, 1, 500}});
  STEP({{&f, 1500, 16}, {&g, 1299, 1}, {&a, 2200, 5}}, false);
  Done(GetParam().name);
  for (Pair* pair : {&a, &f, &g}) Drop(std::move(*pair));
}

INSTANTIATE_TEST_SUITE_P(Ways, DevicePqWaysTest,
                         ::testing::Values(Case{"small_daemon", kSmall, Way::kDaemon},
                                           Case{"small_own", kSmall, Way::kOwn},
                                           Case{"plain_daemon", kPlain, Way::kDaemon},
                                           Case{"plain_own", kPlain, Way::kOwn}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(DevicePqTest, AStepAcrossThePromptsEndIsTheDaemonsAlone) {
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_NO_FATAL_FAILURE(OpenCounterparts(Way::kDaemon, kSmall));
  Pair a = Create(100);
  STEP({{&a, 0, 150}});
  STEP({{&a, 150, 1}});
  ASSERT_OK_AND_ASSIGN(auto own, OwnEngine::Make(client_.get(), device_.get(), OptionsFor(text_, kSmall, 0), true));
  ASSERT_OK_AND_ASSIGN(auto made, own->cache().CreateSequence({}, 100));
  const StepEntry across{made.sequence->id(), 0, 101}, within{made.sequence->id(), 0, 100};
  const absl::Status refused = own->run().Begin({&across, 1}, true, true);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
  EXPECT_TRUE(absl::StrContains(refused.message(), "at most 100")) << refused;
  ASSERT_OK(own->run().Begin({&within, 1}, true, true));
  ASSERT_OK(own->run().End());
  own->Forget(*made.sequence);
  Drop(std::move(a));
}

TEST_F(DevicePqTest, WhatIsNotServedIsRefused) {
  ASSERT_NO_FATAL_FAILURE(Start());
  for (const char* const more : {"scores=exact", "rebuild=64"}) {
    const absl::Status status = client_->OpenCache(OptionsFor(text_, absl::StrCat(kSmall, ",", more), 0)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  }
}

TEST_F(DevicePqTest, IsHandedFromGpuToGpuAndToTheHost) {
  ASSERT_NO_FATAL_FAILURE(Start("1GiB"));
  ASSERT_NO_FATAL_FAILURE(OpenCounterparts(Way::kDaemon, kSmall));
  DaemonOptions options;
  options.more_flags = {"--device-pool-bytes", "1GiB"};
  ASSERT_OK_AND_ASSIGN(auto receiver, DaemonProcess::Start(options));
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(receiver->listen(), {}));
  ASSERT_OK_AND_ASSIGN(auto device, DeviceClient::Open(client.get(), 0));
  ASSERT_OK_AND_ASSIGN(auto to, MakeEngine(Way::kDaemon, client.get(), device.get(), OptionsFor(text_, kSmall, 0)));
  ASSERT_OK_AND_ASSIGN(auto host, HostEngine::Make(client.get(), OptionsFor(text_, kSmall, -1)));
  Pair a = Create(300);
  STEP({{&a, 0, 300}});
  STEP({{&a, 300, 30}});
  absl::StatusOr<client::HandOffOutcome> outcome;
  ASSERT_TRUE(Eventually([&] {  // at first the host pools may not be pinned yet
    outcome = a.gpu->HandOff(receiver->peer(), "");
    return !absl::IsUnavailable(outcome.status());
  }));
  ASSERT_OK(outcome.status());
  absl::StatusOr<client::ClaimedSequence> claimed;
  ASSERT_TRUE(Eventually([&] {
    claimed = to->cache().Claim(outcome->ticket);
    return !absl::IsUnavailable(claimed.status());
  }));
  ASSERT_OK(claimed.status());
  LayerRows sent, received;
  for (uint64_t i = 330; i < 400; i += 35) {
    ASSERT_OK(gpu_->Step(text_, {{a.gpu->id(), i, 35}}, true, &sent));
    ASSERT_OK(to->Step(text_, {{claimed->sequence->id(), i, 35}}, true, &received));
    EXPECT_EQ(sent, received) << i;
  }
  ASSERT_OK_AND_ASSIGN(const auto again, a.gpu->HandOff(receiver->peer(), ""));
  ASSERT_OK_AND_ASSIGN(auto on_host, host->cache().Claim(again.ticket));
  EXPECT_EQ(on_host.tokens, 400u);
  ASSERT_OK(gpu_->Step(text_, {{a.gpu->id(), 400, 9}}, true, &sent));
  ASSERT_OK(host->Step(text_, {{on_host.sequence->id(), 400, 9}}, true, &received));
  Difference difference;
  for (int layer = 0; layer < text_.layers; ++layer) difference.Add(sent[layer], received[layer]);
  EXPECT_LT(difference.relative(), kRunError);
  to->Forget(*claimed->sequence);
  Drop(std::move(a));
}

TEST_F(DevicePqTest, MemoryOfIndexesIsBoundedAndComesBack) {
  // Three slabs: of pages, of codebooks, of codes. With a fourth, of another tenant's pages, there is none for codes.
  ASSERT_NO_FATAL_FAILURE(Start("1GiB"));
  ASSERT_OK_AND_ASSIGN(auto other,
                       MakeEngine(Way::kDaemon, client_.get(), device_.get(), OptionsFor(text_, "raw", 0, "other")));
  ASSERT_OK_AND_ASSIGN(auto others, other->cache().CreateSequence());
  ASSERT_OK_AND_ASSIGN(auto second,
                       MakeEngine(Way::kDaemon, client_.get(), device_.get(), OptionsFor(text_, "raw", 0, "second")));
  ASSERT_OK_AND_ASSIGN(auto seconds, second->cache().CreateSequence());
  ASSERT_NO_FATAL_FAILURE(OpenCounterparts(Way::kDaemon, kSmall));
  LayerRows out;
  ASSERT_OK(other->Step(text_, {{others.sequence->id(), 0, 64}}, true, &out));
  Pair a = Create(100);
  STEP({{&a, 0, 90}});
  ASSERT_OK(second->Step(text_, {{seconds.sequence->id(), 0, 64}}, true, &out));
  // The prompt's end takes a codebook; what is left has no room for codes.
  const absl::Status full = gpu_->Step(text_, {{a.gpu->id(), 90, 11}}, true, &out);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_TRUE(absl::StrContains(full.message(), "device-pool-bytes")) << full;
  EXPECT_EQ(Metric("index_bytes"), 0);
  second->Forget(*seconds.sequence);
  seconds = {};
  EXPECT_TRUE(Eventually([&] {
    return gpu_->Step(text_, {{a.gpu->id(), 90, 11}}, true, &out, gpu_->failed_layer()).ok();
  }));
  EXPECT_GT(Metric("index_bytes"), 0);
  Drop(std::move(a));
  EXPECT_TRUE(Eventually([&] { return Metric("index_bytes") == 0; }));
  other->Forget(*others.sequence);
}

TEST_F(DevicePqTest, AnEngineMapsNoIndexOfAnotherTenant) {
  ASSERT_NO_FATAL_FAILURE(Start("2GiB"));
  ASSERT_OK_AND_ASSIGN(auto owner,
                       OwnEngine::Make(client_.get(), device_.get(), OptionsFor(text_, kSmall, 0, "a"), true));
  ASSERT_OK_AND_ASSIGN(auto owned, owner->cache().CreateSequence({}, 100));
  LayerRows out;
  ASSERT_OK(owner->Step(text_, {{owned.sequence->id(), 0, 100}}, true, &out));
  ASSERT_OK(owner->Step(text_, {{owned.sequence->id(), 100, 1}}, true, &out));
  int owners = 0;
  const uint32_t slabs = device_->description().slabs;
  for (uint32_t slab = 0; slab < slabs; ++slab) owners += owner->run().pool().IsMapped(slab);
  EXPECT_EQ(owners, 3);  // of pages, of the codebook, of codes

  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon_->listen(), {}));
  ASSERT_OK_AND_ASSIGN(auto device, DeviceClient::Open(client.get(), 0));
  ASSERT_OK_AND_ASSIGN(auto thief,
                       OwnEngine::Make(client.get(), device.get(), OptionsFor(text_, kSmall, 0, "b"), true));
  ASSERT_OK_AND_ASSIGN(auto stolen, thief->cache().CreateSequence({}, 100));
  ASSERT_OK(thief->Step(text_, {{stolen.sequence->id(), 0, 64}}, true, &out));
  for (uint32_t slab = 0; slab < slabs; ++slab) {
    if (thief->run().pool().IsMapped(slab)) continue;
    const auto fd = device->MapSlab(thief->cache().description().id, slab);
    EXPECT_EQ(fd.status().code(), absl::StatusCode::kNotFound) << "slab " << slab << ": " << fd.status();
  }
  thief->Forget(*stolen.sequence);
  owner->Forget(*owned.sequence);
}

TEST_F(DevicePqTest, ACapturedStepFollows) {
  Text shape;
  shape.tokens = 2000;
  text_ = RandomText(4, shape);
  ASSERT_NO_FATAL_FAILURE(Start());
  ASSERT_NO_FATAL_FAILURE(OpenCounterparts(Way::kOwn, kSmall));
  auto& own = static_cast<OwnEngine&>(*gpu_);
  Pair a = Create(700), b = Create(900);
  STEP({{&a, 0, 700}, {&b, 0, 900}});
  STEP({{&a, 700, 1}, {&b, 900, 1}});
  // A decode step of both at fixed addresses, captured once for each kind of launches.
  ASSERT_OK_AND_ASSIGN(auto arena, device_->CreateArena(8 << 20));
  const size_t kv = text_.kv_row() * 2, q = text_.q_row() * 2, q_rows = 2 * q;
  const auto at = [&](int layer, int what) { return arena->data().data() + (layer * 4 + what) * (64 << 10); };
  cudaStream_t stream = own.stream();
  cudaGraphExec_t graph = nullptr;
  uint64_t launches = 0;
  int captures = 0, replays = 0;
  for (uint64_t i = 0; i < 60; ++i) {
    const std::vector<StepEntry> entries = {{a.gpu->id(), 701 + i, 1}, {b.gpu->id(), 901 + i, 1}};
    for (int layer = 0; layer < text_.layers; ++layer) {
      for (size_t e = 0; e < 2; ++e) {
        const uint64_t token = entries[e].position;
        ASSERT_CUDA(cudaMemcpyAsync(at(layer, 0) + e * kv, &text_.k[layer][token * text_.kv_row()], kv,
                                    cudaMemcpyHostToDevice, stream));
        ASSERT_CUDA(cudaMemcpyAsync(at(layer, 1) + e * kv, &text_.v[layer][token * text_.kv_row()], kv,
                                    cudaMemcpyHostToDevice, stream));
        ASSERT_CUDA(cudaMemcpyAsync(at(layer, 2) + e * q, &text_.q[layer][token * text_.q_row()], q,
                                    cudaMemcpyHostToDevice, stream));
      }
    }
    ASSERT_OK(own.run().Begin(entries, true, true));
    if (graph == nullptr || own.run().launches() != launches) {
      if (graph != nullptr) ASSERT_CUDA(cudaGraphExecDestroy(graph));
      cudaGraph_t captured = nullptr;
      ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
      for (int layer = 0; layer < text_.layers; ++layer) {
        ASSERT_OK(own.run().Append(layer, at(layer, 0), at(layer, 1)));
        ASSERT_OK(own.run().Attend(layer, at(layer, 2), at(layer, 3), nullptr));
      }
      ASSERT_CUDA(cudaStreamEndCapture(stream, &captured));
      ASSERT_CUDA(cudaGraphInstantiate(&graph, captured, 0));
      ASSERT_CUDA(cudaGraphDestroy(captured));
      launches = own.run().launches();
      ++captures;
    } else {
      ++replays;
    }
    ASSERT_CUDA(cudaGraphLaunch(graph, stream));
    ASSERT_OK(own.run().End());
    ASSERT_CUDA(cudaStreamSynchronize(stream));
    LayerRows expected;
    ASSERT_OK(cpu_->Step(text_, {{a.cpu->id(), 701 + i, 1}, {b.cpu->id(), 901 + i, 1}}, true, &expected));
    for (int layer = 0; layer < text_.layers; ++layer) {
      std::vector<uint16_t> got(q_rows / 2);
      ASSERT_CUDA(cudaMemcpy(got.data(), at(layer, 3), q_rows, cudaMemcpyDeviceToHost));
      Difference difference;
      difference.Add(got, expected[layer]);
      ASSERT_LT(difference.relative(), kRunError) << i;
    }
  }
  EXPECT_LE(captures, 3);
  EXPECT_GE(replays, 57);
  ASSERT_CUDA(cudaGraphExecDestroy(graph));
  Drop(std::move(a));
  Drop(std::move(b));
}

}  // namespace
}  // namespace kvmanager::testing
