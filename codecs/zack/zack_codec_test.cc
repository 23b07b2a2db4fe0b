#include "codecs/zack/zack_codec.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "codecs/zack/zack.h"
#include "codecs/zack/zack_reference.h"
#include "codecs/zack/zack_testing.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace kvmanager::zack {
namespace {

using testing::HasSubstr;

/// Encodes one page; *declined as the item says.
Bytes Encode(const ZackCodec& codec, int layer, const uint8_t* raw, bool* declined) {
  const size_t bytes = codec.info().page_bytes(layer);
  Bytes page = MakeBytes(bytes), workspace = MakeBytes(codec.encode_workspace_bytes());
  EncodeItem item;
  item.raw = raw;
  item.encoded = page.get();
  item.layer = layer;
  codec.Encode(absl::MakeSpan(&item, 1), absl::MakeSpan(workspace.get(), codec.encode_workspace_bytes()));
  *declined = item.declined;
  return page;
}

TEST(ZackCodec, EveryInstructionSetWritesTheReferencesBytes) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const char* mode : {"joint", "balanced"}) {
      const CodecContext context = MakeContext(MakeLayout(2, 96, 48, dtype), 2, 4);
      const std::vector<int32_t> ranks = {16, 96, 80, 48, 64, 16, 32, 96};
      std::mt19937_64 random(1);
      const Bytes raw = RandomPage(context.layout, random);
      for (Isa isa : SupportedIsas()) {
        const ZackCodec codec(MakeFormat(context, mode, false, ranks), nullptr, isa);
        for (int layer = 0; layer < 2; ++layer) {
          Bytes wanted = MakeBytes(codec.info().page_bytes(layer));
          ASSERT_TRUE(ReferenceEncode(codec.format(), layer, raw.get(), wanted.get()));
          bool declined;
          const Bytes page = Encode(codec, layer, raw.get(), &declined);
          EXPECT_FALSE(declined);
          EXPECT_EQ(std::memcmp(page.get(), wanted.get(), codec.info().page_bytes(layer)), 0) << IsaName(isa) << mode;
          EXPECT_TRUE(codec.Validate(layer, absl::MakeSpan(page.get(), codec.info().page_bytes(layer))).ok());
        }
      }
    }
  }
}

TEST(ZackCodec, PagesAreAsLargeAsTheirRanks) {
  const CodecContext context = MakeContext(MakeLayout(2, 64, 32), 3, 2);
  const ZackCodec alike(MakeFormat(context, "joint", false, {16, 32, 48, 64, 64, 48, 32, 16, 32, 32, 48, 48}), nullptr);
  EXPECT_TRUE(alike.info().layer_bytes.empty());
  EXPECT_EQ(alike.info().encoded_bytes, 160u * 32 * 2);
  EXPECT_EQ(alike.info().payload_bytes, 160u * 32 * 2);
  EXPECT_NEAR(alike.format().removed, 1 - 160.0 / 256, 1e-12);
  const ZackCodec differ(MakeFormat(context, "joint", false, {16, 16, 16, 16, 64, 64, 64, 64, 32, 32, 32, 48}),
                         nullptr);
  EXPECT_EQ(differ.info().layer_bytes, (std::vector<uint32_t>{64 * 64, 256 * 64, 144 * 64}));
  EXPECT_EQ(differ.info().encoded_bytes, 256u * 64);
  EXPECT_EQ(differ.info().payload_bytes, (64u + 256 + 144) * 64 / 3);
  EXPECT_THAT(differ.Describe(), HasSubstr("0.3958 of all dimensions removed"));
  EXPECT_THAT(differ.Describe(), HasSubstr("K ranks 16..64, mean 37.3; V ranks 16..64, mean 40.0"));
  for (int layer = 0; layer < 3; ++layer) {
    for (int h = 0; h < 2; ++h) {
      for (uint32_t offset : differ.format().head(layer, h).offset) EXPECT_EQ(offset % 64, 0u);
    }
  }
}

