#include <limits>
#include <memory>
#include <random>
#include <thread>

#include "kvmanager/base/status.h"
#include "transport/recompute/cpu_executor.h"
#include "transport/recompute/cuda_executor_testing.h"

namespace kvmanager::recompute {
namespace {

TEST_F(CudaExecutorTest, RecomputesWhatWasStoredAndCopiesTheRest) {
  uint64_t seed = 1;
  for (const ModelCase& c : ModelCases()) {
    for (const size_t shift : {0, 2}) {  // pages at odd places too
      SCOPED_TRACE(testing::Message() << "seed " << seed << ", shift " << shift);
      World world(c.model, c.model.layout.dtype, c.bias, {{150, 0}, {64, 100000}, {5, 7}}, 1000, seed++);
      DeviceWorld memory(&world, shift);
      Machine machine(c.model, device_.get());
      ASSERT_TRUE(machine.executor->RegisterWeights(1, world.Weights()).ok());
      ReloadAndVerify(world, memory, machine, {150, 64, 5});
      ReloadAndVerify(world, memory, machine, {80, 0, 5});
      ReloadAndVerify(world, memory, machine, {16, 48, 0});
      ReloadAndVerify(world, memory, machine, {0, 0, 0});
    }
  }
}

TEST_F(CudaExecutorTest, RandomSplitsAndBuffers) {
  std::mt19937_64 random(12);
  for (int round = 0; round < 12; ++round) {
    const ProjectionModel model = Model(64, 2, 16, {16, 10000}, round % 3 == 0 ? DType::kBFloat16 : DType::kFloat16);
    std::vector<std::pair<int64_t, int64_t>> shapes;
    std::vector<int64_t> splits;
    for (int i = 0, n = 1 + int(random() % 5); i < n; ++i) {
      const int64_t tokens = 1 + int64_t(random() % 200);
      shapes.push_back({tokens, int64_t(random() % 5000)});
      splits.push_back(std::min(int64_t(random() % (tokens / 16 + 2)) * 16, tokens));
    }
    World world(model, model.layout.dtype, false, shapes, 64 + 2 * (random() % 3000), round);
    DeviceWorld memory(&world);
    Machine machine(model, device_.get(), {.chunk_rows = 16 + int(random() % 100), .buffers = 2 + int(random() % 3)});
    ASSERT_TRUE(machine.executor->RegisterWeights(1, world.Weights()).ok());
    ReloadAndVerify(world, memory, machine, splits);
  }
}

// A deep sum, whole tiles, heads of the usual size; several chunks with all buffers in use.
TEST_F(CudaExecutorTest, DeepSumsOfManyHeads) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    ProjectionModel model = Model(2048, 3, 128, {128, 5e5}, dtype);
    model.layout.page_tokens = 64;
    World world(model, dtype, dtype == DType::kBFloat16, {{70, 3}, {64, 60000}}, model.layout.raw_bytes(), 40);
    DeviceWorld memory(&world);
    Machine machine(model, device_.get(), {.chunk_rows = 64});
    ASSERT_TRUE(machine.executor->RegisterWeights(1, world.Weights()).ok());
    ReloadAndVerify(world, memory, machine, {70, 64});
  }
}

