#include "codecs/default/default_codec.h"

#include "codecs/zack_hack/stack_testing.h"
#include "gtest/gtest.h"

namespace kvmanager {
namespace {

constexpr PageLayout kLayout = {DType::kFloat16, 2, 64, 64};

class OneArtifact final : public CalibrationSource {
 public:
  absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view name) override { return artifact; }
  std::shared_ptr<const Calibration> artifact;
};

TEST(DefaultCodecTest, IsZackHackWithAnArtifactAndHackWithout) {
  CodecRegistry registry;
  RegisterDefaultCodec(registry);
  OneArtifact source;
  registry.SetCalibrations(&source);
  const CodecContext context = zack::SyntheticContext(kLayout, 2, 4);
  source.artifact = context.calibration;
  const auto calibrated = registry.Create("default:calibration=any", context);
  ASSERT_TRUE(calibrated.ok()) << calibrated.status();
  EXPECT_EQ((*calibrated)->info().name, "zack+hack");
  EXPECT_EQ((*calibrated)->info().calibration_digest, context.calibration->digest());

  TensorMap others;
  for (const auto& [name, tensor] : context.calibration->tensors()) {
    if (name.find("zack_hack.") == 0) others[name] = Tensor{};
  }
  source.artifact = zack::WithTensors(context, others).calibration;
  const auto without = registry.Create("default:calibration=any", context);
  EXPECT_EQ(without.status().code(), absl::StatusCode::kFailedPrecondition) << without.status();
  EXPECT_NE(without.status().message().find("kvctl calibrate --codec zack+hack"), absl::string_view::npos);

  const auto plain = registry.Create("default", context);
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ((*plain)->info().name, "hack");
  EXPECT_NE((*plain)->info().spec.find("k_bits=4,v_bits=3,"), std::string::npos) << (*plain)->info().spec;
  EXPECT_EQ((*plain)->info().calibration_digest, "");
}

TEST(DefaultCodecTest, HasNoParameters) {
  CodecRegistry registry;
  RegisterDefaultCodec(registry);
  CodecContext context;
  context.layout = kLayout;
  const auto codec = registry.Create("default:k_bits=2", context);
  ASSERT_FALSE(codec.ok());
  EXPECT_EQ(DetailOf(codec.status()).value, "\"k_bits\"");
}

}  // namespace
}  // namespace kvmanager
