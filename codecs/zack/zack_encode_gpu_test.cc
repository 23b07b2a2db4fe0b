// Encode and decode of ZACK pages on a GPU against the CPU, within a step of what is stored.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "codecs/device/device_codec.h"
#include "codecs/zack/zack_codec.h"
#include "codecs/zack/zack_reference.h"
#include "codecs/zack/zack_testing.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"
#include "kvmanager/memory/device_testing.h"

namespace kvmanager::zack {
namespace {

constexpr int kLayers = 3;

/// One step of float16, or bfloat16, about x.
double StepAt(double x, bool half) {
  const int exponent = std::max(half ? -14 : -126, x == 0 ? -1000 : std::ilogb(x));
  return std::ldexp(1.0, exponent - (half ? 10 : 7));
}

class ZackEncodeGpu : public GpuTest {
 protected:
  void Open(DType dtype, int head_dim, int kv_heads, const char* mode, bool fold, uint64_t seed) {
    layout_ = MakeLayout(kv_heads, head_dim, 64, dtype);
    std::mt19937_64 random(seed);
    std::vector<int32_t> ranks(size_t(2 * kLayers * kv_heads));
    for (int32_t& rank : ranks) rank = 16 * (1 + int(random() % (head_dim / 16)));
    codec_ = std::make_unique<ZackCodec>(MakeFormat(MakeContext(layout_, kLayers, 2 * kv_heads), mode, fold, ranks),
                                         nullptr);
    device_codec_ = codec_->NewDeviceCodec();
    ASSERT_NE(device_codec_, nullptr);
  }
  void FillPages(size_t count, uint64_t seed) {
    std::mt19937_64 random(seed);
    raw_.clear();
    for (size_t i = 0; i < count; ++i) {
      const Bytes page = RandomPage(layout_, random, i % 5 == 4 ? 30.f : 1.f);
      raw_.insert(raw_.end(), page.get(), page.get() + layout_.raw_bytes());
    }
  }
  static uint32_t LayerOf(size_t page) { return uint32_t(page * 2 % kLayers); }
  const ZackFormat& format() const { return codec_->format(); }

