#include "codecs/registry.h"

#include <string>

#include "gtest/gtest.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

TEST(ParseCodecSpecTest, ReadsNameAndParameters) {
  const auto bare = ParseCodecSpec("raw");
  ASSERT_TRUE(bare.ok());
  EXPECT_EQ(bare->name, "raw");
  EXPECT_TRUE(bare->parameters.empty());
  const auto spec = ParseCodecSpec("hack:k_bits=3,k_axis=token");
  ASSERT_TRUE(spec.ok());
  EXPECT_EQ(spec->name, "hack");
  EXPECT_EQ(spec->parameters, (CodecParameters{{"k_bits", "3"}, {"k_axis", "token"}}));
  EXPECT_EQ(ParseCodecSpec("a:b=c=d")->parameters.at("b"), "c=d");
}

TEST(ParseCodecSpecTest, RefusesWithFieldValueAndBound) {
  for (const char* text : {"", ":k=1", "HACK", "hack :k=1", "h\nack", "hack:", "hack:k", "hack:k=", "hack:=1",
                           "hack:k=1,", "hack:,k=1", "hack:k=1,,j=2", "hack:K=1", "hack:k=1,k=2"}) {
    const auto spec = ParseCodecSpec(text);
    ASSERT_FALSE(spec.ok()) << text;
    EXPECT_EQ(spec.status().code(), absl::StatusCode::kInvalidArgument) << text;
    const ErrorDetail detail = DetailOf(spec.status());
    EXPECT_FALSE(detail.field.empty()) << text;
    EXPECT_FALSE(detail.value.empty()) << text;
    EXPECT_FALSE(detail.bound.empty()) << text;
  }
  EXPECT_EQ(DetailOf(ParseCodecSpec("hack:k=1,k=2").status()).field, "codec parameter k");
  EXPECT_FALSE(ParseCodecSpec(std::string(5000, 'a')).ok());
}

TEST(CodecRegistryTest, CallsTheFactoryAndListsWhatItKnows) {
  CodecRegistry registry;
  CodecParameters seen;
  registry.Register("b", "the second",
                    [](const CodecContext&, const CodecParameters&) { return absl::NotFoundError("b's own"); });
  registry.Register("a", "the first", [&seen](const CodecContext& context, const CodecParameters& parameters) {
    seen = parameters;
    return InvalidField("head_dim", context.layout.head_dim, "even");
  });
  EXPECT_EQ(registry.Names(), (std::map<std::string, std::string>{{"a", "the first"}, {"b", "the second"}}));
  const PageLayout layout{DType::kFloat16, 1, 17, 64};
  EXPECT_EQ(registry.Create("a:x=1", layout).status().message(), "head_dim is 17, must be even");
  EXPECT_EQ(seen, (CodecParameters{{"x", "1"}}));
  EXPECT_EQ(registry.Create("b", layout).status().message(), "b's own");
  const absl::Status unknown = registry.Create("zip:k=1", layout).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailOf(unknown).value, "\"zip\"");
  EXPECT_EQ(DetailOf(unknown).bound, "one of a, b");
  EXPECT_FALSE(registry.Create("a:x", layout).ok());
}

TEST(CodecRegistryTest, ACachesTextGoesToThePolicyWithAPageOfSinks) {
  CodecRegistry registry;
  registry.Register("a", "the first",
                    [](const CodecContext&, const CodecParameters&) { return absl::NotFoundError("a's own"); });
  CodecContext context;
  context.layout = {DType::kFloat16, 1, 64, 128};
  EXPECT_EQ(registry.CreateForCache("a", context).status().message(), "a's own");
  std::string text;
  std::optional<uint64_t> sinks;
  registry.SetPolicyFactory([&](const CodecRegistry&, const CodecContext&, absl::string_view seen,
                                std::optional<uint64_t> default_sinks) -> absl::StatusOr<std::unique_ptr<Codec>> {
    text = std::string(seen);
    sinks = default_sinks;
    return absl::NotFoundError("the policy's own");
  });
  EXPECT_EQ(registry.Create("a", context).status().message(), "a's own");
  EXPECT_EQ(registry.Create("a;0=a", context).status().message(), "the policy's own");
  EXPECT_EQ(sinks, std::nullopt);
  for (const char* spec : {"a", "a;0=a"}) {
    EXPECT_EQ(registry.CreateForCache(spec, context).status().message(), "the policy's own");
    EXPECT_EQ(text, spec);
    EXPECT_EQ(sinks, 128);
  }
}

TEST(CodecRegistryTest, ArtifactsWithoutAUseAreRefused) {
  CodecContext context;
  EXPECT_TRUE(RefuseCalibration(context, "why").ok());
  context.calibration = *Calibration::Parse(SerializeCalibration({"model", "", 1, 1, 1, 16}, {}, {}), "file");
  const absl::Status status = RefuseCalibration(context, "why");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(DetailOf(status).field, "codec parameter calibration");
  EXPECT_EQ(DetailOf(status).value, context.calibration->digest());
  EXPECT_EQ(DetailOf(status).bound, "absent: why");
}

TEST(CodecRegistryTest, NumbersArePlainDecimals) {
  int i = 0;
  double d = 0;
  EXPECT_TRUE(ParseDecimal("48", &i) && i == 48);
  EXPECT_TRUE(ParseDecimal("-7", &i) && i == -7);
  EXPECT_TRUE(ParseDecimal("48.5", &d) && d == 48.5);
  EXPECT_TRUE(ParseDecimal("-.5", &d) && d == -0.5);
  EXPECT_TRUE(ParseDecimal("1e-05", &d) && d == 1e-05);  // as a canonical spec writes it
  for (const char* bad :
       {"", " 48", "48 ", "\t48", "48\n", "+48", "0x30", "0x1p4", "4 8", "48a", "--4", "nan", "inf", "infinity"}) {
    EXPECT_FALSE(ParseDecimal(bad, &i)) << bad;
    EXPECT_FALSE(ParseDecimal(bad, &d)) << bad;
  }
  EXPECT_FALSE(ParseDecimal("4.0", &i));
  EXPECT_FALSE(ParseDecimal("99999999999", &i));
  EXPECT_FALSE(ParseDecimal("9e10892", &d));
}

TEST(CodecRegistryDeathTest, ANameIsRegisteredOnce) {
  CodecRegistry registry;
  const auto factory = [](const CodecContext&, const CodecParameters&) { return absl::NotFoundError(""); };
  registry.Register("a", "", factory);
  EXPECT_DEATH(registry.Register("a", "", factory), "broken invariant");
}

}  // namespace
}  // namespace kvmanager