TEST(ZackCodec, DecodedPagesAreWhatTheProductsStandFor) {
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const CodecContext context = MakeContext(MakeLayout(2, 64, 16, dtype), 1, 4);
    const ZackCodec codec(MakeFormat(context, "balanced", false, {32, 16, 64, 64}), nullptr);
    std::mt19937_64 random(2);
    const Bytes raw = RandomPage(context.layout, random);
    bool declined;
    const Bytes page = Encode(codec, 0, raw.get(), &declined);
    ASSERT_FALSE(declined);
    Bytes decoded = MakeBytes(context.layout.raw_bytes());
    const DecodeItem item{page.get(), decoded.get(), 0};
    codec.Decode(absl::MakeConstSpan(&item, 1));
    const double rounding = dtype == DType::kFloat16 ? 0x1p-10 : 0x1p-7;
    for (int h = 0; h < 2; ++h) {
      const ZackHead& head = codec.format().head(0, h);
      for (int side = 0; side < 2; ++side) {
        const int n = head.rank[side];
        for (int t = 0; t < 16; ++t) {
          for (int c = 0; c < 64; ++c) {
            double wanted = 0, magnitude = 0;
            for (int i = 0; i < n; ++i) {
              const double term = double(LoadElement(page.get() + head.offset[side], DType::kFloat16, t * n + i)) *
                                  head.decode[side][i * 64 + c];
              wanted += term;
              magnitude += std::abs(term);
            }
            const double got = LoadElement(decoded.get() + context.layout.raw_offset(side, h, t), dtype, c);
            ASSERT_NEAR(got, wanted, magnitude * rounding);
            // All dimensions of a pair with left right^T = 1 give the page back.
            const double original = LoadElement(raw.get() + context.layout.raw_offset(side, h, t), dtype, c);
            if (n == 64) {
              ASSERT_NEAR(got, original, 0.02 + 0.02 * std::abs(original));
            }
          }
        }
      }
    }
  }
}

TEST(ZackCodec, DeclinesWhatFp16CannotHold) {
  const CodecContext context = MakeContext(MakeLayout(2, 32, 16, DType::kBFloat16), 1, 2);
  for (Isa isa : SupportedIsas()) {
    const ZackCodec codec(MakeFormat(context, "joint", false, {16, 32, 32, 16}), nullptr, isa);
    for (float large : {1e6f, -1e9f, 3e38f}) {
      for (int side = 0; side < 2; ++side) {
        std::mt19937_64 random(3);
        const Bytes raw = RandomPage(context.layout, random);
        for (int c = 0; c < 32; ++c) {
          StoreElement(raw.get() + context.layout.raw_offset(side, 1, 15), DType::kBFloat16, c, c % 2 ? large : -large);
        }
        bool declined;
        const Bytes page = Encode(codec, 0, raw.get(), &declined);
        EXPECT_TRUE(declined) << large << IsaName(isa);
        for (size_t i = 0; i < codec.info().encoded_bytes; ++i) ASSERT_EQ(page[i], 0);
      }
    }
  }
}

