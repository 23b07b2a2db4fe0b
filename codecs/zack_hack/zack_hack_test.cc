#include "codecs/zack_hack/zack_hack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "codecs/hack/hack_codec.h"
#include "codecs/hack/hack_reference.h"
#include "codecs/zack_hack/rotated_codec.h"
#include "codecs/zack_hack/sensitivity.h"
#include "codecs/zack_hack/stack_testing.h"
#include "gtest/gtest.h"

namespace kvmanager::zack_hack {
namespace {

using zack::EncodeOne;
using zack::MakeMemory;
using zack::SupportedIsas;
using zack::SyntheticContext;
using zack::WithLoudKeys;
using zack::WithTensors;

constexpr PageLayout kSmall = {DType::kFloat16, 2, 64, 64};
constexpr PageLayout kUsual = {DType::kFloat16, 2, 128, 64};

std::unique_ptr<Codec> Make(const CodecContext& context, const CodecParameters& parameters, Isa isa = BestIsa()) {
  auto codec = MakeCodec(context, parameters, isa);
  EXPECT_TRUE(codec.ok()) << codec.status();
  return codec.ok() ? *std::move(codec) : nullptr;
}

const hack::HackFormat& FormatOf(const Codec& codec, int layer) {
  return dynamic_cast<const hack::HackCodec&>(dynamic_cast<const zack::RotatedCodec&>(codec).inner(layer)).format();
}

double BytesPerToken(const Codec& codec) {
  return double(codec.info().payload_bytes) / codec.layout().page_tokens / codec.layout().kv_heads;
}
/// With padding, the mean of the layers.
double StoredPerToken(const Codec& codec, int layers) {
  uint64_t bytes = 0;
  for (int layer = 0; layer < layers; ++layer) bytes += codec.info().page_bytes(layer);
  return double(bytes) / layers / codec.layout().page_tokens / codec.layout().kv_heads;
}

TEST(ZackHackTest, CanonicalSpecAndInfo) {
  const CodecContext context = SyntheticContext(kUsual, 3, 8);
  const std::string digest = absl::StrCat(",calibration=", context.calibration->digest());
  const auto codec = Make(context, {});
  EXPECT_EQ(codec->info().name, "zack+hack");
  EXPECT_EQ(codec->info().spec, "zack+hack:mode=balanced,bytes=76,allocation=head,fold=0,v_norm=1" + digest);
  EXPECT_EQ(codec->info().calibration_digest, context.calibration->digest());
  EXPECT_FALSE(codec->info().identity);
  EXPECT_EQ(Make(context, {{"k_bits", "1.5"}})->info().spec,
            "zack+hack:mode=balanced,k_bits=1.5,v_bits=1,allocation=head,fold=0,v_norm=1" + digest);
  EXPECT_EQ(
      Make(context, {{"v_bits", "0.5"}, {"mode", "joint"}, {"allocation", "model"}, {"fold", "1"}, {"v_norm", "0"}})
          ->info()
          .spec,
      "zack+hack:mode=joint,k_bits=2,v_bits=0.5,allocation=model,fold=1,v_norm=0" + digest);
  EXPECT_EQ(codec->info().version, 2);
  const CodecContext trained =
      WithTensors(context, {}, {{"zack_hack.allocation", "model"}, {"zack_hack.mode", "joint"}});
  EXPECT_EQ(Make(trained, {{"bytes", "44.5"}})->info().spec,
            absl::StrCat("zack+hack:mode=joint,bytes=44.5,allocation=model,fold=0,v_norm=1,calibration=",
                         trained.calibration->digest()));
}

TEST(ZackHackTest, DefaultBytesFollowTheHeadsWidth) {
  for (const int d : {16, 32, 48, 64, 96, 128, 256}) {
    const PageLayout layout = {DType::kFloat16, 2, uint16_t(d), 64};
    for (const char* allocation : {"head", "model"}) {
      const auto codec = Make(SyntheticContext(layout, 3, 4), {{"allocation", allocation}});
      ASSERT_NE(codec, nullptr) << d;
      EXPECT_NE(codec->info().spec.find(absl::StrCat(",bytes=", d * 0.59375, ",")), std::string::npos)
          << codec->info().spec;
      EXPECT_LE(StoredPerToken(*codec, 3), d * 0.59375);
      EXPECT_GT(StoredPerToken(*codec, 3), d * 0.59375 - 2.125);
    }
  }
}

// The rows of reference.py: K2 V1, K1.5 V1, K1.25 V0.75, K1 V0.5; 0.125 bytes of tops. Norms are 1 byte and 2 of a
// page. A record is padded to 64 bytes.
TEST(ZackHackTest, BytesOfHeadAllocation) {
  const CodecContext context = SyntheticContext(kUsual, 2, 8);
  const struct {
    const char *bytes, *k_bits, *v_bits;
  } kRows[] = {{"56", "2", "1"}, {"48", "1.5", "1"}, {"40", "1.25", "0.75"}, {"32", "1", "0.5"}};
  for (const auto& row : kRows) {
    const std::string without = absl::StrCat(std::stod(row.bytes) + 1), with = absl::StrCat(std::stod(row.bytes) + 2);
    const auto plain = Make(context, {{"bytes", without}, {"allocation", "head"}, {"v_norm", "0"}});
    EXPECT_EQ(BytesPerToken(*plain), std::stod(row.bytes) + 0.125);
    EXPECT_EQ(StoredPerToken(*plain, 2), std::stod(row.bytes) + 1);
    const auto by_bytes = Make(context, {{"bytes", with}, {"allocation", "head"}});
    EXPECT_EQ(StoredPerToken(*by_bytes, 2), std::stod(row.bytes) + 2);
    const auto by_bits = Make(context, {{"k_bits", row.k_bits}, {"v_bits", row.v_bits}, {"allocation", "head"}});
    EXPECT_EQ(BytesPerToken(*by_bytes), std::stod(row.bytes) + 0.125 + 1 + 1 / 32.0);
    EXPECT_EQ(by_bytes->info().payload_bytes, by_bits->info().payload_bytes);
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < 2; ++head) {
        for (int side = 0; side < 2; ++side) {
          const auto& widths = FormatOf(*by_bytes, layer).heads[head].side[side].segment_bits;
          EXPECT_EQ(widths, FormatOf(*by_bits, layer).heads[head].side[side].segment_bits);
          EXPECT_EQ(widths, FormatOf(*plain, layer).heads[head].side[side].segment_bits);
        }
      }
    }
    EXPECT_TRUE(by_bytes->info().layer_bytes.empty());
  }
  // A multiple of 1/8 at 128 channels: what is between is rounded, ties to even.
  EXPECT_EQ(BytesPerToken(*Make(context, {{"k_bits", "1.3"}, {"v_bits", "0.5625"}})),
            8.125 + 1 + 1 / 32.0 + 16 * (1.25 + 0.5));
}