// More pages than one launch's list has, and the same elements as the CPU but for the order of sums.
TEST_F(CudaExecutorTest, AgreesWithTheCpu) {
  const ProjectionModel model = Model(512, 4, 128, {128, 5e5});
  std::vector<std::pair<int64_t, int64_t>> shapes;
  std::vector<int64_t> splits;
  for (int i = 0; i < 1100; ++i) {
    shapes.push_back({1 + i % 3, i});
    splits.push_back(1 + i % 3);
  }
  shapes.push_back({900, 100});
  splits.push_back(900);
  World world(model, DType::kFloat16, true, shapes, 64, 9);
  std::vector<std::vector<std::vector<uint8_t>>> cpu_pages;
  {
    SteadyClock clock;
    MemoryLink link;
    auto executor = MakeCpuExecutor(model, {}, &link, nullptr, &clock);
    ASSERT_TRUE(executor.ok());
    ASSERT_TRUE((*executor)->RegisterWeights(1, world.Weights()).ok());
    const auto sequences = world.Split(splits);
    ASSERT_TRUE(ReloadRuntime(executor->get(), &clock, nullptr)
                    .Run({.layer = 1, .kv_page_bytes = 64, .sequences = sequences})
                    .ok());
    for (const World::Sequence& s : world.sequences) cpu_pages.push_back(s.pages);
  }
  DeviceWorld memory(&world);
  Machine machine(model, device_.get(), {.chunk_rows = 1500});
  ASSERT_TRUE(machine.executor->RegisterWeights(1, world.Weights()).ok());
  const auto sequences = world.Split(splits);
  ASSERT_TRUE(machine.runtime->Run({.layer = 1, .kv_page_bytes = 64, .sequences = sequences}).ok());
  memory.Download();
  int64_t differ = 0, all = 0;
  for (size_t i = 0; i < cpu_pages.size(); ++i) {
    for (size_t p = 0; p < cpu_pages[i].size(); ++p) {
      const size_t elements = cpu_pages[i][p].size() / 2;
      for (size_t e = 0; e < elements; ++e) {
        const float cpu = LoadElement(cpu_pages[i][p].data(), DType::kFloat16, e);
        const float gpu = LoadElement(world.sequences[i].pages[p].data(), DType::kFloat16, e);
        // A unit of float16 where sums lie on both sides of a rounding's edge, and the sums' own errors near zero.
        ASSERT_NEAR(gpu, cpu, std::abs(cpu) * 0x1p-10 + 0x1p-18) << i << ", page " << p << ", element " << e;
        differ += gpu != cpu;
        ++all;
      }
    }
  }
  EXPECT_LT(differ, all / 50);
}

TEST_F(CudaExecutorTest, ReportsAndProfiles) {
  const ProjectionModel model = Model(64, 2, 16, {});
  World world(model, DType::kFloat16, false, {{160, 0}}, 6000, 3);
  DeviceWorld memory(&world);
  Machine machine(model, device_.get());
  ASSERT_TRUE(machine.executor->RegisterWeights(1, world.Weights()).ok());
  auto all = world.Split({160});
  all[0].sources = world.sequences[0].stored_pointers;
  ASSERT_TRUE(machine.runtime->Measure({.layer = 1, .kv_page_bytes = 6000, .sequences = all}).ok());
  EXPECT_TRUE(RatesOf(machine.profile, {64, 32}).ok());
  const auto sequences = world.Split({64});
  const auto report = machine.runtime->Run({.layer = 1, .kv_page_bytes = 6000, .sequences = sequences});
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->flops, 4.0 * 64 * 64 * 32);
  EXPECT_GT(report->link_ns, 0);
  EXPECT_GT(report->compute_ns, 0);
  EXPECT_LT(report->link_ns, report->elapsed_ns);
  EXPECT_LT(report->compute_ns, report->elapsed_ns);
}

// Sets a flag before the n-th call of Wait.
class CancellingExecutor final : public ReloadExecutor {
 public:
  CancellingExecutor(ReloadExecutor* inner, int after) : inner_(inner), left_(after) {}
  const ProjectionModel& model() const override { return inner_->model(); }
  int buffers() const override { return inner_->buffers(); }
  int chunk_rows() const override { return inner_->chunk_rows(); }
  size_t kv_piece_bytes() const override { return 4096; }
  absl::Status RegisterWeights(int layer, const LayerWeights& w) override { return inner_->RegisterWeights(layer, w); }
  bool HasWeights(int layer) const override { return inner_->HasWeights(layer); }
  void Begin(const std::atomic<bool>* cancelled) override { inner_->Begin(cancelled); }
  void PostActivations(int buffer, absl::Span<const ActivationRows> rows) override {
    ++posts;
    inner_->PostActivations(buffer, rows);
  }
  void PostProjection(int buffer, int layer, absl::Span<const PageRows> pages) override {
    ++posts;
    inner_->PostProjection(buffer, layer, pages);
  }
  void PostKv(absl::Span<const CopyPiece> pieces) override {
    ++posts;
    inner_->PostKv(pieces);
  }
  Done Wait() override {
    if (left_-- == 0) cancelled = true;
    ++waits;
    Done done = inner_->Wait();
    if (cancelled) {
      EXPECT_EQ(done.status.code(), absl::StatusCode::kCancelled) << done.status;
    }
    return done;
  }
  void Abort() override { inner_->Abort(); }

