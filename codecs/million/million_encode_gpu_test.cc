// The GPU's encoder and decoder against the CPU's, byte by byte: every format, ties, extremes, guard bytes around what
// is written.
#include <cuda_runtime_api.h>

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "codecs/million/million.h"
#include "codecs/million/million_reference.h"
#include "codecs/million/million_testing.h"
#include "gtest/gtest.h"
#include "kvmanager/memory/device_testing.h"

namespace kvmanager::million {
namespace {

constexpr size_t kGuardBytes = 256;
constexpr uint8_t kGuard = 0xa5;

enum class Data { kNormal, kZero, kConstant, kHalfWay, kExtreme };

class MillionGpu : public GpuTest {
 protected:
  /// Encodes and decodes a page of every kind of data on the GPU and on the CPU. read: whether by the reference too,
  /// which is slow.
  void Compare(const MillionFormat& format, const Books& books, uint32_t seed, bool read = false) {
    SCOPED_TRACE(testing::Message() << MillionSpec(format.parameters) << " d " << format.layout.head_dim << " page "
                                    << format.layout.page_tokens << " dtype " << int(format.layout.dtype) << " seed "
                                    << seed);
    const auto codec = MakeMillionCodec(format, books.books, "million");
    const auto device = codec->NewDeviceCodec();
    ASSERT_NE(device, nullptr);
    const Data kinds[] = {Data::kNormal, Data::kZero, Data::kConstant, Data::kHalfWay, Data::kExtreme};
    constexpr size_t kPages = std::size(kinds);
    const size_t raw_bytes = format.layout.raw_bytes();
    const size_t raw_stride = raw_bytes + kGuardBytes, stride = format.page_bytes + kGuardBytes;
    const auto raw = Pinned<uint8_t>(kPages * raw_stride), encoded = Pinned<uint8_t>(kPages * stride),
               decoded = Pinned<uint8_t>(kPages * raw_stride);
    const auto declined = Pinned<uint32_t>(kPages);
    const auto items = Pinned<DeviceEncodeItem>(kPages);
    const auto back = Pinned<DeviceDecodeItem>(kPages);
    std::memset(encoded.get(), kGuard, kPages * stride);
    std::memset(decoded.get(), kGuard, kPages * raw_stride);
    for (size_t i = 0; i < kPages; ++i) {
      Fill(format.layout, kinds[i], seed + uint32_t(i), raw.get() + i * raw_stride);
      const uint32_t layer = uint32_t(i) % uint32_t(books.books.layers);
      items[i] = {raw.get() + i * raw_stride, encoded.get() + i * stride, 64 * i, layer};
      back[i] = {encoded.get() + i * stride, decoded.get() + i * raw_stride, layer};
      declined[i] = 7;
    }
    ASSERT_TRUE(device->Encode(items.get(), kPages, declined.get(), nullptr).ok());
    ASSERT_TRUE(device->Decode(back.get(), kPages, nullptr).ok());
    ASSERT_CUDA(cudaDeviceSynchronize());
    const AlignedArray<uint8_t> workspace = MakeAligned<uint8_t>(codec->encode_workspace_bytes());
    const AlignedArray<uint8_t> page = MakeAligned<uint8_t>(raw_bytes), wanted = MakeAligned<uint8_t>(stride),
                                wanted_raw = MakeAligned<uint8_t>(raw_stride);
    for (size_t i = 0; i < kPages; ++i) {
      SCOPED_TRACE(testing::Message() << "data " << int(kinds[i]));
      std::memcpy(page.get(), raw.get() + i * raw_stride, raw_bytes);
      std::memset(wanted.get(), kGuard, stride);
      std::memset(wanted_raw.get(), kGuard, raw_stride);
      EncodeItem item;
      item.raw = page.get(), item.encoded = wanted.get(), item.layer = items[i].layer;
      codec->Encode(absl::MakeSpan(&item, 1), {workspace.get(), codec->encode_workspace_bytes()});
      EXPECT_EQ(declined[i], 0u);
      ASSERT_EQ(0, std::memcmp(wanted.get(), encoded.get() + i * stride, stride));
      const DecodeItem decode = {wanted.get(), wanted_raw.get(), items[i].layer};
      codec->Decode(absl::MakeConstSpan(&decode, 1));
      ASSERT_EQ(0, std::memcmp(wanted_raw.get(), decoded.get() + i * raw_stride, raw_stride));
      if (!read) continue;
      ReferenceEncode(format, *books.tables, page.get(), int(items[i].layer), wanted.get());
      ASSERT_EQ(0, std::memcmp(wanted.get(), encoded.get() + i * stride, format.page_bytes));
    }
  }

