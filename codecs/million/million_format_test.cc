#include "codecs/million/million_format.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <set>

#include "codecs/million/million_testing.h"
#include "gtest/gtest.h"

namespace kvmanager::million {
namespace {

constexpr PageLayout kLayout = {DType::kFloat16, 2, 128, 64};

MillionParameters Parse(absl::string_view spec, const PageLayout& layout = kLayout) {
  const auto parsed = ParseMillionParameters(ParseCodecSpec(spec)->parameters, layout);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return *parsed;
}

ErrorDetail Refused(absl::string_view spec, const PageLayout& layout = kLayout) {
  const auto parsed = ParseMillionParameters(ParseCodecSpec(spec)->parameters, layout);
  EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << spec;
  return DetailOf(parsed.status());
}

TEST(MillionFormat, ParametersAndTheirCanonicalText) {
  EXPECT_EQ(MillionSpec(Parse("million")), "million:k_m=64,k_bits=8,v_m=64,v_bits=8,scope=head");
  EXPECT_EQ(MillionSpec(Parse("million:m=32,bits=12")), "million:k_m=32,k_bits=12,v_m=32,v_bits=12,scope=head");
  EXPECT_EQ(MillionSpec(Parse("million:v_m=32,bits=6,k_bits=4,scope=model")),
            "million:k_m=64,k_bits=4,v_m=32,v_bits=6,scope=model");
  EXPECT_EQ(Parse("million", MakeLayout(1, 80, 64)).side[0].m, 40);
  EXPECT_EQ(Parse("million", MakeLayout(1, 64, 64)).side[0].m, 32);  // one channel a sub-space would be 8 bits each
  EXPECT_EQ(Parse("million", MakeLayout(1, 256, 64)).side[1].m, 128);
}

TEST(MillionFormat, RefusesByName) {
  EXPECT_EQ(Refused("million:m=48").field, "codec parameter m");
  EXPECT_EQ(Refused("million:m=0").value, "\"0\"");
  EXPECT_EQ(Refused("million:k_m=256").bound, "1..128, a divisor of head_dim 128");
  EXPECT_EQ(Refused("million:bits=3").bound, "4..12");
  EXPECT_EQ(Refused("million:v_bits=13").field, "codec parameter v_bits");
  EXPECT_EQ(Refused("million:v_bits=8x").value, "\"8x\"");
  EXPECT_EQ(Refused("million:v_bits= 8").value, "\" 8\"");
  EXPECT_EQ(Refused("million:scope=layer").bound, "head or model");
  EXPECT_EQ(Refused("million:window=3").value, "\"window\"");
  EXPECT_EQ(Refused("million", MakeLayout(1, 128, 80)).field, "page_tokens");
  EXPECT_EQ(Refused("million", MakeLayout(1, 128, 32)).field, "page_tokens");
  EXPECT_EQ(Refused("million", MakeLayout(0, 128, 64)).field, "kv_heads");
  EXPECT_EQ(Refused("million", MakeLayout(1, 120, 64)).field, "head_dim");
  EXPECT_EQ(Refused("million", MakeLayout(1, 128, 64, DType::kFloat32)).field, "dtype");
}

TEST(MillionFormat, BytesOfThePapersConfigurations) {
  const MillionFormat four = MakeFormat(kLayout, {64, 8}, {64, 8});
  EXPECT_EQ(four.payload_bytes, 128 * 64 * 2);
  EXPECT_EQ(four.page_bytes, four.payload_bytes);
  const MillionFormat three = MakeFormat(kLayout, {32, 12}, {32, 12});
  EXPECT_EQ(three.payload_bytes, 96 * 64 * 2);
  const MillionFormat mixed = MakeFormat(kLayout, {64, 8}, {32, 8});
  EXPECT_EQ(mixed.payload_bytes, 96 * 64 * 2);
  EXPECT_EQ(mixed.side[kSideV].offset, 64 * 64u);
}

TEST(MillionFormat, IndicesOfEveryWidthFillTheirStripExactly) {
  std::mt19937 random(1);
  for (int bits = kBitsMin; bits <= kBitsMax; ++bits) {
    for (int m : {1, 2, 5, 16, 80}) {
      SCOPED_TRACE(testing::Message() << "m " << m << " bits " << bits);
      const MillionFormat format = MakeFormat(MakeLayout(3, 80, 128), {m, bits}, {80, 4});
      const SideLayout& side = format.side[kSideK];
      EXPECT_EQ(side.strip_bytes, 8u * m * bits);
      EXPECT_EQ(side.end - side.offset, 2 * side.strip_bytes);
      EXPECT_GE(format.side[kSideV].offset, side.end);
      EXPECT_LT(format.side[kSideV].offset, side.end + 64);
      EXPECT_EQ(format.side[kSideV].offset % 64, 0u);
      EXPECT_EQ(format.record_bytes % 64, 0u);
      EXPECT_EQ(format.page_bytes, 3 * format.record_bytes);
      EXPECT_EQ(format.payload_bytes, 3u * 128 * (m * bits + 80 * 4) / 8);

      std::vector<uint16_t> indices(m * kStripTokens), got(kStripTokens);
      for (uint16_t& index : indices) index = uint16_t(random() % side.centroids);
      std::vector<uint8_t> one_by_one(side.strip_bytes), packed(side.strip_bytes, 0xee);
      for (int s = 0; s < m; ++s) {
        for (int t = 0; t < kStripTokens; ++t) PutIndex(side, one_by_one.data(), s, t, indices[s * kStripTokens + t]);
        PackIndices(side, &indices[s * kStripTokens], s, packed.data());
      }
      ASSERT_EQ(one_by_one, packed);
      for (int s = 0; s < m; ++s) {
        UnpackIndices(side, packed.data(), s, got.data());
        for (int t = 0; t < kStripTokens; ++t) {
          ASSERT_EQ(got[t], indices[s * kStripTokens + t]);
          ASSERT_EQ(IndexAt(side, packed.data(), s, t), got[t]);
        }
      }
    }
  }
}

// The layout that the header states, byte by byte.
TEST(MillionFormat, PlanesLieWhereTheHeaderSays) {
  const SideLayout twelve = MakeFormat(kLayout, {32, 12}, {64, 8}).side[kSideK];
  std::vector<uint8_t> strip(twelve.strip_bytes);
  PutIndex(twelve, strip.data(), 3, 40, 0xabc);
  EXPECT_EQ(strip[3 * 64 + 40], 0xbc);
  EXPECT_EQ(strip[32 * 64 + 3 * 32 + 8], 0xa0);
  const SideLayout seven = MakeFormat(kLayout, {64, 7}, {64, 8}).side[kSideK];
  strip.assign(seven.strip_bytes, 0);
  PutIndex(seven, strip.data(), 2, 37, 0x65);  // 1, 10, 0101
  EXPECT_EQ(strip[2 * 32 + 5], 0x50);
  EXPECT_EQ(strip[64 * 32 + 2 * 16 + 5], 2 << 4);
  EXPECT_EQ(strip[64 * 48 + 2 * 8 + 4], 1 << 5);
}

}  // namespace
}  // namespace kvmanager::million
