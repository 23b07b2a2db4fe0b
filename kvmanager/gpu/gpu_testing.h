// A GPU that is none, for tests of what runs on one: its streams pass what a test says, its memory is the host's. It
// has no kernels.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/base/event_loop.h"
#include "kvmanager/base/poll_list.h"
#include "kvmanager/base/status.h"
#include "kvmanager/gpu/gpu.h"
#include "kvmanager/store/step_cache.h"
#include "kvmanager/store/store_fixture.h"

namespace kvmanager::testing {

class FakeDevice final : public Device {
 public:
  const DeviceInfo& info() const override { return info_; }
  CUstream_st* attention_stream() const override { return nullptr; }
  CUstream_st* encode_stream() const override { return nullptr; }
  CUstream_st* service_stream() const override { return nullptr; }
  absl::Status Use() const override { return absl::OkStatus(); }
  absl::StatusOr<uint64_t> FreeBytes() const override { return 0; }
  absl::Status PinHost(uint8_t*, size_t) const override { return absl::OkStatus(); }
  absl::Status PinHostForReading(const uint8_t*, size_t) const override { return absl::OkStatus(); }
  void UnpinHost(const uint8_t*) const override {}
  absl::StatusOr<CUstream_st*> NewStream(StreamPriority) const override {
    return reinterpret_cast<CUstream_st*>(++streams_);
  }
  void DestroyStream(CUstream_st*) const override {}
  absl::StatusOr<bool> IsIdle(CUstream_st*) const override { return writes_.empty(); }
  bool IsCapturing(CUstream_st*) const override { return false; }
  absl::Status EnqueueWait(CUstream_st*, const void*, uint64_t) const override { return absl::OkStatus(); }
  absl::Status EnqueueWrite(CUstream_st*, const void* word, uint64_t value) const override {
    writes_.push_back({word, value});
    return absl::OkStatus();
  }
  absl::Status Follow(CUstream_st*, CUstream_st*) const override { return absl::OkStatus(); }
  absl::Status EnqueueCopy(CUstream_st*, void*, const void*, size_t) const override { return absl::OkStatus(); }
  absl::Status EnqueueRelease(CUstream_st*, const void*, uint64_t) const override { return absl::OkStatus(); }
  const DeviceDriver& driver() const override {
    KV_CHECK(false);
    return *static_cast<const DeviceDriver*>(nullptr);
  }

  /// Streams pass everything that they were given.
  void Run() {
    for (const auto& [word, value] : std::exchange(writes_, {})) {
      const_cast<std::atomic<uint64_t>*>(static_cast<const std::atomic<uint64_t>*>(word))->store(value);
    }
  }

 private:
  DeviceInfo info_;
  mutable std::deque<std::pair<const void*, uint64_t>> writes_;
  mutable uintptr_t streams_ = 0;
};

/// Slabs of host memory.
class FakeSlabs final : public SlabMemory {
 public:
  FakeSlabs(uint64_t slab_bytes, uint32_t slabs) : slab_bytes_(slab_bytes), memory_(slab_bytes * slabs) {}
  uint8_t* data() const override { return memory_.data(); }
  uint64_t slab_bytes() const override { return slab_bytes_; }
  uint32_t slabs() const override { return static_cast<uint32_t>(memory_.size() / slab_bytes_); }
  absl::Status Make(uint32_t slab) override { return Zero(slab); }
  void Unmake(uint32_t) override {}
  absl::Status Zero(uint32_t slab) override {
    std::memset(data() + slab * slab_bytes_, 0, slab_bytes_);
    return absl::OkStatus();
  }
  absl::StatusOr<int> Export(uint32_t) override { return open("/dev/null", O_RDONLY | O_CLOEXEC); }

 private:
  const uint64_t slab_bytes_;
  const AlignedBuffer memory_;
};

/// A device codec that runs nothing; the first kSinkTokens tokens stay raw.
class NoDeviceCodec final : public DeviceCodec {
 public:
  static constexpr uint64_t kSinkTokens = 16;
  const device::AttendKernels* attention(int) const override { return nullptr; }
  bool keeps_raw(int, uint64_t first_token) const override { return first_token < kSinkTokens; }
  absl::Status Encode(const DeviceEncodeItem*, uint32_t, uint32_t*, CUstream_st*) const override {
    return absl::UnimplementedError("no kernels");
  }
  absl::Status Decode(const DeviceDecodeItem*, uint32_t, CUstream_st*) const override {
    return absl::UnimplementedError("no kernels");
  }
};

/// A store whose only cache of interest is on a FakeDevice.
class FakeGpuTest : public ::testing::Test {
 protected:
  ~FakeGpuTest() noexcept override {}
  void SetUp() override {
    auto device = std::make_unique<FakeDevice>();
    device_ = device.get();
    Gpu::Parts parts;
    parts.streams = *DeviceStreams::Create(device_, &device_metrics_);
    gpu_ = std::make_unique<Gpu>(std::move(device), *DevicePool::Create(std::make_unique<FakeSlabs>(2 << 20, 4)),
                                 std::move(parts), &device_metrics_);
    RegisterTestCodecs(&registry_);
    const StoreDevice at{gpu_->ordinal(), gpu_->pool(), gpu_->epochs(), gpu_->encode_queue(), nullptr};
    store_ = PageStore::Make(&*host_.pool, &registry_, &executor_, &store_metrics_, &clock_, {&at, 1});
    config_ = MakeConfig("fake", 0);
    config_.device = gpu_->ordinal();
    cache_ = {*store_->caches().Open(config_), &config_, nullptr, nullptr, std::make_shared<NoDeviceCodec>()};
    cache_.codec = cache_.raw = store_->caches().codec(cache_.id);
    polls_.SetLoop(&loop_);
  }
  void TearDown() override {
    store_->report().CheckInvariants();
    polls_.SetLoop(nullptr);
    device_->Run();
    EXPECT_TRUE(gpu_->streams()->Drain(1000));
    store_ = nullptr;
  }
  SequenceId Create() { return store_->Create(cache_.id, {})->sequence; }
  /// To all layers, as kernels will write it.
  AttendEntry Append(SequenceId sequence, uint64_t position, int tokens) {
    const AppendEntry entry{sequence, position, tokens};
    const absl::Status appended = store_->Append(cache_.id, {0, config_.layers}, {&entry, 1});
    EXPECT_TRUE(appended.ok()) << appended;
    return {sequence, position, tokens};
  }

  Metrics metrics_;
  DeviceMetrics device_metrics_{&metrics_, 0};
  StoreMetrics store_metrics_{&metrics_};
  CodecRegistry registry_;
  TestStore host_;  // whose pool is the host's
  ManualExecutor executor_;
  ManualClock clock_;
  MessageQueue queue_;
  EventLoop loop_{&queue_, 0};
  PollList polls_;
  FakeDevice* device_ = nullptr;  // gpu_'s
  std::unique_ptr<Gpu> gpu_;
  std::unique_ptr<PageStore> store_;
  CacheConfig config_;
  StepCache cache_;
};

}  // namespace kvmanager::testing
