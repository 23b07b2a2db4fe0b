// Cache.read of caches on a GPU: the rows that were appended, and those that the codec decodes, as a cache in host
// memory gives them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "client/client.h"
#include "kvmanager/base/half.h"
#include "tests/device_engines.h"
#include "tests/device_fixture.h"
#include "tests/harness.h"
#include "tests/matchers.h"

namespace kvmanager::testing {
namespace {

using client::ReadBatch;
using client::ReadResult;
using client::StepEntry;
using client::TensorView;

constexpr char kArtifact[] = "made";
/// Of what a GPU encoded against what a CPU did: where they round otherwise, a code differs.
constexpr double kSameDecoded = 1e-2;

struct Case {
  const char* name;
  std::string codec;
  Way way;
};

struct Rows {
  std::vector<uint16_t> k, v;
};

absl::StatusOr<ReadResult> ReadRows(client::Cache& cache, const Text& text, int layer,
                                    const std::vector<StepEntry>& entries, Rows* rows) {
  size_t tokens = 0;
  for (const StepEntry& entry : entries) tokens += size_t(entry.tokens);
  rows->k.assign(tokens * text.kv_row(), 0x7e00);
  rows->v = rows->k;
  ReadBatch batch;
  batch.layer = layer;
  batch.entries = entries;
  batch.k = TensorView::Inline(rows->k.data(), rows->k.size() * 2);
  batch.v = TensorView::Inline(rows->v.data(), rows->v.size() * 2);
  return cache.Read(batch);
}

using DeviceReadTest = DeviceDaemonTest;

class DeviceReadWaysTest : public DeviceReadTest, public ::testing::WithParamInterface<Case> {};

TEST_P(DeviceReadWaysTest, GivesWhatAHostCacheGives) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const Text text = RandomText(21);
  WriteArtifact(text, {"million:m=64,bits=8,calibration=made"}, artifacts_.path(), kArtifact);
  ASSERT_OK_AND_ASSIGN(auto gpu, MakeEngine(GetParam().way, client_.get(), device_.get(),
                                            OptionsFor(text, GetParam().codec, 0), artifacts_.path()));
  ASSERT_OK_AND_ASSIGN(auto cpu, HostEngine::Make(client_.get(), OptionsFor(text, GetParam().codec, -1)));
  std::vector<std::unique_ptr<client::Sequence>> on_gpu, on_cpu;
  LayerRows rows;
  for (const int tokens : {700, 90}) {
    ASSERT_OK_AND_ASSIGN(auto a, gpu->cache().CreateSequence());
    ASSERT_OK_AND_ASSIGN(auto b, cpu->cache().CreateSequence());
    for (int first = 0; first < tokens; first += 100) {
      const int n = std::min(100, tokens - first);
      ASSERT_OK(gpu->Step(text, {{a.sequence->id(), uint64_t(first), n}}, true, &rows));
      ASSERT_OK(cpu->Step(text, {{b.sequence->id(), uint64_t(first), n}}, true, &rows));
    }
    on_gpu.push_back(std::move(a.sequence));
    on_cpu.push_back(std::move(b.sequence));
  }
  ASSERT_OK_AND_ASSIGN(auto fork, on_gpu[0]->Fork());
  ASSERT_OK(gpu->After(*fork));
  for (int layer = 0; layer < text.layers; ++layer) {
    SCOPED_TRACE(layer);
    for (const auto& [a, b] : {std::pair{on_gpu[0].get(), on_cpu[0].get()}, {fork.get(), on_cpu[0].get()}}) {
      const auto entries = [&](uint64_t one, uint64_t other) {
        return std::vector<StepEntry>{{one, 3, 600}, {other, 0, 90}, {one, 640, 60}, {one, 127, 2}};
      };
      Rows got, expected;
      ASSERT_OK_AND_ASSIGN(const ReadResult g,
                           ReadRows(gpu->cache(), text, layer, entries(a->id(), on_gpu[1]->id()), &got));
      ASSERT_OK_AND_ASSIGN(const ReadResult e,
                           ReadRows(cpu->cache(), text, layer, entries(b->id(), on_cpu[1]->id()), &expected));
      EXPECT_EQ(g.encoded_tokens, e.encoded_tokens);
      EXPECT_EQ(g.raw_tokens, e.raw_tokens);
      EXPECT_GT(g.raw_tokens, 0u);
      EXPECT_EQ(g.encoded_tokens == 0, GetParam().codec == "raw");
      Difference k, v;
      k.Add(got.k, expected.k);
      v.Add(got.v, expected.v);
      EXPECT_LE(k.relative(), GetParam().codec == "raw" ? 0 : kSameDecoded);
      EXPECT_LE(v.relative(), GetParam().codec == "raw" ? 0 : kSameDecoded);
      // What is raw is what was appended: the last 60 tokens.
      const size_t at = 690 * text.kv_row(), count = 60 * text.kv_row();
      EXPECT_TRUE(
          std::equal(got.k.begin() + at, got.k.begin() + at + count, text.k[layer].begin() + 640 * text.kv_row()));
      EXPECT_TRUE(
          std::equal(got.v.begin() + at, got.v.begin() + at + count, text.v[layer].begin() + 640 * text.kv_row()));
    }
  }
  for (const auto* sequence : {on_gpu[0].get(), on_gpu[1].get(), fork.get()}) gpu->Forget(*sequence);
}

INSTANTIATE_TEST_SUITE_P(Ways, DeviceReadWaysTest,
                         ::testing::Values(Case{"raw_daemon", "raw", Way::kDaemon}, Case{"raw_own", "raw", Way::kOwn},
                                           Case{"k2v2_daemon", "hack:k_bits=2,v_bits=2", Way::kDaemon},
                                           Case{"k3v2_own", "hack:k_bits=3,v_bits=2", Way::kOwn},
                                           Case{"million_own_but_encoding", "million:m=64,bits=8,calibration=made",
                                                Way::kOwnButEncoding},
                                           Case{"zack_own", "zack:mode=balanced,rate=0.5,calibration=made", Way::kOwn}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(DeviceReadTest, IntoArenasOfTheHostAndNoOthers) {
  ASSERT_NO_FATAL_FAILURE(Start());
  const Text text = RandomText(22);
  ASSERT_OK_AND_ASSIGN(auto engine, MakeEngine(Way::kOwn, client_.get(), device_.get(), OptionsFor(text, "raw", 0)));
  ASSERT_OK_AND_ASSIGN(auto made, engine->cache().CreateSequence());
  LayerRows rows;
  ASSERT_OK(engine->Step(text, {{made.sequence->id(), 0, 1000}}, true, &rows));
  ASSERT_OK_AND_ASSIGN(auto host, client_->CreateArena(2 << 20));
  ASSERT_OK_AND_ASSIGN(auto there, device_->CreateArena(2 << 20));
  const StepEntry entry{made.sequence->id(), 0, 1000};
  const size_t bytes = 1000 * text.kv_row() * 2;
  ReadBatch batch;
  batch.layer = 1;
  batch.entries = {&entry, 1};
  batch.k = host->View(0, bytes);
  batch.v = host->View(1 << 20, bytes);
  ASSERT_OK(engine->cache().Read(batch).status());
  EXPECT_EQ(std::memcmp(host->data().data(), text.k[1].data(), bytes), 0);
  EXPECT_EQ(std::memcmp(host->data().data() + (1 << 20), text.v[1].data(), bytes), 0);
  batch.k = there->View(0, bytes);
  EXPECT_EQ(engine->cache().Read(batch).status().code(), absl::StatusCode::kNotFound);
  engine->Forget(*made.sequence);
}

TEST_F(DeviceReadTest, WhatIsNotFiniteIsNotRead) {
  ASSERT_NO_FATAL_FAILURE(Start());
  Text text = RandomText(23);
  text.v[1][10 * text.kv_row() + 3] = FloatToHalf(INFINITY);
  for (const Way way : {Way::kDaemon, Way::kOwn}) {
    ASSERT_OK_AND_ASSIGN(auto engine, MakeEngine(way, client_.get(), device_.get(), OptionsFor(text, "raw", 0)));
    ASSERT_OK_AND_ASSIGN(auto made, engine->cache().CreateSequence());
    LayerRows rows;
    Rows read;
    ASSERT_OK(engine->Step(text, {{made.sequence->id(), 0, 20}}, true, &rows));
    const absl::Status status = ReadRows(engine->cache(), text, 0, {{made.sequence->id(), 0, 20}}, &read).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), "v[position 10][layer 1]")) << status;
    engine->Forget(*made.sequence);
  }
}

}  // namespace
}  // namespace kvmanager::testing