TEST(ZackHackTest, BytesOfModelAllocationAreNeverExceeded) {
  for (const PageLayout& layout : {kUsual, kSmall, PageLayout{DType::kFloat16, 3, 256, 192}}) {
    const CodecContext context = SyntheticContext(layout, 3, 6);
    // Steps, minima and norms of a byte; tops of 16 bytes a side; both sides together in lines of 64 bytes; in eighths.
    const uint32_t beside = 4 * layout.head_dim * layout.page_tokens / 64 + layout.page_tokens + 2 * 16;
    const double meta = std::ceil(8.0 * ((beside + 63) / 64 * 64) / layout.page_tokens) / 8;
    for (double bytes : {meta, meta + 0.5, meta + 20.3, meta + layout.head_dim / 2.0, meta + layout.head_dim}) {
      const auto codec = Make(context, {{"bytes", absl::StrCat(bytes)}, {"allocation", "model"}});
      uint64_t payload = 0;
      for (int layer = 0; layer < 3; ++layer) payload += FormatOf(*codec, layer).payload_bytes;
      EXPECT_LE(StoredPerToken(*codec, 3), bytes);
      EXPECT_GT(StoredPerToken(*codec, 3), bytes - 2.125);
      EXPECT_EQ(codec->info().payload_bytes, (payload + 2) / 3);
      for (int layer = 0; layer < 3; ++layer) {
        EXPECT_EQ(codec->info().page_bytes(layer), FormatOf(*codec, layer).page_bytes);
        EXPECT_LE(codec->info().page_bytes(layer), codec->info().encoded_bytes);
      }
    }
  }
}

