// Where projections are multiplied, what that is charged to, and what comes of it. GPUs are ones that multiply on the
// CPU.
#include "kvmanager/handoff/recomputer.h"

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kvmanager/base/event_loop.h"
#include "kvmanager/base/half.h"
#include "transport/recompute/cpu_executor.h"
#include "transport/recompute/recompute_testing.h"

namespace kvmanager {
namespace {

using recompute::ModelCase;
using recompute::ProjectionModel;
using recompute::World;

constexpr uint64_t kMiB = 1 << 20;

class FakeGpu final : public RecomputeDevice {
 public:
  FakeGpu(int ordinal, const Clock* clock) : ordinal_(ordinal), clock_(clock) {}
  int ordinal() const override { return ordinal_; }
  bool reaches_pool() const override { return pinned; }
  int chunk_rows() const override { return 64; }
  uint64_t ExecutorBytes(const ProjectionModel&) const override { return 10000; }
  uint64_t LayerBytes(const ProjectionModel&) const override { return 3000; }
  bool CanMake(const ProjectionModel&) const override { return idle; }
  absl::StatusOr<std::unique_ptr<recompute::ReloadExecutor>> MakeExecutor(const ProjectionModel& model) override {
    EXPECT_TRUE(idle);
    KV_RETURN_IF_ERROR(broken);
    ++executors;
    return MakeCpuExecutor(model, {.chunk_rows = 64}, &link_, nullptr, clock_);
  }
  absl::StatusOr<absl::Span<uint8_t>> Scratch(size_t bytes) override {
    if (scratch_bytes() < bytes) scratch_.emplace_back(bytes);
    return absl::MakeSpan(scratch_.back());
  }
  size_t scratch_bytes() const override { return scratch_.empty() ? 0 : scratch_.back().size(); }

  std::atomic<bool> pinned{true};
  bool idle = true;
  absl::Status broken;
  int executors = 0;

 private:
  const int ordinal_;
  const Clock* const clock_;
  recompute::MemoryLink link_;
  std::vector<std::vector<uint8_t>> scratch_;
};

class Owner final : public RecomputeOwner {
 public:
  void OnRecomputed(absl::StatusOr<std::vector<ArrivedPage>> pages) override { answers.push_back(std::move(pages)); }
  std::vector<absl::StatusOr<std::vector<ArrivedPage>>> answers;
};

class RecomputerTest : public ::testing::Test {
 protected:
  void Start(std::vector<int> gpus, uint64_t host_bytes = 64 * kMiB, uint64_t gpu_bytes = kMiB) {
    Recomputer::Gpus devices;
    for (const int ordinal : gpus) {
      gpus_.push_back(std::make_unique<FakeGpu>(ordinal, &clock_));
      devices.devices.push_back(gpus_.back().get());
    }
    devices.bytes_max_each = gpu_bytes;
    recomputer_ = std::make_unique<Recomputer>(&workers_, &queue_, &clock_, &metrics_, host_bytes, devices);
  }
  void TearDown() override {
    if (recomputer_ != nullptr) recomputer_->Stop();
    while (queue_.RunSome()) {
    }
  }
  void RunUntil(const std::function<bool()>& over) { EventLoop(&queue_, 0).Run(over); }

  static CacheDigest Digest(uint8_t name) {
    CacheDigest digest;
    digest.bytes[0] = name;
    return digest;
  }
  absl::StatusOr<std::shared_ptr<ProjectionSet>> Open(uint8_t name, int device) {
    return recomputer_->Open(Digest(name), model_, device);
  }
  Recomputer::SetInfo InfoOf(uint8_t name) const {
    for (const auto& info : recomputer_->Sets()) {
      if (info.digest == Digest(name)) return info;
    }
    return {};
  }
  uint64_t GpuBytes(size_t i) const { return recomputer_->GpuInfos().at(i).bytes; }

