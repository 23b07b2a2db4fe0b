#include "codecs/million/million_kernels.h"

#include <cstring>
#include <random>

#include "codecs/million/million_reference.h"
#include "codecs/million/million_testing.h"
#include "gtest/gtest.h"

namespace kvmanager::million {
namespace {

// Instrumented builds check a sample of the shapes.
#if defined(KVMANAGER_SANITIZED)
constexpr int kSample = 5;
#else
constexpr int kSample = 1;
#endif

/// A raw page, encoded by the reference and by every instruction set.
void ExpectReferenceBytes(const MillionFormat& format, const Books& books, int layer, const uint8_t* raw) {
  AlignedArray<uint8_t> expected = MakeAligned<uint8_t>(format.page_bytes),
                        got = MakeAligned<uint8_t>(format.page_bytes);
  ReferenceEncode(format, *books.tables, raw, layer, expected.get());
  const size_t bytes = EncodeWorkspaceBytes(format);
  AlignedArray<uint8_t> workspace = MakeAligned<uint8_t>(bytes);
  for (Isa isa : SupportedIsas()) {
    SCOPED_TRACE(IsaName(isa));
    std::memset(got.get(), 0xee, format.page_bytes);
    std::memset(workspace.get(), 0xff, bytes);
    EncodePage(format, *books.tables, raw, layer, got.get(), workspace.get(), isa);
    ASSERT_EQ(0, std::memcmp(expected.get(), got.get(), format.page_bytes));
  }
}

AlignedArray<uint8_t> RandomPage(const PageLayout& layout, uint32_t seed, float spread = 1) {
  AlignedArray<uint8_t> raw = MakeAligned<uint8_t>(layout.raw_bytes());
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, spread);
  for (size_t i = 0; i < layout.raw_bytes() / 2; ++i) StoreElement(raw.get(), layout.dtype, i, normal(random));
  return raw;
}

TEST(MillionKernels, EveryWidthAndNumberOfBitsEncodesAsTheReference) {
  uint32_t seed = 1;
  for (int bits = kBitsMin; bits <= kBitsMax; ++bits) {
    for (int width : {1, 2, 3, 4, 8, 48}) {
      if (++seed % kSample != 0) continue;
      SCOPED_TRACE(testing::Message() << "bits " << bits << " width " << width);
      const PageLayout layout = MakeLayout(1, 48, 64, seed % 2 ? DType::kFloat16 : DType::kBFloat16);
      const MillionFormat format = MakeFormat(layout, {48 / width, bits}, {12, 4});
      ExpectReferenceBytes(format, Books(format, 1, seed), 0, RandomPage(layout, seed).get());
    }
  }
}

TEST(MillionKernels, HeadsLayersAndStripsUseTheirOwnCodebooks) {
  const PageLayout layout = MakeLayout(3, 128, 128);
  const MillionFormat format = MakeFormat(layout, {64, 6}, {32, 5});
  const Books books(format, 2, 5);
  for (int layer = 0; layer < 2; ++layer) ExpectReferenceBytes(format, books, layer, RandomPage(layout, layer).get());
}

TEST(MillionKernels, TiesTakeTheLowestIndex) {
  const PageLayout layout = MakeLayout(1, 32, 64);
  const MillionFormat format = MakeFormat(layout, {16, 6}, {32, 4});
  // Every centroid four times; raw values lie half way between neighbours.
  const Books books(format, 1, 1, [](int side, int channel, int index) { return float(index / 4); });
  AlignedArray<uint8_t> raw = MakeAligned<uint8_t>(layout.raw_bytes());
  for (size_t i = 0; i < layout.raw_bytes() / 2; ++i) StoreElement(raw.get(), layout.dtype, i, float(i % 5) + 0.5f);
  ExpectReferenceBytes(format, books, 0, raw.get());
  AlignedArray<uint8_t> page = MakeAligned<uint8_t>(format.page_bytes);
  ReferenceEncode(format, *books.tables, raw.get(), 0, page.get());
  for (int side = 0; side < 2; ++side) {
    for (int m = 0; m < format.side[side].subspaces; ++m) {
      for (int t = 0; t < 64; ++t) {
        ASSERT_EQ(IndexAt(format.side[side], page.get() + format.side[side].offset, m, t) % 4, 0);
      }
    }
  }
}

TEST(MillionKernels, ExtremeValuesEncodeAlikeEverywhere) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const PageLayout layout = MakeLayout(1, 32, 64, dtype);
    const MillionFormat format = MakeFormat(layout, {16, 8}, {8, 7});
    AlignedArray<uint8_t> raw = RandomPage(layout, 3);
    const float largest = dtype == DType::kFloat16 ? 65504.0f : 3.3e38f;
    for (size_t i = 0; i < layout.raw_bytes() / 2; i += 3) {
      StoreElement(raw.get(), dtype, i, i % 2 ? largest : -largest);
      StoreElement(raw.get(), dtype, i + 1, i % 2 ? 0.0f : 6e-8f);
    }
    ExpectReferenceBytes(format, Books(format, 1, 4), 0, raw.get());
    ExpectReferenceBytes(format,
                         Books(format, 1, 4, [](int, int, int index) { return index % 2 ? 65504.0f : -65504.0f; }), 0,
                         raw.get());
    ExpectReferenceBytes(format, Books(format, 1, 4, [](int, int channel, int) { return channel * 0.5f; }), 0,
                         raw.get());
    ExpectReferenceBytes(format, Books(format, 1, 4, [](int, int, int) { return 0.0f; }), 0, raw.get());
  }
}

