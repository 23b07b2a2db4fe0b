#include <cstring>
#include <random>
#include <vector>

#include "codecs/raw/raw.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

CodecRegistry Registry() {
  CodecRegistry registry;
  RegisterRaw(registry);
  return registry;
}

TEST(RawCodecTest, EncodesToTheSameBytesAndBack) {
  const PageLayout layout{DType::kBFloat16, 3, 48, 16};
  const auto codec = Registry().Create("raw", layout);
  ASSERT_TRUE(codec.ok()) << codec.status();
  EXPECT_TRUE((*codec)->info().identity);
  EXPECT_EQ((*codec)->info().encoded_bytes, layout.raw_bytes());
  EXPECT_EQ((*codec)->info().encoded_bytes % 64, 0);
  std::vector<uint8_t> raw(layout.raw_bytes()), encoded(raw.size()), back(raw.size());
  std::mt19937 random(1);
  for (uint8_t& b : raw) b = uint8_t(random());
  EncodeItem item{raw.data(), encoded.data(), 0, 0, true};
  (*codec)->Encode({&item, 1}, {});
  EXPECT_FALSE(item.declined);
  EXPECT_EQ(encoded, raw);
  const DecodeItem decode{encoded.data(), back.data()};
  (*codec)->Decode({&decode, 1});
  EXPECT_EQ(back, raw);
}

TEST(RawCodecTest, ValidateRefusesSizesAndValuesThatAreNotFinite) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const PageLayout layout{dtype, 1, 16, 16};
    const auto codec = Registry().Create("raw", layout);
    ASSERT_TRUE(codec.ok());
    std::vector<uint8_t> page(layout.raw_bytes());
    EXPECT_TRUE((*codec)->Validate(0, page).ok());
    StoreElement(page.data(), dtype, 100, 1.0f);
    EXPECT_TRUE((*codec)->Validate(0, page).ok());
    StoreElement(page.data(), dtype, 100, -INFINITY);
    const absl::Status status = (*codec)->Validate(0, page);
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_EQ(DetailOf(status).field, "encoded page element 100");
    page.pop_back();
    EXPECT_EQ((*codec)->Validate(0, page).code(), absl::StatusCode::kDataLoss);
  }
}

TEST(RawCodecTest, RefusesParametersAndLayoutsByName) {
  const CodecRegistry registry = Registry();
  const PageLayout good{DType::kFloat16, 1, 64, 64};
  EXPECT_EQ(DetailOf(registry.Create("raw:k_bits=2", good).status()).value, "\"k_bits\"");
  const auto field = [&](const PageLayout& layout) { return DetailOf(registry.Create("raw", layout).status()).field; };
  EXPECT_EQ(field({DType::kFloat32, 1, 64, 64}), "dtype");
  EXPECT_EQ(field({DType::kFloat16, 0, 64, 64}), "kv_heads");
  EXPECT_EQ(field({DType::kFloat16, 1, 72, 64}), "head_dim");
  EXPECT_EQ(field({DType::kFloat16, 1, 272, 64}), "head_dim");
  EXPECT_EQ(field({DType::kFloat16, 1, 64, 8}), "page_tokens");
  EXPECT_EQ(field({DType::kFloat16, 1, 64, 272}), "page_tokens");
}

}  // namespace
}  // namespace kvmanager