TEST(ZackHackTest, DominantSegmentsOfKHaveEightBitsWithinTheBudget) {
  for (const PageLayout& layout : {kUsual, kSmall, PageLayout{DType::kFloat16, 3, 256, 64}}) {
    const CodecContext context = WithLoudKeys(SyntheticContext(layout, 3, 6));
    const int segments = layout.head_dim / 16;
    for (const double share : {38.0 / 64, 46.0 / 64, 60.0 / 64}) {
      const double bytes = share * layout.head_dim;
      for (const char* const allocation : {"head", "model"}) {
        const bool model = allocation[0] == 'm';
        const auto codec = Make(context, {{"bytes", absl::StrCat(bytes)}, {"allocation", allocation}});
        for (int layer = 0; layer < 3; ++layer) {
          for (int head = 0; head < layout.kv_heads; ++head) {
            const auto& sides = FormatOf(*codec, layer).heads[head].side;
            const bool loud = (layer * layout.kv_heads + head) % 2 == 0;
            EXPECT_TRUE(!(model && loud) || sides[0].segment_bits[0] == kWideWidth) << bytes;
            int sum = 0;
            for (int s = 0; s < segments; ++s) {
              EXPECT_LE(sides[0].segment_bits[s], model ? kWideWidth : kWidthMax);
              EXPECT_LE(sides[1].segment_bits[s], kWidthMax);
              sum += sides[0].segment_bits[s] + sides[1].segment_bits[s];
            }
            EXPECT_LE(sum, 2 * kWidthMax * segments);
          }
        }
        EXPECT_LE(StoredPerToken(*codec, 3), bytes);
        EXPECT_GT(StoredPerToken(*codec, 3), bytes - 2.125);
      }
    }
  }
}

TEST(ZackHackTest, TheModelsBudgetIsForTheServedLayers) {
  CodecContext context = SyntheticContext(kUsual, 6, 6);
  for (const std::vector<int>& served : {std::vector<int>{1, 2, 3, 4}, {0}, {0, 5}, {0, 1, 2, 3, 4, 5}}) {
    context.served_layers = served;
    for (const double bytes : {24.0, 40.0, 56.5}) {
      const auto codec = Make(context, {{"bytes", absl::StrCat(bytes)}, {"allocation", "model"}});
      double payload = 0;
      for (const int layer : served) payload += FormatOf(*codec, layer).payload_bytes;
      const double per_token = payload / double(served.size()) / kUsual.page_tokens / kUsual.kv_heads;
      EXPECT_LE(per_token, bytes + 1e-9);
      EXPECT_GT(per_token, bytes - 2);
    }
    // Bits of K are those of its layers, too.
    const auto codec = Make(context, {{"k_bits", "1.5"}, {"v_bits", "1"}, {"allocation", "model"}});
    int bits[2] = {0, 0};
    for (int layer = 0; layer < 6; ++layer) {
      const bool is_served = std::count(served.begin(), served.end(), layer) > 0;
      for (int head = 0; head < 2; ++head) {
        for (int side = 0; side < 2; ++side) {
          const auto& widths = FormatOf(*codec, layer).heads[head].side[side].segment_bits;
          const int sum = std::accumulate(std::begin(widths), std::begin(widths) + 8, 0);
          EXPECT_TRUE(is_served || sum == 0) << layer;
          bits[side] += sum;
        }
      }
    }
    EXPECT_EQ(bits[0], 12 * 2 * int(served.size()));
    EXPECT_EQ(bits[1], 8 * 2 * int(served.size()));
  }
}