 private:
  static void Fill(const PageLayout& layout, Data kind, uint32_t seed, uint8_t* to) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 1);
    const float largest = layout.dtype == DType::kFloat16 ? 65504.0f : 3.3e38f;
    for (size_t i = 0; i < layout.raw_bytes() / 2; ++i) {
      float x = normal(random);
      if (kind == Data::kZero) x = 0;
      if (kind == Data::kConstant) x = float(i % layout.head_dim) / 16;
      if (kind == Data::kHalfWay) x = float(random() % 16) + 0.5f;
      if (kind == Data::kExtreme && random() % 2 == 0) x = random() % 2 ? largest : random() % 2 ? -largest : 6e-8f;
      StoreElement(to, layout.dtype, i, x);
    }
  }
};

TEST_F(MillionGpu, PairsEncodeAsTheReference) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const int page_tokens : {64, 128}) {
      const MillionFormat format = MakeFormat(MakeLayout(3, 128, page_tokens, dtype), {64, 8}, {64, 8});
      Compare(format, Books(format, 2, 1), 1, page_tokens == 64);
      // Every centroid four times; raw values half way between neighbours.
      Compare(format, Books(format, 1, 1, [](int, int, int index) { return float(index / 4); }), 2);
      Compare(format, Books(format, 1, 1, [](int, int, int index) { return float(index % 16); }), 3);
      Compare(format, Books(format, 1, 1, [](int, int, int) { return 0.0f; }), 4);
      Compare(format, Books(format, 1, 1, [](int, int channel, int) { return channel * 0.5f; }), 5);
      Compare(format, Books(format, 1, 1, [](int, int, int index) { return index % 2 ? 65504.0f : -65504.0f; }), 6);
    }
  }
  for (const int head_dim : {64, 96, 256}) {
    const MillionFormat format = MakeFormat(MakeLayout(2, head_dim, 64), {head_dim / 2, 8}, {head_dim / 2, 8});
    Compare(format, Books(format, 1, 7), 7);
  }
}

TEST_F(MillionGpu, SidesOfDifferentWidths) {
  for (const int page_tokens : {64, 128}) {
    const MillionFormat format = MakeFormat(MakeLayout(2, 128, page_tokens), {64, 8}, {32, 8});
    Compare(format, Books(format, 2, 11), 11, true);
  }
}

TEST_F(MillionGpu, EveryWidthAndNumberOfBitsEncodesAsTheCpu) {
  uint32_t seed = 1;
  for (int bits = kBitsMin; bits <= kBitsMax; ++bits) {
    for (const int width : {1, 2, 3, 4, 8, 48}) {
      ++seed;
      const PageLayout layout =
          MakeLayout(2, 48, seed % 3 == 0 ? 128 : 64, seed % 2 ? DType::kFloat16 : DType::kBFloat16);
      const MillionFormat format = MakeFormat(layout, {48 / width, bits}, {12, 4 + int(seed % 5)});
      Compare(format, Books(format, 2, seed), seed);
    }
  }
}

TEST_F(MillionGpu, OneCodebookForAllHeadsIsKeptOnce) {
  const MillionFormat format = MakeFormat(MakeLayout(2, 128, 64), {64, 8}, {64, 8});
  const Books books(format, 1, 9);
  MillionCodebooks shared;
  shared.layers = 3;
  for (int side = 0; side < 2; ++side) shared.side[side].assign(6, books.books.side[side][0]);
  const auto codec = MakeMillionCodec(format, shared, "million");
  const auto device = codec->NewDeviceCodec();
  ASSERT_NE(device, nullptr);
  EXPECT_NE(device->attention(0), nullptr);
  EXPECT_NE(device->attention_data(2), nullptr);
}

TEST_F(MillionGpu, FormatsWithoutKernelsHaveNoAttention) {
  const MillionFormat format = MakeFormat(MakeLayout(1, 128, 128), {32, 12}, {32, 12});  // pages of 128 tokens
  const Books books(format, 1, 9);
  const auto device = MakeMillionCodec(format, books.books, "million")->NewDeviceCodec();
  ASSERT_NE(device, nullptr);
  EXPECT_EQ(device->attention(0), nullptr);
  EXPECT_EQ(device->attention_data(0), nullptr);
}

}  // namespace
}  // namespace kvmanager::million
