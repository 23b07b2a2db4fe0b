// Encode and decode of ZACK+HACK and ZACK+MILLION pages on a GPU against the CPU: the rotation within a step of
// float16, the codes of identical rotated pages bit for bit.
#include <cuda_runtime_api.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "codecs/device/device_codec.h"
#include "codecs/hack/hack_codec.h"
#include "codecs/zack/rotation_cuda.h"
#include "codecs/zack_hack/rotated_codec.h"
#include "codecs/zack_hack/stack_testing.h"
#include "codecs/zack_hack/zack_hack.h"
#include "codecs/zack_million/zack_million.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"
#include "kvmanager/memory/device_testing.h"

namespace kvmanager::zack_hack {
namespace {

using zack::Memory;

struct Case {
  DType dtype;
  int head_dim;
  const char* mode;
  const char* bytes;              // of zack+hack; or
  const char* million = nullptr;  // parameters of zack+million
  bool wide = false;              // some of K's segments have 8 bits
};

class OneArtifact final : public CalibrationSource {
 public:
  absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view) override { return artifact; }
  std::shared_ptr<const Calibration> artifact;
};

absl::StatusOr<std::unique_ptr<Codec>> CodecOf(const Case& c, const PageLayout& layout, int layers) {
  if (c.million == nullptr) {
    const CodecContext context = zack::SyntheticContext(layout, layers, 2 * layout.kv_heads);
    return MakeCodec(c.wide ? zack::WithLoudKeys(context) : context,
                     {{"mode", c.mode}, {"bytes", c.bytes}, {"allocation", "model"}});
  }
  const std::string spec = absl::StrCat("zack+million:", c.million);
  const CodecContext context = zack::SyntheticContext(layout, layers, 2 * layout.kv_heads, {spec});
  OneArtifact source;
  source.artifact = context.calibration;
  CodecRegistry registry;
  registry.SetCalibrations(&source);
  RegisterZackMillion(registry);
  return registry.Create(absl::StrCat(spec, ",mode=", c.mode, ",calibration=any"), context);
}

class ZackHackEncodeGpu : public GpuTest {
 protected:
  static constexpr int kLayers = 3;

  void Open(const Case& c, int kv_heads) {
    layout_.dtype = c.dtype;
    layout_.kv_heads = uint16_t(kv_heads);
    layout_.head_dim = uint16_t(c.head_dim);
    layout_.page_tokens = 64;
    auto made = CodecOf(c, layout_, kLayers);
    ASSERT_TRUE(made.ok()) << made.status();
    codec_ = *std::move(made);
    device_codec_ = codec_->NewDeviceCodec();
    ASSERT_NE(device_codec_, nullptr);
    std::vector<uint8_t> encode, decode;
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int head = 0; head < kv_heads; ++head) {
        for (int side = 0; side < 2; ++side) {
          Append(rotated().rotation(layer, head).encode[side], c.dtype, &encode);
          Append(rotated().rotation(layer, head).decode[side], DType::kFloat16, &decode);
        }
      }
    }
    encode_ = Upload(encode);
    decode_ = Upload(decode);
    rotation_ = {layout_, kLayers, encode_.get(), decode_.get()};
  }
  void Append(const std::vector<float>& factor, DType in, std::vector<uint8_t>* to) const {
    const size_t at = to->size();
    to->resize(at + zack::PackedFactorBytes(layout_.head_dim, layout_.head_dim, in));
    zack::PackFactor(factor.data(), layout_.head_dim, layout_.head_dim, in, to->data() + at);
  }
  const zack::RotatedCodec& rotated() const { return static_cast<const zack::RotatedCodec&>(*codec_); }

  /// Pages of the layers in turn.
  void FillPages(int count, uint64_t seed) {
    std::mt19937_64 random(seed);
    pages_.clear();
    for (int i = 0; i < count; ++i) pages_.push_back(zack::RandomRawPage(layout_, random, i % 5 == 4 ? 30.f : 1.f));
  }
  static uint32_t LayerOf(size_t page) { return uint32_t(page * 2 % kLayers); }

  PageLayout layout_;
  std::unique_ptr<Codec> codec_;
  std::unique_ptr<DeviceCodec> device_codec_;
  DeviceArray<uint8_t> encode_, decode_;
  zack::DeviceRotation rotation_;
  std::vector<Memory> pages_;
};

/// One step of float16, or bfloat16, about x.
double StepAt(double x, bool half) {
  const int exponent = std::max(half ? -14 : -126, x == 0 ? -1000 : std::ilogb(x));
  return std::ldexp(1.0, exponent - (half ? 10 : 7));
}