  // The proof is the world's first sequence, as the engine would have projected it.
  LayerRegistration Registration(const World& world, int layer) const {
    const World::Sequence& proof = world.sequences[0];
    LayerRegistration r;
    r.layer = layer;
    r.weights = world.Weights();
    r.position = proof.first_position;
    r.tokens = static_cast<int>(proof.tokens);
    r.x = proof.activations[0];
    auto sides = std::make_shared<std::vector<std::vector<uint8_t>>>(2);
    for (int side = 0; side < 2; ++side) {
      auto& out = (*sides)[side];
      out.resize(size_t(proof.tokens) * model_.width() * 2);
      size_t at = 0;
      for (int64_t t = 0; t < proof.tokens; ++t) {
        for (int head = 0; head < model_.layout.kv_heads; ++head) {
          for (const double value : world.Reference(proof, side, head, t)) {
            StoreElement(out.data(), model_.layout.dtype, at++, float(value));
          }
        }
      }
    }
    r.k = (*sides)[0];
    r.v = (*sides)[1];
    r.keep.push_back(sides);
    return r;
  }
  absl::Status Register(const std::shared_ptr<ProjectionSet>& set, LayerRegistration registration) {
    absl::optional<absl::Status> status;
    recomputer_->Register(set, std::move(registration), [&](absl::Status answer) { status = std::move(answer); });
    RunUntil([&] { return status.has_value(); });
    return *status;
  }
  static World MakeWorld(const ProjectionModel& model, DType weights, int64_t tokens = 16) {
    return World(model, weights, false, {{16, 5000}, {tokens, 0}}, 4096, 3);
  }

