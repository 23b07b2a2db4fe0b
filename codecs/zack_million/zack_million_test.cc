#include "codecs/zack_million/zack_million.h"

#include <cmath>

#include "codecs/zack_hack/rotated_codec.h"
#include "codecs/zack_hack/stack_testing.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr PageLayout kLayout = {DType::kFloat16, 2, 64, 64};

class OneArtifact final : public CalibrationSource {
 public:
  absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view name) override { return artifact; }
  std::shared_ptr<const Calibration> artifact;
};

class ZackMillionTest : public testing::Test {
 protected:
  ZackMillionTest() : context_(zack::SyntheticContext(kLayout, 2, 4, {"zack+million:m=32,bits=8"})) {
    source_.artifact = context_.calibration;
    registry_.SetCalibrations(&source_);
    RegisterZackMillion(registry_);
  }
  OneArtifact source_;
  CodecRegistry registry_;
  CodecContext context_;
};

TEST_F(ZackMillionTest, EncodesRotatedPagesWithTheInnerCodec) {
  std::mt19937_64 random(1);
  for (const char* mode : {"joint", "balanced"}) {
    const auto codec =
        registry_.Create(absl::StrCat("zack+million:m=32,bits=8,mode=", mode, ",calibration=any"), context_);
    ASSERT_TRUE(codec.ok()) << codec.status();
    EXPECT_EQ((*codec)->info().name, "zack+million");
    EXPECT_EQ((*codec)->info().spec.find(absl::StrCat("zack+million:mode=", mode, ",fold=0,")), 0u);
    EXPECT_EQ((*codec)->info().calibration_digest, context_.calibration->digest());
    const auto& rotated_codec = dynamic_cast<const zack::RotatedCodec&>(**codec);
    const zack::Memory raw = zack::RandomRawPage(kLayout, random), rotated = zack::MakeMemory(kLayout.raw_bytes()),
                       rows = zack::MakeMemory(64 * 64 * 4), inner_raw = zack::MakeMemory(kLayout.raw_bytes()),
                       decoded = zack::MakeMemory(kLayout.raw_bytes());
    for (int layer = 0; layer < 2; ++layer) {
      const auto page = zack::EncodeOne(**codec, layer, raw.get());
      ASSERT_FALSE(page.declined);
      ASSERT_TRUE(rotated_codec.Rotate(raw.get(), layer, rotated.get(), reinterpret_cast<float*>(rows.get())));
      const auto inner = zack::EncodeOne(rotated_codec.inner(layer), layer, rotated.get());
      const size_t bytes = (*codec)->info().page_bytes(layer);
      EXPECT_EQ(std::memcmp(page.bytes.get(), inner.bytes.get(), bytes), 0);
      EXPECT_TRUE((*codec)->Validate(layer, {page.bytes.get(), bytes}).ok());

      const DecodeItem inner_item = {inner.bytes.get(), inner_raw.get(), uint32_t(layer)};
      rotated_codec.inner(layer).Decode(absl::MakeConstSpan(&inner_item, 1));
      const DecodeItem item = {page.bytes.get(), decoded.get(), uint32_t(layer)};
      (*codec)->Decode(absl::MakeConstSpan(&item, 1));
      const std::vector<float>& decode = rotated_codec.rotation(layer, 1).decode[1];
      const size_t at = kLayout.raw_offset(1, 1, 7);
      for (int c = 0; c < 64; ++c) {
        double wanted = 0;
        for (int i = 0; i < 64; ++i) {
          wanted += double(LoadElement(inner_raw.get() + at, DType::kFloat16, i)) * decode[size_t(i) * 64 + c];
        }
        EXPECT_NEAR(LoadElement(decoded.get() + at, DType::kFloat16, c), wanted, 1e-3 * (1 + std::abs(wanted)));
      }
    }
  }
}

TEST_F(ZackMillionTest, AttentionMapsAndIsTheInnerCodecs) {
  const auto codec = registry_.Create("zack+million:m=32,bits=8,fold=1,calibration=any", context_);
  ASSERT_TRUE(codec.ok()) << codec.status();
  EXPECT_TRUE((*codec)->attention().maps(1));
  EXPECT_TRUE((*codec)->attention().folds_output(1));
  std::vector<float> factor(64 * 64);
  EXPECT_TRUE((*codec)->OutputFactor(1, 0, absl::MakeSpan(factor)));
}

TEST_F(ZackMillionTest, RefusesWhatItCannotDo) {
  for (const char* spec : {"zack+million:m=32,bits=8", "zack+million:m=32,bits=8,scope=model,calibration=any",
                           "zack+million:m=32,bits=7,calibration=any", "zack+million:fold=2,calibration=any",
                           "zack+million:mode=x,calibration=any", "zack+million:part=2,calibration=any"}) {
    EXPECT_FALSE(registry_.Create(spec, context_).ok()) << spec;
  }
  EXPECT_EQ(registry_.Create("zack+million:m=32,bits=8", context_).status().code(),
            absl::StatusCode::kFailedPrecondition);
  const absl::Status unknown = registry_.Create("zack+million:m=32,foo=1,calibration=any", context_).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailOf(unknown).field, "codec zack+million parameter");
  EXPECT_EQ(DetailOf(unknown).value, "\"foo\"");
  EXPECT_EQ(DetailOf(unknown).bound, "one of mode, fold, m, bits, k_m, k_bits, v_m, v_bits, scope, calibration");
}

}  // namespace
}  // namespace kvmanager
