// Where projections are multiplied, what and whom that is charged to, whose turn it is, and what comes of it. GPUs are
// ones that multiply on the CPU.
#include "kvmanager/handoff/recomputer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
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
    if (const auto stop = std::exchange(stop_, nullptr)) {
      stop->reached.set_value();
      stop->go_on.get_future().wait();
    }
    if (scratch_bytes() < bytes) scratch_.emplace_back(bytes);
    return absl::MakeSpan(scratch_.back());
  }
  size_t scratch_bytes() const override { return scratch_.empty() ? 0 : scratch_.back().size(); }

  /// The recomputer's thread stands at the next proof. Before it is asked for one.
  struct Stop {
    std::promise<void> reached, go_on;
  };
  void StopAt(Stop* stop) { stop_ = stop; }

  std::atomic<bool> pinned{true};
  bool idle = true;
  absl::Status broken;
  int executors = 0;

 private:
  const int ordinal_;
  const Clock* const clock_;
  recompute::MemoryLink link_;
  Stop* stop_ = nullptr;
  std::vector<std::vector<uint8_t>> scratch_;
};

class Owner final : public RecomputeOwner {
 public:
  /// order: gets the name at each answer.
  explicit Owner(std::string name = "", std::vector<std::string>* order = nullptr)
      : name_(std::move(name)), order_(order) {}
  void OnRecomputed(absl::StatusOr<std::vector<ArrivedPage>> pages) override {
    answers.push_back(std::move(pages));
    if (order_ != nullptr) order_->push_back(name_);
  }
  std::vector<absl::StatusOr<std::vector<ArrivedPage>>> answers;