constexpr Case kCases[] = {{DType::kFloat16, 128, "balanced", "56"},
                           {DType::kBFloat16, 128, "joint", "48"},
                           {DType::kFloat16, 64, "joint", "40"},
                           {DType::kBFloat16, 64, "balanced", "24"},
                           {DType::kFloat16, 128, "joint", "100"},
                           {DType::kFloat16, 128, "balanced", nullptr, "m=64,bits=8"},
                           {DType::kBFloat16, 64, "joint", nullptr, "k_m=32,k_bits=9,v_m=16,v_bits=4"},
                           {DType::kFloat16, 128, "joint", "76", nullptr, true},
                           {DType::kBFloat16, 128, "balanced", "92", nullptr, true},
                           {DType::kBFloat16, 64, "joint", "38", nullptr, true},
                           {DType::kFloat16, 64, "balanced", "46", nullptr, true}};

TEST_F(ZackHackEncodeGpu, PagesAndTheirCodes) {
  uint64_t seed = 0;
  for (const Case& c : kCases) {
    SCOPED_TRACE(absl::StrCat("dtype ", int(c.dtype), " d ", c.head_dim, " ", c.mode, " ",
                              c.million != nullptr ? c.million : c.bytes));
    const int heads = 1 + int(seed % 3) * 2;
    Open(c, heads);
    for (int i = 0; c.wide && i < kLayers * heads; i += 2) {  // the heads that WithLoudKeys means
      const auto& inner = static_cast<const hack::HackCodec&>(rotated().inner(i / heads));
      ASSERT_EQ(inner.format().heads[i % heads].side[0].segment_bits[0], 8);
    }
    const int count = 23;
    FillPages(count, ++seed);
    if (seed % 2 == 1) {  // a page that does not fit once it is rotated, or has values that are not finite
      uint16_t* const bad = reinterpret_cast<uint16_t*>(pages_[3].get());
      for (size_t i = 0; i < layout_.raw_bytes() / 2; ++i) bad[i] = c.dtype == DType::kFloat16 ? 0x7bff : 0x7f7f;
    }
    const size_t raw_bytes = layout_.raw_bytes(), encoded_bytes = codec_->info().encoded_bytes;
    const TestArray<uint8_t> raw(count * raw_bytes), encoded(count * encoded_bytes), rotated_pages(count * raw_bytes);
    const TestArray<DeviceEncodeItem> inner(count);
    const TestArray<uint32_t> declined(count);
    std::vector<DeviceEncodeItem> items(count);
    for (int i = 0; i < count; ++i) {
      ASSERT_CUDA(cudaMemcpy(raw.data() + i * raw_bytes, pages_[i].get(), raw_bytes, cudaMemcpyHostToDevice));
      items[i] = {raw.data() + i * raw_bytes, encoded.data() + i * encoded_bytes, uint64_t(64 * i), LayerOf(i)};
    }
    const TestArray<DeviceEncodeItem> device_items(items);
    const TestArray<uint32_t> order(count);
    ASSERT_EQ(zack::LaunchRotateRaw(rotation_, {rotated_pages.data(), order.data()}, device_items.data(), count,
                                    inner.data(), nullptr),
              0);
    const absl::Status status = device_codec_->Encode(device_items.data(), count, declined.data(), nullptr);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_CUDA(cudaDeviceSynchronize());
    const std::vector<uint8_t> got_rotated = rotated_pages.Read(), got = encoded.Read();
    const std::vector<uint32_t> flags = declined.Read();

    const Memory host_rotated = zack::MakeMemory(raw_bytes);
    std::vector<float> rows(64 * layout_.head_dim + 16);
    int declined_pages = 0, differing = 0;
    for (int i = 0; i < count; ++i) {
      const int layer = int(LayerOf(i));
      const uint32_t flag = flags[i];
      const Memory mine = zack::MakeMemory(raw_bytes);
      std::memcpy(mine.get(), got_rotated.data() + i * raw_bytes, raw_bytes);
      std::vector<float> aligned(64 * layout_.head_dim + 64);
      const bool fits = rotated().Rotate(pages_[i].get(), layer, host_rotated.get(), aligned.data());
      const size_t page_bytes = codec_->info().page_bytes(layer);
      if (!fits) {
        EXPECT_EQ(flag, 1u) << i;
        ++declined_pages;
        for (size_t n = 0; n < page_bytes; ++n) ASSERT_EQ(got[i * encoded_bytes + n], 0) << i << " " << n;
        continue;
      }
      // The rotation.
      for (int side = 0; side < 2; ++side) {
        for (int head = 0; head < heads; ++head) {
          const std::vector<float>& factor = rotated().rotation(layer, head).encode[side];
          for (int t = 0; t < 64; ++t) {
            const size_t at = layout_.raw_offset(side, head, t);
            for (int n = 0; n < layout_.head_dim; ++n) {
              double exact = 0, size = 0;
              for (int k = 0; k < layout_.head_dim; ++k) {
                const double term =
                    double(LoadElement(pages_[i].get() + at, c.dtype, k)) * factor[k * layout_.head_dim + n];
                exact += term, size += std::abs(term);
              }
              const double x = LoadElement(mine.get() + at, DType::kFloat16, n);
              const double y = LoadElement(host_rotated.get() + at, DType::kFloat16, n);
              differing += x != y;
              ASSERT_LE(std::abs(x - y), StepAt(exact, true) + 1e-6 * size)
                  << i << " " << side << " " << head << " " << t;
            }
          }
        }
      }
      // The codes.
      EXPECT_EQ(flag, 0u) << i;
      const zack::EncodedPage wanted = zack::EncodeOne(rotated().inner(layer), layer, mine.get(), uint64_t(64 * i));
      ASSERT_FALSE(wanted.declined);
      ASSERT_EQ(std::memcmp(wanted.bytes.get(), got.data() + i * encoded_bytes, page_bytes), 0) << i;
    }
    EXPECT_EQ(declined_pages > 0, seed % 2 == 1);
    // Most elements are the CPU's to the bit.
    EXPECT_LT(differing, int(count * raw_bytes / 2 / 50));

    // And back.
    const TestArray<uint8_t> decoded(count * raw_bytes);
    std::vector<DeviceDecodeItem> decode(count);
    for (int i = 0; i < count; ++i) {
      decode[i] = {encoded.data() + i * encoded_bytes, decoded.data() + i * raw_bytes, LayerOf(i)};
    }
    const TestArray<DeviceDecodeItem> device_decode(decode);
    const absl::Status decoding = device_codec_->Decode(device_decode.data(), count, nullptr);
    ASSERT_TRUE(decoding.ok()) << decoding;
    ASSERT_CUDA(cudaDeviceSynchronize());
    const std::vector<uint8_t> back = decoded.Read();
    for (int i = 0; i < count; ++i) {
      const int layer = int(LayerOf(i));
      const Memory page = zack::MakeMemory(encoded_bytes), wanted = zack::MakeMemory(raw_bytes);
      std::memcpy(page.get(), got.data() + i * encoded_bytes, encoded_bytes);
      const DecodeItem item = {page.get(), wanted.get(), uint32_t(layer)};
      codec_->Decode({&item, 1});
      double error = 0, norm = 0;
      for (size_t n = 0; n < raw_bytes / 2; ++n) {
        const double x = LoadElement(back.data() + i * raw_bytes, c.dtype, n),
                     y = LoadElement(wanted.get(), c.dtype, n);
        ASSERT_TRUE(std::isfinite(x));
        error += (x - y) * (x - y), norm += y * y;
      }
      ASSERT_LE(std::sqrt(error), 1e-3 * std::sqrt(norm) + 1e-12) << i;
    }
  }
}