TEST(MillionKernels, TheNearestCentroidIsTheNearest) {
  const PageLayout layout = MakeLayout(1, 32, 64);
  const MillionFormat format = MakeFormat(layout, {16, 8}, {8, 8});
  const Books books(format, 1, 11);
  const AlignedArray<uint8_t> raw = RandomPage(layout, 12);
  AlignedArray<uint8_t> page = MakeAligned<uint8_t>(format.page_bytes);
  ReferenceEncode(format, *books.tables, raw.get(), 0, page.get());
  for (int side = 0; side < 2; ++side) {
    const SideLayout& s = format.side[side];
    const SideTable& table = books.tables->at(side, 0, 0);
    for (int t = 0; t < 64; ++t) {
      for (int m = 0; m < s.subspaces; ++m) {
        const auto distance = [&](int index) {
          double sum = 0;
          for (int c = m * s.width; c < (m + 1) * s.width; ++c) {
            const double x = LoadElement(raw.get() + layout.raw_offset(side, 0, t), layout.dtype, c);
            const int code = CodeOf(side, table.by_channel[size_t(c) * table.entries + index]);
            const double y = table.mid[c] + double(table.step[c]) * code;
            // The table itself is within half a step of the codebook.
            const double book =
                HalfToFloat(books.books.side[side][0][(size_t(m) * s.centroids + index) * s.width + c % s.width]);
            EXPECT_LE(std::abs(y - book), 0.501 * table.step[c]);
            sum += (x - y) * (x - y);
          }
          return sum;
        };
        const double chosen = distance(IndexAt(s, page.get() + s.offset, m, t));
        double least = chosen;
        for (int i = 0; i < s.centroids; i += kSample) least = std::min(least, distance(i));
        ASSERT_LE(chosen, least + 1e-5);
      }
    }
  }
}

TEST(MillionKernels, DecodesWhatTheReferenceSays) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const PageLayout layout = MakeLayout(2, 48, 128, dtype);
    const MillionFormat format = MakeFormat(layout, {16, 11}, {24, 5});
    const Books books(format, 2, 8);
    AlignedArray<uint8_t> page = MakeAligned<uint8_t>(format.page_bytes),
                          raw = MakeAligned<uint8_t>(layout.raw_bytes());
    std::mt19937 random(3);
    for (uint32_t i = 0; i < format.page_bytes; ++i) page[i] = uint8_t(random());
    DecodePage(format, *books.tables, page.get(), 1, raw.get());
    for (int head = 0; head < 2; ++head) {
      for (int side = 0; side < 2; ++side) {
        const std::vector<float> values = ReferenceValues(format, *books.tables, page.get(), 1, head, side);
        for (size_t i = 0; i < values.size(); ++i) {
          const uint8_t* at = raw.get() + layout.raw_offset(side, head, 0) + 2 * i;
          uint16_t bits;
          std::memcpy(&bits, at, 2);
          ASSERT_EQ(bits, dtype == DType::kFloat16 ? FloatToHalf(values[i]) : FloatToBFloat16(values[i]));
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvmanager::million