TEST(ZackHackTest, RefusesWrongParameters) {
  const CodecContext context = SyntheticContext(kUsual, 2, 8);
  const struct {
    CodecParameters parameters;
    const char* field;
  } kCases[] = {
      {{{"bits", "2"}}, "codec zack+hack parameter"},
      {{{"bytes", "56"}, {"k_bits", "2"}}, "codec parameter bytes"},
      {{{"bytes", "8"}}, "codec parameter bytes"},
      {{{"bytes", "9.9"}}, "codec parameter bytes"},
      {{{"bytes", "8.9"}, {"v_norm", "0"}}, "codec parameter bytes"},
      {{{"bytes", "137.2"}, {"v_norm", "0"}}, "codec parameter bytes"},
      {{{"v_norm", "yes"}}, "codec parameter v_norm"},
      {{{"bytes", "138.3"}}, "codec parameter bytes"},
      {{{"bytes", "nan"}}, "codec parameter bytes"},
      {{{"bytes", "fifty"}}, "codec parameter bytes"},
      {{{"bytes", " 48"}}, "codec parameter bytes"},
      {{{"bytes", "48 "}}, "codec parameter bytes"},
      {{{"bytes", "+48"}}, "codec parameter bytes"},
      {{{"bytes", "0x30"}}, "codec parameter bytes"},
      {{{"k_bits", "4.5"}}, "codec parameter k_bits"},
      {{{"v_bits", "-1"}}, "codec parameter v_bits"},
      {{{"v_bits", "inf"}}, "codec parameter v_bits"},
      {{{"mode", "both"}}, "codec parameter mode"},
      {{{"allocation", "layer"}}, "codec parameter allocation"},
      {{{"fold", "2"}}, "codec parameter fold"},
  };
  for (const auto& c : kCases) {
    const auto codec = MakeCodec(context, c.parameters);
    ASSERT_FALSE(codec.ok()) << c.field;
    EXPECT_EQ(codec.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(DetailOf(codec.status()).field, c.field);
    EXPECT_FALSE(DetailOf(codec.status()).bound.empty());
  }
  CodecContext none = context;
  none.calibration = nullptr;
  const absl::Status absent = MakeCodec(none, CodecParameters{}).status();
  EXPECT_EQ(absent.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(DetailOf(absent).field, "codec parameter calibration");
  CodecContext pages = context;
  pages.layout.page_tokens = 32;
  EXPECT_EQ(DetailOf(MakeCodec(pages, CodecParameters{}).status()).field, "page_tokens");
}

template <typename T>
Tensor AsTensor(const char* dtype, std::vector<uint64_t> shape, const std::vector<T>& values) {
  return {dtype, std::move(shape),
          absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(T))};
}

TEST(ZackHackTest, RefusesWrongArtifacts) {
  const CodecContext context = SyntheticContext(kSmall, 2, 4);
  const size_t channels = 2 * 2 * 2 * 64;
  const auto error = [&](const std::string& name, const Tensor& tensor, const CodecParameters& parameters = {}) {
    return MakeCodec(WithTensors(context, {{name, tensor}}), parameters).status();
  };
  std::vector<int32_t> order(channels);
  for (size_t i = 0; i < channels; ++i) order[i] = int32_t(i % 64);
  order[70] = order[71];
  EXPECT_NE(
      DetailOf(error("zack_hack.balanced.order", AsTensor("I32", {2, 2, 2, 64}, order))).bound.find("permutation"),
      std::string::npos);
  order[71] = 64;
  EXPECT_FALSE(error("zack_hack.balanced.order", AsTensor("I32", {2, 2, 2, 64}, order)).ok());
  std::vector<float> energy(channels, 1.0f);
  EXPECT_TRUE(error("zack_hack.balanced.energy", AsTensor("F32", {2, 2, 2, 64}, energy)).ok());
  EXPECT_FALSE(error("zack_hack.balanced.energy", AsTensor("F32", {2, 2, 64, 2}, energy)).ok());
  energy[3] = -1;
  EXPECT_EQ(DetailOf(error("zack_hack.balanced.energy", AsTensor("F32", {2, 2, 2, 64}, energy))).value, "-1");
  const std::vector<float> sensitivity = {1, 1, 1, -2, 1, 1, 1, 1};
  const Tensor bad = AsTensor("F32", {2, 2, 2}, sensitivity);
  EXPECT_FALSE(error("zack_hack.balanced.sensitivity", bad, {{"allocation", "model"}}).ok());
  EXPECT_TRUE(error("zack_hack.balanced.sensitivity", bad, {{"allocation", "head"}}).ok());  // not read
  const absl::Status missing = error("zack_hack.balanced.order", Tensor{});
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(missing.message().find("zack+hack"), std::string::npos);
  EXPECT_EQ(error("zack.balanced.vw.left", Tensor{}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_FALSE(MakeCodec(WithTensors(context, {}, {{"zack_hack.allocation", "some"}}), CodecParameters{}).ok());
}

TEST(ZackHackTest, RefusesToShareABudgetBySensitivitiesThatNobodyMeasured) {
  const CodecContext context = SyntheticContext(kSmall, 2, 4);
  // As an artifact trained from a capture: all 1, and nothing said.
  const CodecContext captured = WithTensors(context, {}, {{"zack_hack.sensitivity", "unknown"}});
  for (const CodecParameters& parameters :
       {CodecParameters{{"allocation", "model"}}, {{"allocation", "model"}, {"k_bits", "2"}, {"v_bits", "1"}}}) {
    EXPECT_TRUE(MakeCodec(context, parameters).ok());
    const absl::Status refused = MakeCodec(captured, parameters).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused;
    EXPECT_EQ(DetailOf(refused).field, "codec parameter allocation");
    EXPECT_EQ(DetailOf(refused).value, "model");
    EXPECT_NE(DetailOf(refused).bound.find("kvctl calibrate --model"), std::string::npos) << refused;
  }
  EXPECT_FALSE(MakeCodec(WithTensors(captured, {}, {{"zack_hack.allocation", "model"}}), CodecParameters{}).ok());
  EXPECT_TRUE(MakeCodec(captured, {{"allocation", "head"}}).ok());
  EXPECT_TRUE(MakeCodec(captured, CodecParameters{}).ok());
  // Older artifacts that were measured do not say so.
  const std::vector<float> sensitivity = {1, 1, 1, 2, 1, 1, 1, 1};
  const CodecContext older =
      WithTensors(captured, {{"zack_hack.balanced.sensitivity", AsTensor("F32", {2, 2, 2}, sensitivity)}});
  EXPECT_TRUE(MakeCodec(older, {{"allocation", "model"}}).ok());
}

/// K' or V' of one head in plain loops: fp32, over d in order, each operation rounded.
void RotatePlainly(const uint8_t* raw, const PageLayout& layout, const std::vector<float>& factor, uint8_t* out) {
  const int d = layout.head_dim;
  for (int t = 0; t < layout.page_tokens; ++t) {
    for (int c = 0; c < d; ++c) {
      float sum = 0;
      for (int i = 0; i < d; ++i) {
        const float product = LoadElement(raw, layout.dtype, size_t(t) * d + i) * factor[size_t(i) * d + c];
        sum = sum + product;
      }
      StoreElement(out, DType::kFloat16, size_t(t) * d + c, sum);
    }
  }
}

TEST(ZackHackTest, BytesAreThoseOfTheReferenceOnEveryInstructionSet) {
  std::mt19937_64 random(5);
  for (const PageLayout& layout : {kUsual, PageLayout{DType::kBFloat16, 1, 64, 128},
                                   PageLayout{DType::kFloat16, 1, 96, 64}, PageLayout{DType::kBFloat16, 1, 256, 64}}) {
    const CodecContext context = WithLoudKeys(SyntheticContext(layout, 2, 4));
    for (const CodecParameters& parameters : {CodecParameters{},
                                              {{"bytes", "40"}, {"allocation", "model"}},
                                              {{"k_bits", "2"}, {"v_bits", "1"}, {"allocation", "model"}},
                                              {{"v_norm", "0"}},
                                              {{"k_bits", "0.5"}, {"v_bits", "4"}, {"mode", "joint"}}}) {
      const zack::Memory raw = zack::RandomRawPage(layout, random);
      for (int layer = 0; layer < 2; ++layer) {
        const auto codec = Make(context, parameters);
        const auto& rotated_codec = dynamic_cast<const zack::RotatedCodec&>(*codec);
        const zack::Memory rotated = MakeMemory(layout.raw_bytes());
        for (int h = 0; h < layout.kv_heads; ++h) {
          for (int side = 0; side < 2; ++side) {
            const size_t at = layout.raw_offset(side, h, 0);
            RotatePlainly(raw.get() + at, layout, rotated_codec.rotation(layer, h).encode[side], rotated.get() + at);
          }
        }
        const hack::HackFormat& format = FormatOf(*codec, layer);
        const zack::Memory wanted = MakeMemory(format.page_bytes);
        ASSERT_TRUE(hack::ReferenceEncode(format, rotated.get(), layer, 64, wanted.get()));
        for (Isa isa : SupportedIsas()) {
          const auto page = EncodeOne(*Make(context, parameters, isa), layer, raw.get(), 64);
          EXPECT_FALSE(page.declined);
          EXPECT_EQ(std::memcmp(page.bytes.get(), wanted.get(), format.page_bytes), 0) << IsaName(isa);
          EXPECT_TRUE(codec->Validate(layer, {page.bytes.get(), format.page_bytes}).ok());
        }
      }
    }
  }
}

TEST(ZackHackTest, ABasisOfItsOwnReplacesZacksForV) {
  const CodecContext context = SyntheticContext(kSmall, 2, 4);
  const TensorMap& tensors = context.calibration->tensors();
  const std::string zack = "zack.balanced.vw.", own = "zack_hack.balanced.vw.", k = "zack.balanced.qk.";
  const TensorMap other = {{own + "left", tensors.at(k + "left")}, {own + "right", tensors.at(k + "right")}};
  const TensorMap same = {{zack + "left", tensors.at(k + "left")}, {zack + "right", tensors.at(k + "right")}};
  const auto trained = Make(context, {}), replaced = Make(WithTensors(context, other), {});
  const auto wanted = Make(WithTensors(context, same), {});
  std::mt19937_64 random(9);
  const auto raw = zack::RandomRawPage(kSmall, random);
  const size_t bytes = wanted->info().page_bytes(1);
  const auto a = EncodeOne(*replaced, 1, raw.get()), b = EncodeOne(*wanted, 1, raw.get());
  const auto c = EncodeOne(*trained, 1, raw.get());
  EXPECT_FALSE(a.declined || b.declined || c.declined);
  EXPECT_EQ(std::memcmp(a.bytes.get(), b.bytes.get(), bytes), 0);
  EXPECT_NE(std::memcmp(a.bytes.get(), c.bytes.get(), bytes), 0);
  std::vector<float> huge(size_t(2) * 2 * 64 * 64, 1e13f);
  TensorMap bad = other;
  bad[own + "right"].bytes = {reinterpret_cast<const uint8_t*>(huge.data()), huge.size() * sizeof(float)};
  EXPECT_FALSE(MakeCodec(WithTensors(context, bad), CodecParameters{}).ok());
}

TEST(ZackHackTest, DecodeIsTheCodesRotatedBack) {
  std::mt19937_64 random(6);
  const CodecContext context = SyntheticContext(kUsual, 2, 8);
  for (const char* bytes : {"137", "56"}) {
    const auto codec = Make(context, {{"bytes", bytes}});
    const auto& rotated_codec = dynamic_cast<const zack::RotatedCodec&>(*codec);
    const zack::Memory raw = zack::RandomRawPage(kUsual, random);
    const auto page = EncodeOne(*codec, 1, raw.get());
    const zack::Memory decoded = MakeMemory(kUsual.raw_bytes());
    const DecodeItem item = {page.bytes.get(), decoded.get(), 1};
    codec->Decode(absl::MakeConstSpan(&item, 1));
    double error = 0, norm = 0, loss = 0;
    for (int h = 0; h < 2; ++h) {
      for (int side = 0; side < 2; ++side) {
        const hack::HackCodes codes = hack::UnpackHead(FormatOf(*codec, 1), page.bytes.get(), h, side);
        const std::vector<float>& decode = rotated_codec.rotation(1, h).decode[side];
        for (int t = 0; t < 64; ++t) {
          for (int c = 0; c < 128; ++c) {
            double value = 0;
            for (int i = 0; i < 128; ++i) value += double(codes.value(t, i)) * decode[size_t(i) * 128 + c];
            const size_t at = kUsual.raw_offset(side, h, t);
            error += std::pow(LoadElement(decoded.get() + at, DType::kFloat16, c) - value, 2);
            loss += std::pow(LoadElement(raw.get() + at, DType::kFloat16, c) - value, 2);
            norm += value * value;
          }
        }
      }
    }
    EXPECT_LT(std::sqrt(error / norm), 1.5e-3) << bytes;
    EXPECT_LT(std::sqrt(loss / norm), bytes == std::string("137") ? 0.15 : 1.0) << bytes;
  }
}

TEST(ZackHackTest, DeclinesWhatDoesNotFit) {
  const CodecContext context = SyntheticContext(kSmall, 1, 4);
  const auto codec = Make(context, {});
  std::mt19937_64 random(7);
  const zack::Memory raw = zack::RandomRawPage(kSmall, random);
  EXPECT_FALSE(EncodeOne(*codec, 0, raw.get()).declined);
  for (int c = 0; c < 64; ++c) StoreElement(raw.get() + kSmall.raw_offset(1, 1, 5), DType::kFloat16, c, 65504);
  const auto page = EncodeOne(*codec, 0, raw.get());
  EXPECT_TRUE(page.declined);
  for (size_t i = 0; i < codec->info().page_bytes(0); ++i) ASSERT_EQ(page.bytes[i], 0);
}

TEST(ZackHackTest, ValidateChecksTheLayersPage) {
  const CodecContext context = SyntheticContext(kUsual, 3, 8);
  const auto codec = Make(context, {{"bytes", "40"}, {"allocation", "model"}});
  ASSERT_FALSE(codec->info().layer_bytes.empty());
  std::mt19937_64 random(8);
  const zack::Memory raw = zack::RandomRawPage(kUsual, random);
  for (int layer = 0; layer < 3; ++layer) {
    const auto page = EncodeOne(*codec, layer, raw.get());
    const size_t bytes = codec->info().page_bytes(layer);
    EXPECT_TRUE(codec->Validate(layer, {page.bytes.get(), bytes}).ok());
    EXPECT_EQ(codec->Validate(layer, {page.bytes.get(), bytes - 1}).code(), absl::StatusCode::kDataLoss);
    const hack::HeadLayout& head = FormatOf(*codec, layer).heads[1];
    page.bytes[head.offset + head.side[1].tops + 1] = 0x7c;  // an infinite step
    EXPECT_EQ(codec->Validate(layer, {page.bytes.get(), bytes}).code(), absl::StatusCode::kDataLoss);
  }
}

TEST(SensitivityTest, ProbesCodeTheirPartAlone) {
  const CodecContext context = SyntheticContext(kUsual, 3, 8);
  std::mt19937_64 random(9);
  const zack::Memory raw = zack::RandomRawPage(kUsual, random);
  const zack::Memory decoded = MakeMemory(kUsual.raw_bytes());
  for (const Part& part : {Part{1, 0, 0}, Part{2, Part::kAllHeads, 1}}) {
    auto probe = MakeProbe(context, "balanced", part);
    ASSERT_TRUE(probe.ok()) << probe.status();
    for (int layer = 0; layer < 3; ++layer) {
      const auto page = EncodeOne(**probe, layer, raw.get());
      EXPECT_EQ(page.declined, layer != part.layer);
      if (page.declined) continue;
      const DecodeItem item = {page.bytes.get(), decoded.get(), uint32_t(layer)};
      (*probe)->Decode(absl::MakeConstSpan(&item, 1));
      for (int h = 0; h < 2; ++h) {
        for (int side = 0; side < 2; ++side) {
          double error = 0, norm = 0;
          for (size_t i = 0; i < 64 * 128; ++i) {
            const size_t at = kUsual.raw_offset(side, h, 0);
            const double x = LoadElement(raw.get() + at, DType::kFloat16, i);
            error += std::pow(LoadElement(decoded.get() + at, DType::kFloat16, i) - x, 2);
            norm += x * x;
          }
          const bool coarse = side == part.side && (part.kv_head == Part::kAllHeads || part.kv_head == h);
          EXPECT_EQ(std::sqrt(error / norm) > 0.1, coarse) << h << side << " " << std::sqrt(error / norm);
        }
      }
    }
    EXPECT_GT(*ProbeLoss(context, "balanced", part), 0);
  }
  const double all = *ProbeLoss(context, "balanced", {1, Part::kAllHeads, 0});
  EXPECT_NEAR(all, *ProbeLoss(context, "balanced", {1, 0, 0}) + *ProbeLoss(context, "balanced", {1, 1, 0}), 1e-9 * all);
  EXPECT_FALSE(MakeProbe(context, "balanced", {3, 0, 0}).ok());
  EXPECT_FALSE(MakeProbe(context, "balanced", {0, 2, 0}).ok());
  EXPECT_FALSE(ProbeLoss(context, "balanced", {0, 0, 2}).ok());
}

TEST(SensitivityTest, Divergence) {
  const std::vector<float> a = {1, 2, 3, 0, 0, 0}, shifted = {11, 12, 13, -5, -5, -5},
                           b = {1, 2, 3, 0, 0, std::log(2.f)};
  EXPECT_EQ(MeanDivergence(a, a, 3), 0);
  EXPECT_NEAR(MeanDivergence(a, shifted, 3), 0, 1e-12);
  // Uniform against 1/4, 1/4, 1/2: (2 log(4/3) + log(2/3)) / 3, over two rows.
  EXPECT_NEAR(MeanDivergence(a, b, 3), (2 * std::log(4.0 / 3) + std::log(2.0 / 3)) / 6, 1e-7);
}

}  // namespace
}  // namespace kvmanager::zack_hack
