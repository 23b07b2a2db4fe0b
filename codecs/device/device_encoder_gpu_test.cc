// Batches through a small ring give the CPU's bytes, whatever their sizes, and one that finds no room changes nothing.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "codecs/device/device_encoder.h"
#include "codecs/hack/hack.h"
#include "codecs/policy/policy.h"
#include "codecs/raw/raw.h"
#include "codecs/registry.h"
#include "kvmanager/base/half.h"
#include "kvmanager/memory/device_testing.h"

namespace kvmanager {
namespace {

constexpr uint32_t kRing = 8;
constexpr int kPages = 16;

class DeviceEncoderTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    CodecRegistry registry;
    RegisterHack(registry);
    PageLayout layout;
    layout.kv_heads = 2;
    layout.head_dim = 128;
    layout.page_tokens = 64;
    auto codec = registry.Create("hack:k_bits=2,v_bits=2", layout);
    ASSERT_TRUE(codec.ok()) << codec.status();
    codec_ = *std::move(codec);
    device_codec_ = codec_->NewDeviceCodec();
    ASSERT_NE(device_codec_, nullptr);
    raw_bytes_ = layout.raw_bytes(), encoded_bytes_ = codec_->info().encoded_bytes;
    std::mt19937_64 random(1);
    std::normal_distribution<float> normal;
    std::vector<uint16_t> raw(kPages * raw_bytes_ / 2);
    for (uint16_t& x : raw) x = FloatToHalf(normal(random));
    expected_.resize(kPages * encoded_bytes_);
    std::vector<uint8_t> workspace(codec_->encode_workspace_bytes() + 64);
    uint8_t* const aligned = workspace.data() + (64 - reinterpret_cast<uintptr_t>(workspace.data()) % 64) % 64;
    for (int i = 0; i < kPages; ++i) {
      EncodeItem item;
      item.raw = reinterpret_cast<const uint8_t*>(raw.data()) + i * raw_bytes_;
      item.encoded = expected_.data() + i * encoded_bytes_;
      item.first_token = 64 * uint64_t(i);
      codec_->Encode({&item, 1}, absl::MakeSpan(aligned, codec_->encode_workspace_bytes()));
      ASSERT_FALSE(item.declined);
    }
    raw_ = Allocate<uint8_t>(kPages * raw_bytes_);
    encoded_ = Allocate<uint8_t>(kPages * encoded_bytes_);
    declined_ = Allocate<uint8_t>(kPages * sizeof(uint32_t));
    ASSERT_CUDA(cudaMemcpy(raw_.get(), raw.data(), kPages * raw_bytes_, cudaMemcpyHostToDevice));
    ASSERT_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  void TearDown() override {
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  std::vector<DeviceEncodeItem> Items(int first, int count) const {
    std::vector<DeviceEncodeItem> items;
    for (int i = first; i < first + count; ++i) {
      items.push_back({raw_.get() + i * raw_bytes_, encoded_.get() + i * encoded_bytes_, 64 * uint64_t(i), 0});
    }
    return items;
  }
  uint32_t* declined() const { return reinterpret_cast<uint32_t*>(declined_.get()); }

  std::unique_ptr<Codec> codec_;
  std::unique_ptr<DeviceCodec> device_codec_;
  size_t raw_bytes_ = 0, encoded_bytes_ = 0;
  std::vector<uint8_t> expected_;
  DeviceArray<uint8_t> raw_, encoded_, declined_;
  cudaStream_t stream_ = nullptr;
};

TEST_F(DeviceEncoderTest, BatchesOfAllSizesGoRoundTheRing) {
  auto encoder = DeviceEncoder::Create(stream_, kRing);
  ASSERT_TRUE(encoder.ok()) << encoder.status();
  std::mt19937 random(2);
  for (int round = 0; round < 60; ++round) {
    ASSERT_CUDA(cudaMemsetAsync(encoded_.get(), 0xee, kPages * encoded_bytes_, stream_));
    ASSERT_CUDA(cudaMemsetAsync(declined_.get(), 0xee, kPages * sizeof(uint32_t), stream_));
    for (int at = 0; at < kPages;) {
      const int count = std::min<int>(1 + int(random() % (kRing / 2)), kPages - at);
      const absl::Status status = (*encoder)->Encode(*device_codec_, Items(at, count), declined() + at);
      if (absl::IsResourceExhausted(status)) {
        ASSERT_CUDA(cudaStreamSynchronize(stream_));
        continue;
      }
      ASSERT_TRUE(status.ok()) << status;
      at += count;
    }
    std::vector<uint8_t> got(kPages * encoded_bytes_);
    std::vector<uint32_t> flags(kPages);
    ASSERT_CUDA(cudaMemcpyAsync(got.data(), encoded_.get(), got.size(), cudaMemcpyDeviceToHost, stream_));
    ASSERT_CUDA(
        cudaMemcpyAsync(flags.data(), declined_.get(), kPages * sizeof(uint32_t), cudaMemcpyDeviceToHost, stream_));
    ASSERT_CUDA(cudaStreamSynchronize(stream_));
    ASSERT_EQ(got, expected_) << round;
    ASSERT_EQ(flags, std::vector<uint32_t>(kPages, 0));
  }
}

TEST_F(DeviceEncoderTest, WhatNeverFitsIsRefused) {
  auto encoder = DeviceEncoder::Create(stream_, kRing);
  ASSERT_TRUE(encoder.ok()) << encoder.status();
  ASSERT_CUDA(cudaMemsetAsync(encoded_.get(), 0xee, kPages * encoded_bytes_, stream_));
  const absl::Status status = (*encoder)->Encode(*device_codec_, Items(0, kRing + 1), declined());
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  std::vector<uint8_t> got(kPages * encoded_bytes_);
  ASSERT_CUDA(cudaMemcpyAsync(got.data(), encoded_.get(), got.size(), cudaMemcpyDeviceToHost, stream_));
  ASSERT_CUDA(cudaStreamSynchronize(stream_));
  EXPECT_EQ(got, std::vector<uint8_t>(got.size(), 0xee));
  EXPECT_TRUE((*encoder)->Encode(*device_codec_, {}, declined()).ok());
}

TEST_F(DeviceEncoderTest, EachPageIsEncodedByItsLayersCodecOrKeptRaw) {
  constexpr int kLayers = 4;
  CodecRegistry registry;
  RegisterHack(registry);
  RegisterRaw(registry);
  RegisterPolicy(registry);
  CodecContext context;
  context.layout = codec_->layout();
  context.layers = kLayers;
  const auto policy = registry.Create("hack:k_bits=2,v_bits=2;1=hack:k_bits=4,v_bits=3;3=raw;sinks=128", context);
  ASSERT_TRUE(policy.ok()) << policy.status();
  const std::unique_ptr<DeviceCodec> device_policy = (*policy)->NewDeviceCodec();
  ASSERT_NE(device_policy, nullptr);
  const size_t bytes = (*policy)->info().encoded_bytes;
  const DeviceArray<uint8_t> encoded = Allocate<uint8_t>(kPages * kLayers * bytes),
                             flags = Allocate<uint8_t>(kPages * kLayers * sizeof(uint32_t));
  ASSERT_CUDA(cudaMemsetAsync(encoded.get(), 0xee, kPages * kLayers * bytes, stream_));
  ASSERT_CUDA(cudaMemsetAsync(flags.get(), 0xee, kPages * kLayers * sizeof(uint32_t), stream_));
  auto encoder = DeviceEncoder::Create(stream_, 2 * kPages * kLayers);
  ASSERT_TRUE(encoder.ok()) << encoder.status();
  std::vector<DeviceEncodeItem> items;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (int page = 0; page < kPages; ++page) {
      items.push_back(
          {raw_.get() + page * raw_bytes_, encoded.get() + items.size() * bytes, 64 * uint64_t(page), layer});
    }
  }
  const absl::Status status = (*encoder)->Encode(*device_policy, items, reinterpret_cast<uint32_t*>(flags.get()));
  ASSERT_TRUE(status.ok()) << status;
  std::vector<uint8_t> got(items.size() * bytes), raw(kPages * raw_bytes_);
  std::vector<uint32_t> declined(items.size());
  ASSERT_CUDA(cudaMemcpyAsync(got.data(), encoded.get(), got.size(), cudaMemcpyDeviceToHost, stream_));
  ASSERT_CUDA(cudaMemcpyAsync(declined.data(), flags.get(), items.size() * 4, cudaMemcpyDeviceToHost, stream_));
  ASSERT_CUDA(cudaMemcpyAsync(raw.data(), raw_.get(), raw.size(), cudaMemcpyDeviceToHost, stream_));
  ASSERT_CUDA(cudaStreamSynchronize(stream_));
  std::vector<uint8_t> workspace((*policy)->encode_workspace_bytes() + 64), expected(bytes + 64);
  const auto aligned = [](std::vector<uint8_t>& of) {
    return of.data() + (64 - reinterpret_cast<uintptr_t>(of.data()) % 64) % 64;
  };
  for (size_t i = 0; i < items.size(); ++i) {
    const bool kept = items[i].first_token < 128 || items[i].layer == 3;
    ASSERT_EQ(declined[i] != 0, kept) << i;
    if (kept) continue;
    EncodeItem item;
    item.raw = raw.data() + (i % kPages) * raw_bytes_;
    item.encoded = aligned(expected);
    item.first_token = items[i].first_token;
    item.layer = items[i].layer;
    (*policy)->Encode({&item, 1}, absl::MakeSpan(aligned(workspace), (*policy)->encode_workspace_bytes()));
    ASSERT_FALSE(item.declined);
    ASSERT_EQ(std::memcmp(got.data() + i * bytes, item.encoded, (*policy)->info().page_bytes(int(item.layer))), 0) << i;
  }
  EXPECT_FALSE(device_policy->Encode(items.data(), 1, declined.data(), stream_).ok());
}

}  // namespace
}  // namespace kvmanager
