#include "transport/recompute/runtime.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <thread>

#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"
#include "transport/recompute/cpu_executor.h"
#include "transport/recompute/recompute_testing.h"

namespace kvmanager::recompute {
namespace {

// What a reload needs beside its world.
struct Machine {
  SteadyClock clock;
  MemoryLink memory;
  WorkerPool pool{1};
  Profile profile{&clock};
  std::unique_ptr<ReloadExecutor> executor;
  std::unique_ptr<ReloadRuntime> runtime;

  explicit Machine(const ProjectionModel& model, CpuExecutorOptions options = {.chunk_rows = 48},
                   CopyLink* link = nullptr) {
    auto made = MakeCpuExecutor(model, options, link == nullptr ? &memory : link, &pool, &clock);
    KV_CHECK(made.ok());
    executor = *std::move(made);
    runtime = std::make_unique<ReloadRuntime>(executor.get(), &clock, &profile);
  }
};

void ReloadAndVerify(const World& world, Machine& machine, const std::vector<int64_t>& splits) {
  const auto sequences = world.Split(splits);
  const auto report = machine.runtime->Run({.layer = 1, .kv_page_bytes = world.kv_page_bytes, .sequences = sequences});
  ASSERT_TRUE(report.ok()) << report.status();
  world.Verify(splits);
}

TEST(Runtime, RecomputesWhatWasStoredAndCopiesTheRest) {
  uint64_t seed = 1;
  for (const ModelCase& c : ModelCases()) {
    SCOPED_TRACE(seed);
    // Positions of a long context among them; a page that is not full; one that is the only one.
    const World world(c.model, c.weights, c.bias, {{150, 0}, {64, 100000}, {5, 7}}, 1000, seed++);
    Machine machine(c.model);
    ASSERT_TRUE(machine.executor->RegisterWeights(1, world.Weights()).ok());
    ReloadAndVerify(world, machine, {150, 64, 5});
    ReloadAndVerify(world, machine, {80, 0, 5});
    ReloadAndVerify(world, machine, {16, 48, 0});
    ReloadAndVerify(world, machine, {0, 0, 0});
  }
}

TEST(Runtime, RandomSplitsAndBuffers) {
  std::mt19937_64 random(12);
  for (int round = 0; round < 12; ++round) {
    const ProjectionModel model = Model(64, 2, 16, {16, 10000});
    std::vector<std::pair<int64_t, int64_t>> shapes;
    std::vector<int64_t> splits;
    for (int i = 0, n = 1 + int(random() % 5); i < n; ++i) {
      const int64_t tokens = 1 + int64_t(random() % 200);
      shapes.push_back({tokens, int64_t(random() % 5000)});
      const int64_t split = int64_t(random() % (tokens / 16 + 2)) * 16;
      splits.push_back(std::min(split, tokens));
    }
    const World world(model, DType::kFloat16, false, shapes, 64 + 2 * (random() % 3000), round);
    Machine machine(model, {.chunk_rows = 16 + int(random() % 100), .buffers = 2 + int(random() % 3)});
    ASSERT_TRUE(machine.executor->RegisterWeights(1, world.Weights()).ok());
    ReloadAndVerify(world, machine, splits);
  }
}

TEST(Runtime, ASplitOfTheBatchIsSharedOut) {
  std::mt19937_64 random(2);
  for (int round = 0; round < 2000; ++round) {
    const int64_t batch = 1 + random() % 9, pages = 1 + random() % 7, page_tokens = 16;
    const int64_t tokens = pages * page_tokens - (random() % 2) * (random() % page_tokens);
    const int64_t batch_pages = random() % (batch * pages + 1);
    int64_t sum = 0, least = tokens, most = 0;
    for (int64_t i = 0; i < batch; ++i) {
      const int64_t split =
          SplitOfSequence(std::min(batch_pages * page_tokens, batch * tokens), batch, tokens, page_tokens, i);
      ASSERT_TRUE(split == tokens || split % page_tokens == 0) << split;
      ASSERT_LE(split, tokens);
      sum += split, least = std::min(least, split), most = std::max(most, split);
    }
    ASSERT_LE(most - least, page_tokens);
    ASSERT_LE(sum, batch_pages * page_tokens);
    ASSERT_TRUE(tokens % page_tokens != 0 || sum == batch_pages * page_tokens);
  }
  EXPECT_EQ(SplitOfSequence(3 * 40, 3, 40, 16, 1), 40);
}

TEST(Runtime, ReportsAndProfiles) {
  const ProjectionModel model = Model(64, 2, 16, {});
  const World world(model, DType::kFloat16, false, {{160, 0}}, 6000, 3);
  Machine machine(model);
  ASSERT_TRUE(machine.executor->RegisterWeights(1, world.Weights()).ok());
  const auto sequences = world.Split({64});
  const auto report = machine.runtime->Run({.layer = 1, .kv_page_bytes = 6000, .sequences = sequences});
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->activation_bytes, 64 * 64 * 2);
  EXPECT_EQ(report->kv_bytes, 6 * 6000);
  EXPECT_EQ(report->flops, 4.0 * 64 * 64 * 32);
  EXPECT_TRUE(machine.profile.LinkBytesPerSecond().has_value());
  EXPECT_TRUE(machine.profile.FlopsPerSecond({64, 32}).has_value());

