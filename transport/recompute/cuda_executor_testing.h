// Reloads on a GPU, for tests: where worlds (recompute_testing.h) lie, and who reloads them.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "kvmanager/base/clock.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device_testing.h"
#include "transport/recompute/cuda_executor.h"
#include "transport/recompute/recompute_testing.h"
#include "transport/recompute/runtime.h"

namespace kvmanager::recompute {

inline constexpr CudaExecutorOptions kSmall = {.chunk_rows = 48};

// As in the daemon: kernels are there before streams wait.
inline const bool many_streams = [] {
  AllowManyStreams();
  return true;
}();

class CudaExecutorTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    auto opened = Device::Open(0);
    ASSERT_TRUE(opened.ok()) << opened.status();
    device_ = *std::move(opened);
  }
  std::unique_ptr<Device> device_;
};

// A world whose activations and stored pages lie in pinned memory and whose pages lie on the device, or in pinned
// memory too.
class DeviceWorld {
 public:
  DeviceWorld(World* world, size_t shift = 0, bool pages_on_device = true) : world_(world) {
    size_t pinned = 0, device = 0;
    for (World::Sequence& s : world->sequences) {
      for (auto& a : s.activations) pinned += Rounded(a.size());
      for (auto& a : s.stored) pinned += Rounded(a.size());
      for (auto& a : s.pages) device += Rounded(a.size() + shift);
    }
    void* memory = nullptr;
    if (!pages_on_device) pinned += device;
    EXPECT_EQ(cudaHostAlloc(&memory, pinned, cudaHostAllocPortable), cudaSuccess);
    pinned_ = static_cast<uint8_t*>(memory);
    if (pages_on_device) pages_ = std::make_unique<DeviceBytes>(device);
    uint8_t *to = pinned_, *page = pages_on_device ? pages_->as<uint8_t>() : pinned_ + pinned - device;
    for (World::Sequence& s : world->sequences) {
      const auto place = [&](auto& list, auto& pointers) {
        for (size_t i = 0; i < list.size(); ++i) {
          pointers[i] = to;
          to += Rounded(list[i].size());
        }
      };
      place(s.activations, s.activation_pointers);
      place(s.stored, s.stored_pointers);
      for (size_t i = 0; i < s.pages.size(); ++i) {
        s.page_pointers[i] = page + shift;
        page += Rounded(s.pages[i].size() + shift);
      }
    }
    Upload();
  }
  ~DeviceWorld() { cudaFreeHost(pinned_); }
  DeviceWorld(const DeviceWorld&) = delete;

  // What the world has now; pages are as they were before any reload.
  void Upload() {
    for (World::Sequence& s : world_->sequences) {
      const auto fill = [](const auto& list, const auto& pointers) {
        for (size_t i = 0; i < list.size(); ++i) {
          std::memcpy(const_cast<uint8_t*>(pointers[i]), list[i].data(), list[i].size());
        }
      };
      fill(s.activations, s.activation_pointers);
      fill(s.stored, s.stored_pointers);
      for (size_t i = 0; i < s.pages.size(); ++i) {
        std::fill(s.pages[i].begin(), s.pages[i].end(), 0xee);
        EXPECT_EQ(cudaMemcpy(s.page_pointers[i], s.pages[i].data(), s.pages[i].size(), cudaMemcpyDefault), cudaSuccess);
      }
    }
  }
  void Download() {
    for (World::Sequence& s : world_->sequences) {
      for (size_t i = 0; i < s.pages.size(); ++i) {
        EXPECT_EQ(cudaMemcpy(s.pages[i].data(), s.page_pointers[i], s.pages[i].size(), cudaMemcpyDefault), cudaSuccess);
      }
    }
  }

 private:
  static size_t Rounded(size_t bytes) { return (bytes + 255) / 256 * 256; }
  World* const world_;
  uint8_t* pinned_ = nullptr;
  std::unique_ptr<DeviceBytes> pages_;
};

struct Machine {
  SteadyClock clock;
  Profile profile{&clock};
  std::unique_ptr<ReloadExecutor> executor;
  std::unique_ptr<ReloadRuntime> runtime;

  Machine(const ProjectionModel& model, const Device* device, CudaExecutorOptions options = kSmall) {
    Take(MakeCudaExecutor(model, options, device));
  }
  Machine(const ProjectionModel& model, std::shared_ptr<CudaLanes> lanes) {
    Take(MakeCudaExecutor(model, kSmall, std::move(lanes)));
  }

 private:
  void Take(absl::StatusOr<std::unique_ptr<ReloadExecutor>> made) {
    EXPECT_TRUE(made.ok()) << made.status();
    KV_CHECK(made.ok());
    executor = *std::move(made);
    runtime = std::make_unique<ReloadRuntime>(executor.get(), &clock, &profile);
  }
};

inline void ReloadAndVerify(const World& world, DeviceWorld& memory, Machine& machine,
                            const std::vector<int64_t>& splits) {
  memory.Upload();
  const auto sequences = world.Split(splits);
  const auto report = machine.runtime->Run({.layer = 1, .kv_page_bytes = world.kv_page_bytes, .sequences = sequences});
  ASSERT_TRUE(report.ok()) << report.status();
  memory.Download();
  world.Verify(splits);
}

}  // namespace kvmanager::recompute