TEST_F(ZackHackEncodeGpu, InAGraphAndInPieces) {
  Open(kCases[0], 8);
  // More pages than the scratch memory holds at once.
  const int count = 300;
  const size_t raw_bytes = layout_.raw_bytes(), encoded_bytes = codec_->info().encoded_bytes;
  FillPages(4, 9);
  const TestArray<uint8_t> raw(4 * raw_bytes), encoded(count * encoded_bytes);
  const TestArray<uint32_t> declined(count);
  for (int i = 0; i < 4; ++i) {
    ASSERT_CUDA(cudaMemcpy(raw.data() + i * raw_bytes, pages_[i].get(), raw_bytes, cudaMemcpyHostToDevice));
  }
  std::vector<DeviceEncodeItem> items(count);
  for (int i = 0; i < count; ++i) {
    items[i] = {raw.data() + i % 4 * raw_bytes, encoded.data() + i * encoded_bytes, 0, uint32_t(i / 4 % kLayers)};
  }
  const TestArray<DeviceEncodeItem> device_items(items);
  cudaStream_t stream;
  ASSERT_CUDA(cudaStreamCreate(&stream));
  ASSERT_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  const absl::Status status = device_codec_->Encode(device_items.data(), count, declined.data(), stream);
  cudaGraph_t graph;
  ASSERT_CUDA(cudaStreamEndCapture(stream, &graph));
  ASSERT_TRUE(status.ok()) << status;
  cudaGraphExec_t ready;
  ASSERT_CUDA(cudaGraphInstantiate(&ready, graph, 0));
  for (int i = 0; i < 2; ++i) ASSERT_CUDA(cudaGraphLaunch(ready, stream));
  ASSERT_CUDA(cudaStreamSynchronize(stream));
  const std::vector<uint8_t> replayed = encoded.Read();
  ASSERT_CUDA(cudaMemset(encoded.data(), 0xff, count * encoded_bytes));
  ASSERT_TRUE(device_codec_->Encode(device_items.data(), count, declined.data(), stream).ok());
  ASSERT_CUDA(cudaStreamSynchronize(stream));
  const std::vector<uint8_t> direct = encoded.Read();
  for (int i = 0; i < count; ++i) {
    const size_t bytes = codec_->info().page_bytes(i / 4 % kLayers);
    ASSERT_EQ(std::memcmp(replayed.data() + i * encoded_bytes, direct.data() + i * encoded_bytes, bytes), 0) << i;
    ASSERT_EQ(std::memcmp(direct.data() + i * encoded_bytes, direct.data() + i % 12 * encoded_bytes, bytes), 0) << i;
  }
  cudaGraphExecDestroy(ready);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace kvmanager::zack_hack
