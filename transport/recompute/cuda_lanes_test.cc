// Executors as a daemon has them: several on one GPU, beside streams that wait for clients, with pages in host memory.
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>

#include "transport/recompute/cuda_executor_testing.h"

namespace kvmanager::recompute {
namespace {

using CudaLanesTest = CudaExecutorTest;

// As a daemon's whose pages are received in host memory.
TEST_F(CudaLanesTest, PagesMayLieInPinnedMemory) {
  uint64_t seed = 50;
  for (const ModelCase& c : ModelCases()) {
    for (const size_t shift : {0, 2}) {
      World world(c.model, c.model.layout.dtype, c.bias, {{150, 0}, {64, 100000}, {5, 7}}, 1000, seed++);
      DeviceWorld memory(&world, shift, /*pages_on_device=*/false);
      for (const bool staged : {false, true}) {
        Machine machine(c.model, device_.get(), {.chunk_rows = 48, .pages_in_host_memory = staged});
        ASSERT_TRUE(machine.executor->RegisterWeights(1, world.Weights()).ok());
        ReloadAndVerify(world, memory, machine, {150, 32, 5});
      }
    }
  }
}

TEST_F(CudaLanesTest, ExecutorsShareLanes) {
  const auto lanes = MakeCudaLanes(device_.get());
  ASSERT_TRUE(lanes.ok()) << lanes.status();
  const ProjectionModel first = Model(256, 4, 64, {64, 10000}), second = Model(96, 3, 48, {24, 10000});
  World world(first, DType::kFloat16, false, {{150, 3}}, 1000, 60),
      other(second, DType::kFloat16, true, {{90, 0}}, 1000, 61);
  DeviceWorld memory(&world), other_memory(&other);
  Machine machine(first, *lanes);
  ASSERT_TRUE(machine.executor->RegisterWeights(1, world.Weights()).ok());
  for (int i = 0; i < 5; ++i) {
    auto beside = std::make_unique<Machine>(second, *lanes);
    ASSERT_TRUE(beside->executor->RegisterWeights(1, other.Weights()).ok());
    ReloadAndVerify(other, other_memory, *beside, {90});
    std::thread goes([&] { beside.reset(); });
    ReloadAndVerify(world, memory, machine, {150});
    goes.join();
  }
}

TEST_F(CudaLanesTest, MemoryIsWhatIsSaid) {
  cudaMemPool_t pool = nullptr;
  ASSERT_CUDA(cudaDeviceGetDefaultMemPool(&pool, 0));
  const auto used = [&] {
    uint64_t bytes = 0;
    EXPECT_EQ(cudaMemPoolGetAttribute(pool, cudaMemPoolAttrUsedMemCurrent, &bytes), cudaSuccess);
    return bytes;
  };
  const auto lanes = MakeCudaLanes(device_.get());
  ASSERT_TRUE(lanes.ok()) << lanes.status();
  const ProjectionModel model = Model(1024, 8, 128, {128, 10000});
  World world(model, DType::kFloat16, true, {{16, 0}}, 4096, 62);
  const uint64_t before = used();
  constexpr CudaExecutorOptions kOptions = {.pages_in_host_memory = true};
  auto executor = MakeCudaExecutor(model, kOptions, *lanes);
  ASSERT_TRUE(executor.ok()) << executor.status();
  constexpr double kRounding = 1.01;  // allocations are of whole units
  const uint64_t made = used() - before;
  EXPECT_GE(made, CudaExecutorBytes(model, kOptions));
  EXPECT_LE(double(made), CudaExecutorBytes(model, kOptions) * kRounding);
  for (int layer = 0; layer < 2; ++layer) ASSERT_TRUE((*executor)->RegisterWeights(layer, world.Weights()).ok());
  ASSERT_TRUE((*executor)->RegisterWeights(0, world.Weights()).ok());  // in the place of the first
  const uint64_t layers = used() - before - made;
  EXPECT_GE(layers, 2 * CudaLayerBytes(model));
  EXPECT_LE(double(layers), 2 * CudaLayerBytes(model) * kRounding);
  executor->reset();
  EXPECT_EQ(used(), before);
}

// Streams of clients may wait for ever. What was met before waits for none of them: making executors, registering and
// reloading. The word is written in the end, so that what waits for it fails and no more.
TEST_F(CudaLanesTest, NothingWaitsForStreamsThatWait) {
  const auto lanes = MakeCudaLanes(device_.get());
  ASSERT_TRUE(lanes.ok()) << lanes.status();
  const ProjectionModel model = Model(512, 4, 64, {64, 10000});
  World world(model, DType::kFloat16, true, {{150, 3}}, 1000, 63);
  DeviceWorld memory(&world, 0, /*pages_on_device=*/false);
  const auto sequences = world.Split({150});
  const auto whole = [&](const World& w, absl::Span<const ReloadSequence> list) -> absl::Status {
    KV_RETURN_IF_ERROR(device_->Use());
    const SteadyClock clock;
    KV_ASSIGN_OR_RETURN(const auto executor, MakeCudaExecutor(w.model, {.pages_in_host_memory = true}, *lanes));
    KV_RETURN_IF_ERROR(executor->RegisterWeights(1, w.Weights()));
    ReloadRuntime runtime(executor.get(), &clock, nullptr);
    return runtime.Run({.layer = 1, .kv_page_bytes = 1000, .sequences = list}).status();
  };
  EXPECT_FALSE(HasMet(**lanes, model));
  ASSERT_EQ(whole(world, sequences), absl::OkStatus());
  EXPECT_TRUE(HasMet(**lanes, model));
  memory.Upload();
  void* pinned = nullptr;
  ASSERT_CUDA(cudaHostAlloc(&pinned, sizeof(uint64_t), cudaHostAllocPortable));
  auto* const word = static_cast<std::atomic<uint64_t>*>(pinned);
  word->store(0);
  const auto stream = device_->NewStream();
  ASSERT_TRUE(stream.ok());
  ASSERT_TRUE(device_->EnqueueWait(*stream, word, 1).ok());
  auto over = std::async(std::launch::async, [&] { return whole(world, sequences); });
  EXPECT_EQ(over.wait_for(std::chrono::seconds(60)), std::future_status::ready);
  const auto idle = device_->IsIdle(*stream);
  EXPECT_TRUE(idle.ok() && !*idle);  // it waited all along
  word->store(1);
  EXPECT_EQ(over.get(), absl::OkStatus());
  memory.Download();
  world.Verify({150});
  ASSERT_CUDA(cudaStreamSynchronize(*stream));
  device_->DestroyStream(*stream);
  ASSERT_CUDA(cudaFreeHost(pinned));
}

}  // namespace
}  // namespace kvmanager::recompute