  std::atomic<bool> cancelled{false};
  int posts = 0, waits = 0;

 private:
  ReloadExecutor* const inner_;
  int left_;
};

TEST_F(CudaExecutorTest, CancelEndsItAndTheNextOneIsWhole) {
  const ProjectionModel model = Model(64, 2, 16, {16, 10000});
  World world(model, DType::kFloat16, false, {{320, 0}}, 4096, 4);
  DeviceWorld memory(&world);
  Machine machine(model, device_.get(), {.chunk_rows = 32});
  ASSERT_TRUE(machine.executor->RegisterWeights(1, world.Weights()).ok());
  for (const int after : {0, 1, 2, 5, 9, 15}) {
    CancellingExecutor cancelling(machine.executor.get(), after);
    ReloadRuntime runtime(&cancelling, &machine.clock, nullptr);
    const auto sequences = world.Split({160});
    const auto report =
        runtime.Run({.layer = 1, .kv_page_bytes = 4096, .sequences = sequences, .cancelled = &cancelling.cancelled});
    EXPECT_EQ(report.status().code(), absl::StatusCode::kCancelled) << report.status();
    EXPECT_EQ(cancelling.posts, cancelling.waits);  // everything posted was answered
    ReloadAndVerify(world, memory, machine, {160});
  }
}

TEST_F(CudaExecutorTest, AnotherThreadCancels) {
  ProjectionModel model = Model(1024, 8, 128, {128, 5e5});
  model.layout.page_tokens = 64;
  World world(model, DType::kFloat16, false, {{4096, 0}}, model.layout.raw_bytes(), 4);
  DeviceWorld memory(&world);
  Machine machine(model, device_.get(), {.chunk_rows = 256});
  ASSERT_TRUE(machine.executor->RegisterWeights(1, world.Weights()).ok());
  const auto sequences = world.Split({2048});
  std::mt19937_64 random(8);
  int cancelled_in_the_middle = 0;
  for (int round = 0; round < 40; ++round) {
    std::atomic<bool> cancelled{false}, begun{false};
    std::thread other([&, spins = random() % 200000] {
      while (!begun) {
      }
      for (volatile uint64_t i = 0; i < spins; i = i + 1) {
      }
      cancelled = true;
    });
    begun = true;
    const auto report = machine.runtime->Run(
        {.layer = 1, .kv_page_bytes = model.layout.raw_bytes(), .sequences = sequences, .cancelled = &cancelled});
    other.join();
    EXPECT_TRUE(report.ok() || report.status().code() == absl::StatusCode::kCancelled) << report.status();
    cancelled_in_the_middle += !report.ok();
  }
  EXPECT_GT(cancelled_in_the_middle, 0);
}

TEST_F(CudaExecutorTest, WhatIsNotFiniteIsNamed) {
  const auto failure = [&](const ProjectionModel& model, World& world) {
    DeviceWorld memory(&world);
    Machine machine(model, device_.get());
    EXPECT_TRUE(machine.executor->RegisterWeights(1, world.Weights()).ok());
    const auto sequences = world.Split({64});
    const auto report = machine.runtime->Run({.layer = 1, .kv_page_bytes = 4096, .sequences = sequences});
    EXPECT_EQ(report.status().code(), absl::StatusCode::kDataLoss) << report.status();
    return std::string(report.status().message());
  };
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const ProjectionModel model = Model(64, 2, 16, {16, 10000}, dtype);
    for (const float damage : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                               -std::numeric_limits<float>::infinity()}) {
      World world(model, dtype, false, {{64, 1000}}, 4096, 5);
      StoreElement(world.sequences[0].activations[2].data(), dtype, 3 * 64 + 9, damage);
      EXPECT_NE(failure(model, world).find("layer 1, head "), std::string::npos);
      EXPECT_NE(failure(model, world).find("position 1035"), std::string::npos) << failure(model, world);
    }
  }
  // Finite activations whose V of one head is too large for float16, and not K.
  const ProjectionModel model = Model(64, 2, 16, {});
  World world(model, DType::kFloat16, true, {{64, 1000}}, 4096, 6);
  StoreElement(world.b_v.data(), DType::kFloat16, 16 + 5, 65504);
  for (int i = 0; i < 64; ++i) {
    StoreElement(world.w_v.data(), DType::kFloat16, (16 + 5) * 64 + i, i == 7 ? 1 : 0);
    for (auto& page : world.sequences[0].activations) {
      for (int t = 0; t < 16; ++t) StoreElement(page.data(), DType::kFloat16, t * 64 + 7, -1);
    }
  }
  StoreElement(world.sequences[0].activations[1].data(), DType::kFloat16, 2 * 64 + 7, 1000);
  EXPECT_NE(failure(model, world).find("V of layer 1, head 1, position 1018 "), std::string::npos);
}