  Machine fresh(model);
  ASSERT_TRUE(fresh.executor->RegisterWeights(1, world.Weights()).ok());
  auto all = world.Split({160});
  all[0].sources = world.sequences[0].stored_pointers;
  ASSERT_TRUE(fresh.runtime->Measure({.layer = 1, .kv_page_bytes = 6000, .sequences = all}).ok());
  EXPECT_TRUE(RatesOf(fresh.profile, {64, 32}).ok());
}

// Sets a flag in the middle of a copy.
class CancellingLink final : public CopyLink {
 public:
  explicit CancellingLink(int copies) : left_(copies) {}
  size_t slice_bytes() const override { return 512; }
  void Copy(const uint8_t* from, uint8_t* to, size_t bytes) override {
    std::memcpy(to, from, bytes);
    ++copies;
    if (--left_ == 0) cancelled = true;
  }
  std::atomic<bool> cancelled{false};
  int copies = 0;

 private:
  int left_;
};

TEST(Runtime, CancelEndsItAndTheNextOneIsWhole) {
  const ProjectionModel model = Model(64, 2, 16, {16, 10000});
  const World world(model, DType::kFloat16, false, {{320, 0}}, 4096, 4);
  for (const int after : {1, 2, 20, 50, 90}) {
    CancellingLink link(after);
    Machine machine(model, {.chunk_rows = 32}, &link);
    ASSERT_TRUE(machine.executor->RegisterWeights(1, world.Weights()).ok());
    const auto sequences = world.Split({160});
    const ReloadRequest request{
        .layer = 1, .kv_page_bytes = 4096, .sequences = sequences, .cancelled = &link.cancelled};
    const auto report = machine.runtime->Run(request);
    EXPECT_EQ(report.status().code(), absl::StatusCode::kCancelled) << report.status();
    EXPECT_EQ(link.copies, after);  // not one slice more
    EXPECT_FALSE(machine.profile.LinkBytesPerSecond().has_value());
    link.cancelled = false;
    ReloadAndVerify(world, machine, {160});
  }
}

TEST(Runtime, DamagedActivationsAreNamed) {
  const ProjectionModel model = Model(64, 2, 16, {16, 10000});
  World world(model, DType::kFloat16, false, {{64, 1000}}, 4096, 5);
  Machine machine(model);
  ASSERT_TRUE(machine.executor->RegisterWeights(1, world.Weights()).ok());
  const std::vector<uint8_t> good = world.sequences[0].activations[2];
  StoreElement(world.sequences[0].activations[2].data(), DType::kFloat16, 3 * 64 + 9,
               std::numeric_limits<float>::quiet_NaN());
  const auto sequences = world.Split({64});
  const auto report = machine.runtime->Run({.layer = 1, .kv_page_bytes = 4096, .sequences = sequences});
  EXPECT_EQ(report.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(report.status().message().find("position 1035"), absl::string_view::npos) << report.status();
  std::copy(good.begin(), good.end(), world.sequences[0].activations[2].begin());
  ReloadAndVerify(world, machine, {64});
}

TEST(Runtime, HostileRequestsAreNamed) {
  const ProjectionModel model = Model(64, 2, 16, {});
  const World world(model, DType::kFloat16, false, {{64, 0}, {40, 0}}, 4096, 6);
  Machine machine(model);
  ASSERT_TRUE(machine.executor->RegisterWeights(1, world.Weights()).ok());
  const auto good = world.Split({32, 16});
  const auto run = [&](auto change) {
    auto sequences = good;
    ReloadRequest request{.layer = 1, .kv_page_bytes = 4096};
    change(request, sequences);
    if (request.sequences.empty()) request.sequences = sequences;
    return machine.runtime->Run(request).status();
  };
  const auto field = [&](auto change) { return DetailOf(run(change)).field; };
  using Request = ReloadRequest&;
  using List = std::vector<ReloadSequence>&;
  EXPECT_TRUE(run([](Request, List) {}).ok());
  EXPECT_EQ(field([](Request r, List) { r.layer = 2; }), "layer");
  EXPECT_EQ(field([](Request r, List) { r.layer = -1; }), "layer");
  EXPECT_EQ(run([](Request r, List) { r.layer = 0; }).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(field([](Request r, List) { r.kv_page_bytes = 0; }), "kv_page_bytes");
  EXPECT_EQ(field([](Request r, List) { r.kv_page_bytes = SIZE_MAX; }), "kv_page_bytes");
  EXPECT_EQ(field([](Request, List s) { s.clear(); }), "sequences.size");
  EXPECT_EQ(field([](Request, List s) { s.resize(5000); }), "sequences.size");
  EXPECT_EQ(field([](Request, List s) { s[1].tokens = 0; }), "sequences[1].tokens");
  EXPECT_EQ(field([](Request, List s) { s[1].tokens = INT64_MAX; }), "sequences[1].tokens");
  EXPECT_EQ(field([](Request, List s) { s[0].split_tokens = 31; }), "sequences[0].split_tokens");
  EXPECT_EQ(field([](Request, List s) { s[0].split_tokens = 80; }), "sequences[0].split_tokens");
  EXPECT_EQ(field([](Request, List s) { s[0].split_tokens = -16; }), "sequences[0].split_tokens");
  EXPECT_EQ(field([](Request, List s) { s[0].first_position = -1; }), "sequences[0].first_position");
  EXPECT_EQ(field([](Request, List s) { s[0].first_position = INT64_MAX; }), "sequences[0].first_position");
  EXPECT_EQ(field([](Request, List s) { s[0].activations = {}; }), "sequences[0].activations.size");
  EXPECT_EQ(field([](Request, List s) { s[0].sources = {}; }), "sequences[0].sources.size");
  EXPECT_EQ(field([](Request, List s) { s[0].pages = s[0].pages.subspan(1); }), "sequences[0].pages.size");
  const uint8_t* const nothing[2] = {nullptr, nullptr};
  EXPECT_EQ(field([&](Request, List s) { s[0].activations = nothing; }), "sequences[0].activations[0]");
}

TEST(Runtime, HostileModelsAndWeightsAreNamed) {
  SteadyClock clock;
  MemoryLink link;
  const auto field = [&](auto change, CpuExecutorOptions options = {}) {
    ProjectionModel model = Model(64, 2, 16, {16, 10000});
    change(model);
    return DetailOf(MakeCpuExecutor(model, options, &link, nullptr, &clock).status()).field;
  };
  using M = ProjectionModel&;
  EXPECT_EQ(field([](M) {}), "");
  EXPECT_EQ(field([](M m) { m.layout.dtype = DType::kFloat32; }), "layout.dtype");
  EXPECT_EQ(field([](M m) { m.layout.kv_heads = 0; }), "layout.kv_heads");
  EXPECT_EQ(field([](M m) { m.layout.head_dim = 24; }), "layout.head_dim");
  EXPECT_EQ(field([](M m) { m.layout.page_tokens = 0; }), "layout.page_tokens");
  EXPECT_EQ(field([](M m) { m.layers = 0; }), "layers");
  EXPECT_EQ(field([](M m) { m.hidden = -3; }), "hidden");
  EXPECT_EQ(field([](M m) { m.hidden = 1 << 20, m.layout.kv_heads = 256, m.layout.head_dim = 256; }),
            "hidden * kv_heads * head_dim");
  EXPECT_EQ(field([](M m) { m.rope.rotary_dims = 18; }), "rope.rotary_dims");
  EXPECT_EQ(field([](M m) { m.rope.rotary_dims = 3; }), "rope.rotary_dims");
  EXPECT_EQ(field([](M m) { m.rope.theta = 0; }), "rope.theta");
  EXPECT_EQ(field([](M m) { m.rope.theta = std::nan(""); }), "rope.theta");
  EXPECT_EQ(field([](M) {}, {.chunk_rows = 15}), "chunk_rows");
  EXPECT_EQ(field([](M) {}, {.buffers = 1}), "buffers");
  EXPECT_EQ(field([](M m) { m.hidden = 1 << 20; }, {.chunk_rows = 1 << 16}), "chunk_rows");

  const ProjectionModel model = Model(64, 2, 16, {});
  World world(model, DType::kFloat16, true, {{16, 0}}, 4096, 7);
  Machine machine(model);
  const auto refused = [&](int layer, LayerWeights w) {
    return DetailOf(machine.executor->RegisterWeights(layer, w)).field;
  };
  EXPECT_EQ(refused(0, world.Weights()), "");
  EXPECT_EQ(refused(2, world.Weights()), "layer");
  LayerWeights w = world.Weights();
  w.k = w.k.subspan(1);
  EXPECT_EQ(refused(0, w), "weights.k.bytes");
  w = world.Weights();
  w.v = {};
  EXPECT_EQ(refused(0, w), "weights.v.bytes");
  w = world.Weights();
  w.v_bias = w.v_bias.subspan(2);
  EXPECT_EQ(refused(0, w), "weights.v_bias.bytes");
  StoreElement(world.w_v.data(), DType::kFloat16, 5, std::numeric_limits<float>::infinity());
  EXPECT_EQ(refused(0, world.Weights()), "weights.v[5]");
}

// Time that passes in sleeps alone.
class SleepingClock final : public Clock {
 public:
  int64_t NowNs() const override { return now_ns; }
  int64_t now_ns = 0;
};

TEST(PacedLink, TakesTheTimeOfItsRate) {
  SleepingClock clock;
  int sleeps = 0;
  PacedLink link(1e9, &clock, [&](int64_t until_ns) {
    ++sleeps;
    clock.now_ns = std::max(clock.now_ns, until_ns) + 1000;  // woken late
  });
  EXPECT_EQ(link.slice_bytes(), size_t{1} << 20);
  std::vector<uint8_t> from(100000, 7), to(100000);
  for (int i = 0; i < 50; ++i) link.Copy(from.data(), to.data(), from.size());
  EXPECT_EQ(from, to);
  EXPECT_EQ(sleeps, 50);
  EXPECT_EQ(clock.now_ns, 50 * 100'000 + 1000);  // being late does not add up
  clock.now_ns += 1'000'000'000;                 // idle: no credit is saved
  link.Copy(from.data(), to.data(), from.size());
  EXPECT_EQ(clock.now_ns, 50 * 100'000 + 1000 + 1'000'000'000 + 100'000 + 1000);
  const int64_t late_ns = clock.now_ns;
  link.Restart();
  link.Copy(from.data(), to.data(), from.size());
  EXPECT_EQ(clock.now_ns, late_ns + 100'000 + 1000);
  EXPECT_EQ(PacedLink(1, &clock).slice_bytes(), 4096);
}

}  // namespace
}  // namespace kvmanager::recompute
