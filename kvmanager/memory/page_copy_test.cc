#include "kvmanager/memory/page_copy.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "kvmanager/memory/device.h"
#include "kvmanager/memory/device_testing.h"
#include "kvmanager/memory/region.h"

namespace kvmanager {
namespace {

constexpr uint32_t kGuardBytes = 64;

class PageCopyTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    auto device = Device::Open(0);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
  }
  void TearDown() override {
    if (host_ != nullptr) device_->UnpinHost(host_->data());
    if (on_device_ != nullptr) cudaFree(on_device_);
  }

  void Make(size_t bytes) {
    Region::Options options;
    options.bytes = bytes;
    auto host = Region::Create(options);
    ASSERT_TRUE(host.ok()) << host.status();
    host_ = *std::move(host);
    const absl::Status pinned = device_->PinHost(host_->data(), host_->bytes());
    ASSERT_TRUE(pinned.ok()) << pinned;
    ASSERT_CUDA(cudaMalloc(reinterpret_cast<void**>(&on_device_), bytes));
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Region> host_;
  uint8_t* on_device_ = nullptr;
};

// Pages of mixed sizes in shuffled slots, each method and direction: every page arrives, and no byte beside it changes.
TEST_F(PageCopyTest, MovesScatteredPagesAndNothingElse) {
  std::mt19937_64 random(5);
  const uint32_t sizes[] = {16, 48, 4096, 8192, 8208, 16384, 37376, 45568, 65536, 2032, 200000, 1 << 20};
  for (const PageCopyMethod method : {PageCopyMethod::kBest, PageCopyMethod::kKernel, PageCopyMethod::kBatch}) {
    for (const PageDirection direction : {PageDirection::kFetch, PageDirection::kDemote}) {
      SCOPED_TRACE(testing::Message() << "method " << static_cast<int>(method) << " direction "
                                      << static_cast<int>(direction));
      // 3,000 equal pages are more than a launch; then mixed ones.
      std::vector<uint32_t> bytes(3000, 4672);
      for (int i = 0; i < 200; ++i) bytes.push_back(sizes[random() % std::size(sizes)]);
      std::vector<size_t> host_at(bytes.size()), device_at(bytes.size()), order(bytes.size());
      size_t all_bytes = kGuardBytes;
      const auto place = [&](std::vector<size_t>* at) {
        std::iota(order.begin(), order.end(), size_t{0});
        std::shuffle(order.begin(), order.end(), random);
        all_bytes = kGuardBytes;
        for (size_t i : order) {
          (*at)[i] = all_bytes;
          all_bytes += bytes[i] + kGuardBytes;
        }
      };
      place(&host_at);
      place(&device_at);
      if (host_ == nullptr) Make(size_t{96} << 20);
      ASSERT_LE(all_bytes, host_->bytes());
      std::vector<uint8_t> host(all_bytes), device(all_bytes);
      for (uint8_t& b : host) b = static_cast<uint8_t>(random());
      for (uint8_t& b : device) b = static_cast<uint8_t>(random());
      std::memcpy(host_->data(), host.data(), all_bytes);
      ASSERT_CUDA(cudaMemcpy(on_device_, device.data(), all_bytes, cudaMemcpyHostToDevice));
      std::vector<PageCopy> copies;
      for (size_t i = 0; i < bytes.size(); ++i) {
        copies.push_back(PageCopy{on_device_ + device_at[i], host_->data() + host_at[i], bytes[i]});
        if (direction == PageDirection::kFetch) {
          std::memcpy(device.data() + device_at[i], host.data() + host_at[i], bytes[i]);
        } else {
          std::memcpy(host.data() + host_at[i], device.data() + device_at[i], bytes[i]);
        }
      }
      const absl::Status enqueued = EnqueuePageCopies(direction, copies, device_->encode_stream(), method);
      ASSERT_TRUE(enqueued.ok()) << enqueued;
      ASSERT_CUDA(cudaStreamSynchronize(device_->encode_stream()));
      EXPECT_EQ(std::memcmp(host_->data(), host.data(), all_bytes), 0);
      std::vector<uint8_t> got(all_bytes);
      ASSERT_CUDA(cudaMemcpy(got.data(), on_device_, all_bytes, cudaMemcpyDeviceToHost));
      EXPECT_EQ(got, device);
    }
  }
}

TEST_F(PageCopyTest, RefusesWhatKernelsCannotMoveBeforeAnythingRuns) {
  Make(1 << 20);
  const PageCopy good{on_device_, host_->data(), 64};
  const PageCopy bad[] = {{on_device_ + 8, host_->data(), 64},
                          {on_device_, host_->data() + 4, 64},
                          {on_device_, host_->data(), 24},
                          {on_device_, host_->data(), 0},
                          {nullptr, host_->data(), 64},
                          {on_device_, nullptr, 64},
                          {on_device_, host_->data(), kPageCopyBytesMax + 16}};
  for (const PageCopy& copy : bad) {
    const PageCopy both[] = {good, copy};
    EXPECT_EQ(EnqueuePageCopies(PageDirection::kFetch, both, device_->encode_stream()).code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_TRUE(EnqueuePageCopies(PageDirection::kFetch, {}, device_->encode_stream()).ok());
}

}  // namespace
}  // namespace kvmanager