  PageLayout layout_;
  std::unique_ptr<ZackCodec> codec_;
  std::unique_ptr<DeviceCodec> device_codec_;
  std::vector<uint8_t> raw_;
};

struct Case {
  DType dtype;
  int head_dim, kv_heads;
  const char* mode;
};
constexpr Case kCases[] = {{DType::kFloat16, 128, 3, "balanced"},
                           {DType::kBFloat16, 128, 2, "joint"},
                           {DType::kFloat16, 64, 5, "joint"},
                           {DType::kBFloat16, 64, 4, "balanced"},
                           {DType::kFloat16, 128, 8, "joint"}};

TEST_F(ZackEncodeGpu, PagesAndBack) {
  uint64_t seed = 0;
  for (const Case& c : kCases) {
    SCOPED_TRACE(absl::StrCat("dtype ", int(c.dtype), " d ", c.head_dim, " ", c.mode));
    ++seed;
    Open(c.dtype, c.head_dim, c.kv_heads, c.mode, seed % 2 == 0, seed);
    const size_t count = 23, raw_bytes = layout_.raw_bytes(), page_bytes = codec_->info().encoded_bytes;
    FillPages(count, seed);
    const bool declines = seed % 2 == 1;
    if (declines) {
      uint16_t* const bad = reinterpret_cast<uint16_t*>(raw_.data() + 3 * raw_bytes);
      for (size_t i = 0; i < raw_bytes / 2; ++i) bad[i] = c.dtype == DType::kFloat16 ? 0x7bff : 0x7f7f;
      // One element of one head alone.
      StoreElement(raw_.data() + 7 * raw_bytes, c.dtype, raw_bytes / 2 - 1, 65504);
      for (int i = 1; i < 16; ++i) StoreElement(raw_.data() + 7 * raw_bytes, c.dtype, raw_bytes / 2 - 1 - i, 65504);
    }
    TestArray<uint8_t> raw(raw_), encoded(count * page_bytes), decoded(count * raw_bytes);
    TestArray<uint32_t> declined(count);
    std::vector<DeviceEncodeItem> items;
    std::vector<DeviceDecodeItem> back;
    for (size_t i = 0; i < count; ++i) {
      items.push_back({raw.data() + i * raw_bytes, encoded.data() + i * page_bytes, 64 * i, LayerOf(i)});
      back.push_back({encoded.data() + i * page_bytes, decoded.data() + i * raw_bytes, LayerOf(i)});
    }
    const TestArray<DeviceEncodeItem> on_device(items);
    const TestArray<DeviceDecodeItem> back_on_device(back);
    const absl::Status status = device_codec_->Encode(on_device.data(), uint32_t(count), declined.data(), nullptr);
    ASSERT_TRUE(status.ok()) << status;
    const absl::Status decoding = device_codec_->Decode(back_on_device.data(), uint32_t(count), nullptr);
    ASSERT_TRUE(decoding.ok()) << decoding;
    ASSERT_CUDA(cudaDeviceSynchronize());
    const std::vector<uint8_t> got = encoded.Read(), got_back = decoded.Read();
    const std::vector<uint32_t> flags = declined.Read();
    size_t differing = 0, elements = 0, declined_pages = 0;
    for (size_t i = 0; i < count; ++i) {
      const int layer = int(LayerOf(i));
      const uint8_t* const from = raw_.data() + i * raw_bytes;
      const Bytes wanted = MakeBytes(page_bytes);
      const bool fits = ReferenceEncode(format(), layer, from, wanted.get());
      EXPECT_EQ(flags[i], fits ? 0u : 1u) << i;
      const size_t of_layer = format().page_bytes[layer];
      for (size_t n = of_layer; n < page_bytes; ++n) ASSERT_EQ(got[i * page_bytes + n], 0xff) << i << " " << n;
      if (!fits) {
        ++declined_pages;
        for (size_t n = 0; n < of_layer; ++n) ASSERT_EQ(got[i * page_bytes + n], 0) << i << " " << n;
        continue;
      }
      for (int h = 0; h < c.kv_heads; ++h) {
        const ZackHead& head = format().head(layer, h);
        for (int side = 0; side < 2; ++side) {
          const int rank = head.rank[side];
          for (int t = 0; t < 64; ++t) {
            for (int n = 0; n < rank; ++n) {
              double exact = 0, size = 0;
              for (int k = 0; k < c.head_dim; ++k) {
                const double term = double(LoadElement(from + layout_.raw_offset(side, h, t), c.dtype, k)) *
                                    head.encode[side][size_t(k) * rank + n];
                exact += term, size += std::abs(term);
              }
              const size_t at = head.offset[side] + 2 * (size_t(t) * rank + n);
              const double x = LoadElement(got.data() + i * page_bytes + at, DType::kFloat16, 0);
              const double y = LoadElement(wanted.get() + at, DType::kFloat16, 0);
              ++elements;
              differing += x != y;
              ASSERT_LE(std::abs(x - y), StepAt(exact, true) + 1e-6 * size)
                  << i << " " << side << " " << h << " " << t << " " << n;
            }
          }
        }
      }
      // Back, from the same bytes.
      const Bytes page = MakeBytes(page_bytes), wanted_back = MakeBytes(raw_bytes);
      std::copy_n(got.data() + i * page_bytes, of_layer, page.get());
      const DecodeItem item = {page.get(), wanted_back.get(), uint32_t(layer)};
      codec_->Decode({&item, 1});
      double error = 0, norm = 0;
      for (size_t n = 0; n < raw_bytes / 2; ++n) {
        const double x = LoadElement(got_back.data() + i * raw_bytes, c.dtype, n),
                     y = LoadElement(wanted_back.get(), c.dtype, n);
        ASSERT_TRUE(std::isfinite(x));
        error += (x - y) * (x - y), norm += y * y;
      }
      ASSERT_LE(std::sqrt(error), 1e-3 * std::sqrt(norm) + 1e-12) << i;
    }
    EXPECT_EQ(declined_pages > 0, declines);
    EXPECT_LT(differing, elements / 50);  // most are the CPU's to the bit
  }
}

// Any bytes are safe to decode, and what is decoded is finite.
TEST_F(ZackEncodeGpu, DecodesAnyBytes) {
  Open(DType::kFloat16, 128, 4, "balanced", false, 3);
  const size_t count = 9, page_bytes = codec_->info().encoded_bytes, raw_bytes = layout_.raw_bytes();
  std::mt19937_64 random(4);
  std::vector<uint8_t> bytes(count * page_bytes);
  for (uint8_t& b : bytes) b = uint8_t(random());
  const TestArray<uint8_t> encoded(bytes), decoded(count * raw_bytes);
  std::vector<DeviceDecodeItem> items;
  for (size_t i = 0; i < count; ++i) {
    items.push_back({encoded.data() + i * page_bytes, decoded.data() + i * raw_bytes, LayerOf(i)});
  }
  const TestArray<DeviceDecodeItem> on_device(items);
  ASSERT_TRUE(device_codec_->Decode(on_device.data(), uint32_t(count), nullptr).ok());
  ASSERT_CUDA(cudaDeviceSynchronize());
  const std::vector<uint8_t> got = decoded.Read();
  for (size_t n = 0; n < got.size() / 2; ++n)
    ASSERT_TRUE(std::isfinite(LoadElement(got.data(), layout_.dtype, n))) << n;
}

TEST_F(ZackEncodeGpu, InAGraph) {
  Open(DType::kFloat16, 128, 8, "balanced", false, 5);
  const size_t count = 300, page_bytes = codec_->info().encoded_bytes, raw_bytes = layout_.raw_bytes();
  FillPages(4, 9);
  const TestArray<uint8_t> raw(raw_), encoded(count * page_bytes);
  const TestArray<uint32_t> declined(count);
  std::vector<DeviceEncodeItem> items;
  for (size_t i = 0; i < count; ++i) {
    items.push_back({raw.data() + i % 4 * raw_bytes, encoded.data() + i * page_bytes, 0, uint32_t(i / 4 % kLayers)});
  }
  const TestArray<DeviceEncodeItem> on_device(items);
  cudaStream_t stream;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const absl::Status status = device_codec_->Encode(on_device.data(), uint32_t(count), declined.data(), stream);
  cudaGraph_t graph;
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  ASSERT_TRUE(status.ok()) << status;
  cudaGraphExec_t ready;
  ASSERT_CUDA(cudaGraphInstantiate(&ready, graph, 0));
  for (int i = 0; i < 2; ++i) ASSERT_CUDA(cudaGraphLaunch(ready, stream));
  ASSERT_CUDA(cudaStreamSynchronize(stream));
  const std::vector<uint8_t> replayed = encoded.Read();
  for (const uint32_t flag : declined.Read()) ASSERT_EQ(flag, 0u);
  for (size_t i = 12; i < count; ++i) {  // as the page and layer before
    ASSERT_EQ(std::memcmp(replayed.data() + i * page_bytes, replayed.data() + i % 12 * page_bytes,
                          format().page_bytes[i / 4 % kLayers]),
              0)
        << i;
  }
  cudaGraphExecDestroy(ready);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace kvmanager::zack