TEST(ZackCodec, RefusesHostilePagesAndDecodesThemToFiniteValues) {
  const CodecContext context = MakeContext(MakeLayout(2, 32, 16), 2, 2);
  const ZackCodec codec(MakeFormat(context, "balanced", false, {16, 32, 32, 16, 16, 16, 16, 16}), nullptr);
  std::mt19937_64 random(4);
  const Bytes raw = RandomPage(context.layout, random);
  bool declined;
  const Bytes page = Encode(codec, 0, raw.get(), &declined);
  const size_t bytes = codec.info().page_bytes(0);
  EXPECT_EQ(codec.Validate(0, absl::MakeSpan(page.get(), bytes - 1)).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(codec.Validate(1, absl::MakeSpan(page.get(), bytes)).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(codec.Validate(0, {}).code(), absl::StatusCode::kDataLoss);
  for (uint16_t bad : {0x7c00, 0xfc00, 0x7e00, 0xffff}) {
    for (size_t at : {size_t{0}, bytes / 2 - 1, bytes / 4}) {
      uint16_t good;
      std::memcpy(&good, page.get() + 2 * at, 2);
      std::memcpy(page.get() + 2 * at, &bad, 2);
      const absl::Status status = codec.Validate(0, absl::MakeSpan(page.get(), bytes));
      EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
      EXPECT_THAT(DetailOf(status).field, HasSubstr("encoded page head"));
      std::memcpy(page.get() + 2 * at, &good, 2);
    }
  }
  for (size_t i = 0; i < bytes / 2; ++i) StoreElement(page.get(), DType::kFloat16, i, i % 3 ? 65504 : -65504);
  ASSERT_TRUE(codec.Validate(0, absl::MakeSpan(page.get(), bytes)).ok());
  Bytes decoded = MakeBytes(context.layout.raw_bytes());
  const DecodeItem item{page.get(), decoded.get(), 0};
  codec.Decode(absl::MakeConstSpan(&item, 1));
  for (size_t i = 0; i < context.layout.raw_bytes() / 2; ++i) {
    ASSERT_TRUE(std::isfinite(LoadElement(decoded.get(), DType::kFloat16, i)));
  }
}

TEST(ZackCodec, OutputFactorIsLeftUpToTheRank) {
  const CodecContext context = MakeContext(MakeLayout(1, 32, 16), 1, 2);
  const ZackCodec plain(MakeFormat(context, "balanced", false, {16, 16}), nullptr);
  const ZackCodec folding(MakeFormat(context, "balanced", true, {16, 16}), nullptr);
  std::vector<float> factor(32 * 32, 7);
  EXPECT_FALSE(plain.OutputFactor(0, 0, absl::MakeSpan(factor)));
  EXPECT_FALSE(plain.attention().folds_output(0));
  ASSERT_TRUE(folding.OutputFactor(0, 0, absl::MakeSpan(factor)));
  EXPECT_TRUE(folding.attention().folds_output(0));
  const Factors factors = ReadFactors(context, "balanced").value();
  for (int r = 0; r < 32; ++r) {
    for (int c = 0; c < 32; ++c) EXPECT_EQ(factor[r * 32 + c], c < 16 ? factors.left_of(1, 0, 0)[r * 32 + c] : 0);
  }
}

// ---- parameters and artifacts ---------------------------------------------------------------------------------------

class OneCalibration final : public CalibrationSource {
 public:
  explicit OneCalibration(std::shared_ptr<const Calibration> calibration) : calibration_(std::move(calibration)) {}
  absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view) override { return calibration_; }

 private:
  std::shared_ptr<const Calibration> calibration_;
};

absl::StatusOr<std::unique_ptr<Codec>> Create(const CodecContext& context, const std::string& spec) {
  OneCalibration source(context.calibration);
  CodecRegistry registry;
  RegisterZack(registry);
  registry.SetCalibrations(&source);
  return registry.Create(spec, context);
}

TEST(ZackParameters, SpecIsCanonical) {
  const CodecContext context = MakeContext(MakeLayout(2, 64), 2, 4);
  const std::string digest = absl::StrCat(",calibration=", context.calibration->digest());
  const std::pair<const char*, const char*> specs[] = {
      {"zack:calibration=a", "zack:mode=balanced,rate=0.25,fold=0"},
      {"zack:rate=.50,calibration=a,fold=1", "zack:mode=balanced,rate=0.5,fold=1"},
      {"zack:mode=joint,calibration=a,rate=0", "zack:mode=joint,rate=0,fold=0"},
      {"zack:mode=joint,calibration=a,rate=-0", "zack:mode=joint,rate=0,fold=0"},
      {"zack:calibration=a,rate=1.23456789e-1", "zack:mode=balanced,rate=0.123457,fold=0"},
  };
  for (const auto& [given, canonical] : specs) {
    const auto codec = Create(context, given);
    ASSERT_TRUE(codec.ok()) << codec.status();
    const CodecInfo& info = (*codec)->info();
    EXPECT_EQ(info.spec, canonical + digest);
    EXPECT_EQ(info.calibration_digest, context.calibration->digest());
    EXPECT_EQ(info.version, 1u);
    const ZackFormat& format = static_cast<const ZackCodec&>(**codec).format();
    EXPECT_GE(format.removed, format.parameters.rate - 1e-6);
    const auto again = Create(context, info.spec);
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ((*again)->info().spec, info.spec);
    EXPECT_EQ((*again)->info().encoded_bytes, info.encoded_bytes);
  }
}

TEST(ZackParameters, RateZeroKeepsEverything) {
  const CodecContext context = MakeContext(MakeLayout(2, 64), 1, 4);
  const auto codec = Create(context, "zack:calibration=a,rate=0");
  ASSERT_TRUE(codec.ok());
  EXPECT_EQ((*codec)->info().encoded_bytes, context.layout.raw_bytes());
}

TEST(ZackParameters, BadOnesAreNamed) {
  const CodecContext context = MakeContext(MakeLayout(2, 64), 1, 4);
  const std::pair<const char*, const char*> bad[] = {
      {"zack:calibration=a,mode=both", "mode"},   {"zack:calibration=a,rate=nan", "rate"},
      {"zack:calibration=a,rate=-0.1", "rate"},   {"zack:calibration=a,rate=0.951", "rate"},
      {"zack:calibration=a,rate=half", "rate"},   {"zack:calibration=a,rate=inf", "rate"},
      {"zack:calibration=a,fold=2", "fold"},      {"zack:calibration=a,fold=true", "fold"},
      {"zack:calibration=a,bits=3", "parameter"}, {"zack:calibration=a,rate= 0.5", "rate"},
      {"zack:calibration=a,rate=0x0p0", "rate"},  {"zack:calibration=a,rate=+0.5", "rate"},
  };
  for (const auto& [spec, field] : bad) {
    const absl::Status status = Create(context, spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << spec;
    EXPECT_THAT(DetailOf(status).field, HasSubstr(field)) << spec;
  }
  EXPECT_EQ(Create(context, "zack").status().code(), absl::StatusCode::kFailedPrecondition);
  CodecContext odd = context;
  odd.layout.dtype = DType::kFloat32;
  EXPECT_EQ(MakeZackFormat(odd, {}).status().code(), absl::StatusCode::kInvalidArgument);
  odd = context;
  odd.layout.page_tokens = 24;
  EXPECT_EQ(MakeZackFormat(odd, {}).status().code(), absl::StatusCode::kInvalidArgument);
}

/// The synthetic artifact, some tensors changed.
class Artifact {
 public:
  explicit Artifact(const CodecContext& context)
      : context_(context), tensors_(context.calibration->tensors()), metadata_(context.calibration->metadata()) {
    metadata_.erase("digest");
  }
  Tensor& at(const std::string& name) { return tensors_.at(name); }
  void Erase(const std::string& name) { tensors_.erase(name); }
  TensorMetadata& metadata() { return metadata_; }

  template <typename T>
  void Set(const std::string& name, size_t index, T value) {
    Tensor& tensor = tensors_.at(name);
    kept_.emplace_back(tensor.bytes.begin(), tensor.bytes.end());
    KV_CHECK((index + 1) * sizeof(T) <= kept_.back().size());
    std::memcpy(kept_.back().data() + index * sizeof(T), &value, sizeof(T));
    tensor.bytes = kept_.back();
  }

  /// What opening a cache with it says.
  absl::Status Open(const std::string& spec = "zack:calibration=a") {
    auto calibration =
        Calibration::Parse(SerializeCalibration(context_.calibration->model(), tensors_, metadata_), "changed");
    if (!calibration.ok()) return calibration.status();
    CodecContext context = context_;
    context.calibration = *calibration;
    return Create(context, spec).status();
  }

 private:
  CodecContext context_;
  TensorMap tensors_;
  TensorMetadata metadata_;
  std::vector<std::vector<uint8_t>> kept_;
};

TEST(ZackArtifacts, AreRefusedWhereTheyDoNotFit) {
  const CodecContext context = MakeContext(MakeLayout(2, 32), 2, 4);
  ASSERT_TRUE(Artifact(context).Open().ok());
  for (const char* name : {"zack.balanced.qk.left", "zack.balanced.qk.right", "zack.balanced.vw.left",
                           "zack.balanced.vw.right", "zack.balanced.rates", "zack.balanced.ranks"}) {
    Artifact missing(context);
    missing.Erase(name);
    EXPECT_EQ(missing.Open().code(), absl::StatusCode::kFailedPrecondition) << name;
    EXPECT_THAT(std::string(missing.Open().message()), HasSubstr(name));
    EXPECT_TRUE(missing.Open("zack:mode=joint,calibration=a").ok()) << name;
    Artifact flat(context);
    uint64_t elements = 1;
    for (uint64_t n : flat.at(name).shape) elements *= n;
    flat.at(name).shape = {elements, 1};
    EXPECT_EQ(flat.Open().code(), absl::StatusCode::kInvalidArgument) << name;
    Artifact type(context);
    type.at(name).dtype = type.at(name).dtype == "F32" ? "I32" : "F32";
    EXPECT_EQ(type.Open().code(), absl::StatusCode::kInvalidArgument) << name;
  }
  for (float bad : {NAN, INFINITY, 1e13f}) {
    Artifact factor(context);
    factor.Set("zack.balanced.vw.left", 77, bad);
    EXPECT_EQ(factor.Open().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  for (int32_t bad : {0, 8, 17, 48, -16, 1 << 30}) {
    Artifact rank(context);
    rank.Set("zack.balanced.ranks", 3, bad);
    const absl::Status status = rank.Open();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(status.message()), HasSubstr("zack.balanced.ranks")) << bad;
  }
  for (float bad : {-0.5f, 2.0f, NAN}) {
    Artifact rates(context);
    rates.Set("zack.balanced.rates", 0, bad);
    EXPECT_EQ(rates.Open().code(), absl::StatusCode::kInvalidArgument) << bad;
  }
  Artifact empty(context);
  empty.at("zack.balanced.rates") = {"F32", {0}, {}};
  EXPECT_EQ(empty.Open().code(), absl::StatusCode::kInvalidArgument);
  Artifact mode(context);
  mode.metadata()["zack.mode"] = "best";
  EXPECT_EQ(mode.Open().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(mode.Open("zack:mode=joint,calibration=a").ok());
}

TEST(ZackArtifacts, TheirModeIsTheDefault) {
  const CodecContext context = MakeContext(MakeLayout(1, 32), 1, 2);
  Artifact joint(context);
  joint.metadata()["zack.mode"] = "joint";
  EXPECT_TRUE(joint.Open().ok());
  joint.Erase("zack.joint.ranks");
  EXPECT_EQ(joint.Open().code(), absl::StatusCode::kFailedPrecondition);
  Artifact silent(context);
  silent.metadata().erase("zack.mode");
  EXPECT_TRUE(silent.Open().ok());
  silent.Erase("zack.balanced.ranks");
  EXPECT_EQ(silent.Open().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(ZackArtifacts, RatesBeyondTheTableAreRefused) {
  const CodecContext context = MakeContext(MakeLayout(1, 32), 1, 2);
  // Two dimensions of 32 leave ranks 16 or 32: at most half can go.
  const absl::Status status = Create(context, "zack:calibration=a,rate=0.9").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(DetailOf(status).field, HasSubstr("rate"));
  EXPECT_THAT(DetailOf(status).bound, HasSubstr("at most 0.5"));
}

}  // namespace
}  // namespace kvmanager::zack