  const ProjectionModel model_ = recompute::Model(64, 2, 32, {32, 10000});
  const SteadyClock clock_;
  Metrics registry_;
  RecomputeMetrics metrics_{&registry_};
  WorkerPool workers_{1};
  std::vector<std::unique_ptr<FakeGpu>> gpus_;
  std::unique_ptr<Recomputer> recomputer_;
  MessageQueue queue_;
};

TEST_F(RecomputerTest, TheCachesGpuElseTheLeastUsedElseTheCpu) {
  Start({0, 3});
  auto on_three = Open(1, 3);
  ASSERT_TRUE(on_three.ok()) << on_three.status();
  EXPECT_EQ(InfoOf(1).device, 3);
  EXPECT_EQ(InfoOf(1).chunk_tokens, 64);
  EXPECT_EQ(GpuBytes(0), 0u);
  EXPECT_EQ(GpuBytes(1), 10000u);
  EXPECT_EQ(recomputer_->bytes(), 0u);
  auto of_host = Open(2, CacheConfig::kHost);
  ASSERT_TRUE(of_host.ok());
  EXPECT_EQ(InfoOf(2).device, 0);
  // Who opens it again shares it, wherever that cache lies.
  auto shared = Open(2, 3);
  ASSERT_TRUE(shared.ok());
  EXPECT_EQ(shared->get(), of_host->get());
  EXPECT_EQ(GpuBytes(1), 10000u);
  of_host->reset();
  shared->reset();
  EXPECT_EQ(GpuBytes(0), 0u);
}

TEST_F(RecomputerTest, WithoutAGpuTheCpuMultiplies) {
  Start({});
  auto set = Open(1, CacheConfig::kHost);
  ASSERT_TRUE(set.ok());
  EXPECT_EQ(InfoOf(1).device, CacheConfig::kHost);
  EXPECT_EQ(InfoOf(1).chunk_tokens, Recomputer::kChunkRows);
  EXPECT_GT(recomputer_->bytes(), 0u);
}

TEST_F(RecomputerTest, AGpusWeightsAreChargedToIt) {
  Start({0});
  const World world = MakeWorld(model_, DType::kFloat16);
  auto set = Open(1, 0);
  ASSERT_TRUE(set.ok());
  EXPECT_EQ(gpus_[0]->executors, 1);
  LayerRegistration first = Registration(world, 0);
  first.copied_bytes = 12345;
  ASSERT_EQ(Register(*set, std::move(first)), absl::OkStatus());
  EXPECT_EQ(gpus_[0]->executors, 1);
  EXPECT_EQ(GpuBytes(0), 13000u);
  // Copies are gone; memory for proofs stays, and serves the next layer and set.
  const uint64_t scratch = recomputer_->bytes();
  EXPECT_EQ(scratch, gpus_[0]->scratch_bytes());
  EXPECT_GE(scratch, model_.activation_page_bytes() + 4 * model_.layout.raw_bytes());
  ASSERT_EQ(Register(*set, Registration(world, 1)), absl::OkStatus());
  EXPECT_EQ(GpuBytes(0), 16000u);
  EXPECT_EQ(InfoOf(1).layers_ready, 2);
  EXPECT_GT(InfoOf(1).flops.per_second, 0);
  EXPECT_EQ(registry_.Text().find("kvmanager_recompute_device_bytes{device=\"0\"} 16000") != std::string::npos, true);
  set->reset();
  EXPECT_EQ(GpuBytes(0), 0u);
  EXPECT_EQ(recomputer_->bytes(), scratch);
  auto next = Open(2, 0);
  ASSERT_TRUE(next.ok());
  ASSERT_EQ(Register(*next, Registration(world, 0)), absl::OkStatus());
  EXPECT_EQ(recomputer_->bytes(), scratch);
}

TEST_F(RecomputerTest, WhatIsFullIsNamed) {
  const auto detail = [](const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    return DetailOf(status);
  };
  Start({7}, 64 * kMiB, 15000);
  const World world = MakeWorld(model_, DType::kFloat16);
  auto set = Open(1, 7);
  ASSERT_TRUE(set.ok());
  const ErrorDetail buffers = detail(Open(2, 7).status());
  EXPECT_EQ(buffers.field, "--recompute-device-bytes");
  EXPECT_EQ(buffers.value, "10000 used, and 10000 wanted for buffers on GPU 7");
  EXPECT_EQ(buffers.bound, "at most 15000");
  ASSERT_EQ(Register(*set, Registration(world, 0)), absl::OkStatus());
  const ErrorDetail layer = detail(Register(*set, Registration(world, 1)));
  EXPECT_EQ(layer.field, "--recompute-device-bytes");
  EXPECT_EQ(layer.value, "13000 used, and 3000 wanted for layer 1 on GPU 7");
  // Copies wait in host memory.
  LayerRegistration copied = Registration(world, 0);
  copied.copied_bytes = 64 * kMiB;
  const ErrorDetail waiting = detail(Register(*set, std::move(copied)));
  EXPECT_EQ(waiting.field, "--recompute-bytes");
  EXPECT_EQ(GpuBytes(0), 13000u);
}

TEST_F(RecomputerTest, MemoryForProofsIsTheHosts) {
  Start({0}, 100);
  auto set = Open(1, 0);
  ASSERT_TRUE(set.ok());
  const absl::Status refused = Register(*set, Registration(MakeWorld(model_, DType::kFloat16), 0));
  EXPECT_EQ(DetailOf(refused).field, "--recompute-bytes") << refused;
  EXPECT_EQ(InfoOf(1).layers_ready, 0);
  EXPECT_EQ(GpuBytes(0), 10000u);
}

// With room for one layer and no byte more.
TEST_F(RecomputerTest, ALayerThatIsRegisteredIsChargedOnce) {
  const World world = MakeWorld(model_, DType::kFloat16);
  uint64_t all = 0;
  {
    Start({});
    auto set = Open(1, CacheConfig::kHost);
    ASSERT_TRUE(set.ok());
    ASSERT_EQ(Register(*set, Registration(world, 0)), absl::OkStatus());
    all = recomputer_->bytes();
    recomputer_->Stop();
  }
  Start({}, all);
  auto set = Open(1, CacheConfig::kHost);
  ASSERT_TRUE(set.ok());
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(Register(*set, Registration(world, 0)), absl::OkStatus());
    EXPECT_EQ(recomputer_->bytes(), all);
  }
  // As who registers anew after a failure does.
  recomputer_->NoteFailure(**set, absl::DataLossError("not finite"));
  EXPECT_EQ(InfoOf(1).failed, "not finite");
  ASSERT_EQ(Register(*set, Registration(world, 0)), absl::OkStatus());
  EXPECT_EQ(InfoOf(1).failed, "");
  EXPECT_EQ(DetailOf(Register(*set, Registration(world, 1))).field, "--recompute-bytes");
  // What waits to be copied is charged all the same.
  LayerRegistration copied = Registration(world, 0);
  copied.copied_bytes = 1;
  EXPECT_EQ(DetailOf(Register(*set, std::move(copied))).field, "--recompute-bytes");
}

TEST_F(RecomputerTest, WeightsOfAnotherTypeGoToTheCpu) {
  Start({0});
  auto set = Open(1, 0);
  ASSERT_TRUE(set.ok());
  const World world = MakeWorld(model_, DType::kFloat32);
  ASSERT_EQ(Register(*set, Registration(world, 0)), absl::OkStatus());
  EXPECT_EQ(InfoOf(1).device, CacheConfig::kHost);
  EXPECT_EQ(GpuBytes(0), 0u);
  // It stays there.
  ASSERT_EQ(Register(*set, Registration(MakeWorld(model_, DType::kFloat16), 1)), absl::OkStatus());
  EXPECT_EQ(InfoOf(1).device, CacheConfig::kHost);
  EXPECT_EQ(InfoOf(1).layers_ready, 2);
}

// Loading kernels would wait for clients' streams, on the loop's thread.
TEST_F(RecomputerTest, ABusyGpuIsAskedAgain) {
  Start({0});
  gpus_[0]->idle = false;
  const absl::Status busy = Open(1, 0).status();
  EXPECT_EQ(busy.code(), absl::StatusCode::kUnavailable) << busy;
  EXPECT_EQ(DetailOf(busy).field, "GPU 0");
  EXPECT_EQ(GpuBytes(0), 0u);
  gpus_[0]->idle = true;
  gpus_[0]->broken = absl::ResourceExhaustedError("no memory");
  EXPECT_EQ(Open(1, 0).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(GpuBytes(0), 0u);
  gpus_[0]->broken = absl::OkStatus();
  auto set = Open(1, 0);
  ASSERT_TRUE(set.ok());
  EXPECT_EQ(Register(*set, Registration(MakeWorld(model_, DType::kFloat16), 0)), absl::OkStatus());
}

TEST_F(RecomputerTest, NothingIsPlannedBeforeThePoolIsPinned) {
  Start({0});
  gpus_[0]->pinned = false;
  auto set = Open(1, 0);
  ASSERT_TRUE(set.ok());
  ASSERT_EQ(Register(*set, Registration(MakeWorld(model_, DType::kFloat16), 0)), absl::OkStatus());
  for (int i = 0; i < 3; ++i) recomputer_->RecordLink("10.0.0.1", 1 << 20, 100'000'000'000);
  const auto choose = [&] {
    return recomputer_->Choose(set->get(), "10.0.0.1", 0, model_.layout.raw_bytes(), 2, 10, 10);
  };
  EXPECT_EQ(choose(), 0u);
  EXPECT_EQ(metrics_.not_pinned.Value(), 1);
  gpus_[0]->pinned = true;
  EXPECT_GT(choose(), 0u);
}

TEST_F(RecomputerTest, PagesAreRecomputedWhereTheSetIs) {
  for (const bool gpu : {false, true}) {
    Start(gpu ? std::vector<int>{0} : std::vector<int>{});
    auto set = Open(1, CacheConfig::kHost);
    ASSERT_TRUE(set.ok());
    World world = MakeWorld(model_, DType::kFloat16, 16 * 9);
    ASSERT_EQ(Register(*set, Registration(world, 0)), absl::OkStatus());
    World::Sequence& s = world.sequences[1];
    std::vector<RecomputePage> pages;
    for (uint32_t p = 0; p < 9; ++p) {
      pages.push_back({p, 0, 16u * p, s.activation_pointers[p], s.page_pointers[p]});
    }
    auto owner = std::make_shared<Owner>();
    recomputer_->Recompute(*set, owner, pages);
    RunUntil([&] { return !owner->answers.empty(); });
    ASSERT_TRUE(owner->answers[0].ok()) << owner->answers[0].status();
    EXPECT_EQ(owner->answers[0]->size(), 9u);
    world.sequences[0].pages = world.sequences[0].stored;  // nobody reloads the proof's
    world.Verify({0, 16 * 9});
    EXPECT_EQ(metrics_.recomputed_tokens.Value(), gpu ? 2 * 16 * 9 : 16 * 9);
    // What is not finite is said with its place; who cancelled is told so.
    StoreElement(s.activations[4].data(), DType::kFloat16, 70, std::numeric_limits<float>::infinity());
    recomputer_->Recompute(*set, owner, pages);
    RunUntil([&] { return owner->answers.size() == 2; });
    EXPECT_EQ(owner->answers[1].status().code(), absl::StatusCode::kDataLoss);
    EXPECT_NE(owner->answers[1].status().message().find("position 65"), std::string::npos)
        << owner->answers[1].status();
    owner->cancelled = true;
    recomputer_->Recompute(*set, owner, pages);
    RunUntil([&] { return owner->answers.size() == 3; });
    EXPECT_EQ(owner->answers[2].status().code(), absl::StatusCode::kCancelled);
    recomputer_->Stop();
    set->reset();
    recomputer_.reset();
  }
}

}  // namespace
}  // namespace kvmanager