 private:
  const std::string name_;
  std::vector<std::string>* const order_;
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
  absl::StatusOr<std::shared_ptr<ProjectionSet>> Open(uint8_t name, int device, absl::string_view payer = "a") {
    return recomputer_->Open(Digest(name), payer, model_, device);
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
  /// Asks without waiting; `order` gets the name when it is answered.
  void Ask(const std::shared_ptr<ProjectionSet>& set, const LayerRegistration& registration, std::string name,
           std::vector<std::string>* order) {
    recomputer_->Register(set, registration, [name = std::move(name), order](const absl::Status& answer) {
      EXPECT_EQ(answer, absl::OkStatus());
      order->push_back(name);
    });
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
  Start({7}, 64 * kMiB, 18000);
  const World world = MakeWorld(model_, DType::kFloat16);
  auto set = Open(1, 7);
  ASSERT_TRUE(set.ok());
  const ErrorDetail own = detail(Open(2, 7).status());
  EXPECT_EQ(own.field, "--recompute-device-bytes of this tenant");
  EXPECT_EQ(own.value, "10000 used, and 10000 wanted for buffers on GPU 7");
  EXPECT_EQ(own.bound, "at most 13500, three quarters of --recompute-device-bytes; so others find room");
  const ErrorDetail buffers = detail(Open(2, 7, "b").status());
  EXPECT_EQ(buffers.field, "--recompute-device-bytes");
  EXPECT_EQ(buffers.value, "10000 used, and 10000 wanted for buffers on GPU 7");
  EXPECT_EQ(buffers.bound, "at most 18000");
  ASSERT_EQ(Register(*set, Registration(world, 0)), absl::OkStatus());
  const ErrorDetail layer = detail(Register(*set, Registration(world, 1)));
  EXPECT_EQ(layer.field, "--recompute-device-bytes of this tenant");
  EXPECT_EQ(layer.value, "13000 used, and 3000 wanted for layer 1 on GPU 7");
  // Copies wait in host memory.
  LayerRegistration copied = Registration(world, 0);
  copied.copied_bytes = 64 * kMiB;
  const ErrorDetail waiting = detail(Register(*set, std::move(copied)));
  EXPECT_EQ(waiting.field, "--recompute-bytes of this tenant");
  EXPECT_EQ(GpuBytes(0), 13000u);
}

// Of the host's memory, and of a GPU's.
TEST_F(RecomputerTest, WhoHasThreeQuartersLeavesAnotherTheRest) {
  const World world = MakeWorld(model_, DType::kFloat16);
  for (const bool gpu : {false, true}) {
    const absl::string_view flag = gpu ? "--recompute-device-bytes" : "--recompute-bytes";
    Start(gpu ? std::vector<int>{0} : std::vector<int>{}, gpu ? 64 * kMiB : kMiB, 60000);
    const int device = gpu ? 0 : CacheConfig::kHost;
    const auto used = [&] { return gpu ? GpuBytes(0) : recomputer_->bytes(); };
    const auto most = [&] {
      return gpu ? recomputer_->GpuInfos().at(0).most_of_payer : recomputer_->most_bytes_of_payer();
    };
    std::vector<std::shared_ptr<ProjectionSet>> sets;
    absl::Status refused;
    for (uint8_t name = 1; refused.ok(); ++name) {
      auto set = Open(name, device, "a");
      refused = set.status();
      for (int layer = 0; refused.ok() && layer < model_.layers; ++layer) {
        refused = Register(*set, Registration(world, layer));
      }
      if (set.ok()) sets.push_back(*std::move(set));
    }
    EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
    EXPECT_EQ(DetailOf(refused).field, absl::StrCat(flag, " of this tenant"));
    const uint64_t of_a = used(), max = gpu ? 60000 : kMiB;
    EXPECT_EQ(most(), of_a);
    EXPECT_LE(of_a, max / 4 * 3);
    EXPECT_GT(of_a, max / 2);
    // Each of the other's is one more's.
    auto of_b = Open(200, device, "b");
    ASSERT_TRUE(of_b.ok()) << of_b.status();
    EXPECT_EQ(Register(*of_b, Registration(world, 0)), absl::OkStatus());
    EXPECT_GT(used(), of_a);
    EXPECT_EQ(most(), of_a);
    of_b->reset();
    EXPECT_EQ(used(), of_a);
    sets.clear();
    EXPECT_EQ(used(), 0u);
    EXPECT_EQ(most(), 0u);
    recomputer_->Stop();
    recomputer_.reset();
    gpus_.clear();
  }
}

TEST_F(RecomputerTest, RegistrationsAndPagesGoInTurnByPayer) {
  Start({0});
  World world = MakeWorld(model_, DType::kFloat16, 16 * 9);
  auto a = Open(1, 0, "a"), b = Open(2, 0, "b");
  ASSERT_TRUE(a.ok() && b.ok());
  ASSERT_EQ(Register(*a, Registration(world, 0)), absl::OkStatus());
  ASSERT_EQ(Register(*b, Registration(world, 0)), absl::OkStatus());
  const LayerRegistration registration = Registration(world, 0);
  std::vector<std::string> order;
  FakeGpu::Stop stop;
  gpus_[0]->StopAt(&stop);
  Ask(*a, registration, "a0", &order);
  stop.reached.get_future().wait();
  for (int i = 1; i <= 100; ++i) Ask(*a, registration, absl::StrCat("a", i), &order);
  Ask(*b, registration, "b1", &order);
  Ask(*b, registration, "b2", &order);
  // Of two hand-offs of A's, and one of B's.
  World::Sequence& s = world.sequences[1];
  const auto page = [&](uint32_t p) {
    return RecomputePage{p, 0, 16u * p, s.activation_pointers[p], s.page_pointers[p]};
  };
  const auto first = std::make_shared<Owner>("pages a1", &order), second = std::make_shared<Owner>("pages a2", &order),
             other = std::make_shared<Owner>("pages b", &order);
  recomputer_->Recompute(*a, first, {page(0), page(1)});
  recomputer_->Recompute(*a, second, {page(2)});
  recomputer_->Recompute(*a, first, {page(3)});
  recomputer_->Recompute(*b, other, {page(4)});
  stop.go_on.set_value();
  RunUntil([&] { return order.size() == 106; });
  // Pages before registrations, in turn; those of one hand-off and layer together.
  const std::vector<std::string> begin(order.begin(), order.begin() + 9);
  EXPECT_EQ(begin, (std::vector<std::string>{"a0", "pages a1", "pages b", "pages a2", "b1", "a1", "b2", "a2", "a3"}));
  ASSERT_TRUE(first->answers[0].ok());
  EXPECT_EQ(first->answers[0]->size(), 3u);
  for (int i = 3; i <= 100; ++i) EXPECT_EQ(order[5 + i], absl::StrCat("a", i));
}

TEST_F(RecomputerTest, WhatWaitsIsDroppedAtTheEnd) {
  Start({0});
  World world = MakeWorld(model_, DType::kFloat16, 16 * 9);
  auto set = Open(1, 0);
  ASSERT_TRUE(set.ok());
  ASSERT_EQ(Register(*set, Registration(world, 0)), absl::OkStatus());
  const uint64_t bytes = recomputer_->bytes(), gpu_bytes = GpuBytes(0);
  FakeGpu::Stop stop;
  gpus_[0]->StopAt(&stop);
  std::vector<std::string> order;
  LayerRegistration copied = Registration(world, 0);
  copied.copied_bytes = 1000;
  Ask(*set, copied, "first", &order);
  stop.reached.get_future().wait();
  Ask(*set, copied, "second", &order);
  Ask(*set, Registration(world, 1), "third", &order);
  EXPECT_EQ(recomputer_->bytes(), bytes + 2000);
  EXPECT_EQ(GpuBytes(0), gpu_bytes + 3000);
  World::Sequence& s = world.sequences[1];
  auto owner = std::make_shared<Owner>();
  recomputer_->Recompute(*set, owner, {{0, 0, 0, s.activation_pointers[0], s.page_pointers[0]}});
  std::thread ending([&] { recomputer_->Stop(); });
  while (!owner->cancelled) std::this_thread::yield();
  stop.go_on.set_value();
  ending.join();
  while (queue_.RunSome()) {
  }
  EXPECT_EQ(order, std::vector<std::string>{"first"});
  EXPECT_TRUE(owner->answers.empty());
  EXPECT_EQ(recomputer_->bytes(), bytes);
  EXPECT_EQ(GpuBytes(0), gpu_bytes);
}

TEST_F(RecomputerTest, MemoryForProofsIsTheHosts) {
  Start({0}, 100);
  auto set = Open(1, 0);
  ASSERT_TRUE(set.ok());
  const absl::Status refused = Register(*set, Registration(MakeWorld(model_, DType::kFloat16), 0));
  EXPECT_EQ(DetailOf(refused).field, "--recompute-bytes of this tenant") << refused;
  EXPECT_EQ(InfoOf(1).layers_ready, 0);
  EXPECT_EQ(GpuBytes(0), 10000u);
}

// With room for one layer of one tenant, and no byte more.
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
  const uint64_t max = (all + 2) / 3 * 4;
  Start({}, max);
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
  EXPECT_EQ(DetailOf(Register(*set, Registration(world, 1))).field, "--recompute-bytes of this tenant");
  // What waits to be copied is charged all the same.
  LayerRegistration copied = Registration(world, 0);
  copied.copied_bytes = max / 4 * 3 - all + 1;
  EXPECT_EQ(DetailOf(Register(*set, std::move(copied))).field, "--recompute-bytes of this tenant");
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