TEST_F(CudaExecutorTest, AFailureLeavesTheNextReloadWhole) {
  const ProjectionModel model = Model(64, 2, 16, {16, 10000});
  World world(model, DType::kFloat16, false, {{64, 1000}, {200, 5}}, 4096, 5);
  DeviceWorld memory(&world);
  Machine machine(model, device_.get());
  ASSERT_TRUE(machine.executor->RegisterWeights(1, world.Weights()).ok());
  const std::vector<uint8_t> good = world.sequences[0].activations[2];
  StoreElement(world.sequences[0].activations[2].data(), DType::kFloat16, 9, std::numeric_limits<float>::quiet_NaN());
  memory.Upload();
  const auto sequences = world.Split({64, 200});
  EXPECT_EQ(machine.runtime->Run({.layer = 1, .kv_page_bytes = 4096, .sequences = sequences}).status().code(),
            absl::StatusCode::kDataLoss);
  world.sequences[0].activations[2] = good;
  ReloadAndVerify(world, memory, machine, {64, 200});
}

TEST_F(CudaExecutorTest, HostileOptionsAndWeightsAreNamed) {
  const auto field = [&](auto change, CudaExecutorOptions options = {}) {
    ProjectionModel model = Model(64, 2, 16, {16, 10000});
    change(model);
    return DetailOf(MakeCudaExecutor(model, options, device_.get()).status()).field;
  };
  using M = ProjectionModel&;
  EXPECT_EQ(field([](M) {}), "");
  EXPECT_EQ(field([](M m) { m.layout.dtype = DType::kFloat32; }), "layout.dtype");
  EXPECT_EQ(field([](M m) { m.rope.rotary_dims = 18; }), "rope.rotary_dims");
  EXPECT_EQ(field([](M) {}, {.chunk_rows = 15}), "chunk_rows");
  EXPECT_EQ(field([](M) {}, {.buffers = 1}), "buffers");
  EXPECT_EQ(field([](M) {}, {.buffers = 9}), "buffers");
  EXPECT_EQ(field([](M m) { m.hidden = 1 << 20; }, {.chunk_rows = 1 << 16}), "chunk_rows");

  const ProjectionModel model = Model(64, 2, 16, {});
  World world(model, DType::kFloat16, true, {{16, 0}}, 4096, 7);
  Machine machine(model, device_.get());
  const auto refused = [&](int layer, LayerWeights w) {
    return DetailOf(machine.executor->RegisterWeights(layer, w)).field;
  };
  EXPECT_FALSE(machine.executor->HasWeights(0));
  EXPECT_EQ(refused(0, world.Weights()), "");
  EXPECT_TRUE(machine.executor->HasWeights(0));
  EXPECT_EQ(refused(2, world.Weights()), "layer");
  LayerWeights w = world.Weights();
  w.dtype = DType::kBFloat16;
  EXPECT_EQ(refused(0, w), "weights.dtype");
  w = world.Weights();
  w.k = w.k.subspan(1);
  EXPECT_EQ(refused(0, w), "weights.k.bytes");
  StoreElement(world.w_v.data(), DType::kFloat16, 5, std::numeric_limits<float>::infinity());
  EXPECT_EQ(refused(0, world.Weights()), "weights.v[5]");
}

}  // namespace
}  // namespace kvmanager::recompute
