// The reference against the definitions: hand-computed bytes, error bounds, and attention on dequantised pages.
#include "codecs/hack/hack_reference.h"

#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kvmanager/base/half.h"

namespace kvmanager::hack {
namespace {

HackFormat Format(absl::string_view spec, const PageLayout& layout) {
  const auto parameters = ParseHackParameters(ParseCodecSpec(spec)->parameters, layout);
  EXPECT_TRUE(parameters.ok()) << parameters.status();
  return MakeHackFormat(layout, *parameters);
}

std::vector<uint8_t> RandomPage(const PageLayout& layout, uint32_t seed, float outlier = 1) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<uint8_t> raw(layout.raw_bytes());
  for (size_t i = 0; i < raw.size() / 2; ++i) {
    StoreElement(raw.data(), layout.dtype, i, normal(random) * (i % layout.head_dim == 5 ? outlier : 1));
  }
  return raw;
}

TEST(HadamardTest, IsOrthonormalAndItsOwnInverse) {
  for (size_t n : {16, 32, 128, 256}) {
    std::vector<float> unit(n, 0), x(n);
    unit[3] = 1;
    Hadamard(absl::MakeSpan(unit));
    for (size_t i = 0; i < n; ++i)
      EXPECT_NEAR(unit[i], (__builtin_popcount(i & 3) % 2 ? -1 : 1) / std::sqrt(double(n)), 1e-6);
    std::mt19937 random(1);
    for (float& f : x) f = std::normal_distribution<float>()(random);
    std::vector<float> y = x;
    Hadamard(absl::MakeSpan(y)), Hadamard(absl::MakeSpan(y));
    for (size_t i = 0; i < n; ++i) EXPECT_NEAR(x[i], y[i], 1e-5);
  }
}

TEST(RoundingNoiseTest, IsUniformReproducibleAndKeyedByEachArgument) {
  double sum = 0;
  for (int i = 0; i < 100000; ++i) {
    const float u = RoundingNoise(1, 2, 1, i / 128, i % 128);
    ASSERT_GE(u, 0);
    ASSERT_LT(u, 1);
    sum += u;
  }
  EXPECT_NEAR(sum / 100000, 0.5, 0.005);
  const float base = RoundingNoise(1, 2, 0, 3, 4);
  EXPECT_EQ(base, RoundingNoise(1, 2, 0, 3, 4));
  EXPECT_NE(base, RoundingNoise(0, 2, 0, 3, 4));
  EXPECT_NE(base, RoundingNoise(1, 3, 0, 3, 4));
  EXPECT_NE(base, RoundingNoise(1, 2, 1, 3, 4));
  EXPECT_NE(base, RoundingNoise(1, 2, 0, 3 + (uint64_t{1} << 32), 4));
  EXPECT_NE(base, RoundingNoise(1, 2, 0, 3, 5));
}

// The bytes that hack_format.h and docs/codecs.md promise, one code at a time.
TEST(PackTest, PlacesEveryCodeAsDocumented) {
  const PageLayout layout{DType::kFloat16, 1, 32, 128};
  for (int bits : {1, 2, 3, 4, 8}) {
    const std::string width = std::to_string(bits);
    const HackFormat format = Format("hack:k_bits=" + width + ",v_bits=" + width, layout);
    for (int side : {kSideK, kSideV}) {
      const SideLayout& s = format.heads[0].side[side];
      for (int token : {0, 1, 15, 16, 37, 63, 64, 127}) {
        for (int channel : {0, 1, 6, 15, 16, 31}) {
          std::vector<uint8_t> page(format.page_bytes);
          HackCodes codes = UnpackHead(format, page.data(), 0, side);
          std::fill(codes.codes.begin(), codes.codes.end(), 0);
          codes.codes[size_t(token) * 32 + channel] = uint8_t((1 << bits) - 1);
          PackHead(format, codes, 0, side, page.data());

          std::vector<uint8_t> want(format.page_bytes);
          if (bits == 8 && side == kSideV) std::fill_n(want.begin() + s.codes, 2 * s.strip_bytes, 0x80);
          uint8_t* segment = want.data() + s.codes + token / 64 * s.strip_bytes + channel / 16 * (128 * bits);
          const int t = token % 64, c = channel % 16, i = t / 16;
          const int r = side == kSideK ? t % 16 : c, j = side == kSideK ? c / 4 : t % 16 / 4,
                    lane = side == kSideK ? c % 4 : t % 4;
          if (bits == 8) segment[256 * j + 64 * i + 4 * r + lane] = side == kSideK ? 0xff : 0x7f;
          if (bits == 2 || bits == 3 || bits == 4) segment[64 * j + 4 * r + lane] = uint8_t(3 << (2 * i));
          if (bits == 4) segment[256 + 64 * j + 4 * r + lane] = uint8_t(3 << (2 * i));
          if (bits == 1 || bits == 3) {
            segment[(bits == 3 ? 256 : 0) + 64 * (j / 2) + 4 * r + lane] =
                uint8_t(1 << (i % 2 + 4 * (i / 2) + 2 * (j % 2)));
          }
          ASSERT_EQ(page, want) << bits << " bits, side " << side << ", token " << token << ", channel " << channel;
        }
      }
    }
  }
}

TEST(PackTest, UnpackIsTheInverse) {
  for (const char* spec : {"hack", "hack:k_axis=token,sums=1,k_bits=4", "hack:meta=16,k_bits=1,v_bits=1",
                           "hack:k_bits=8,v_bits=8,part=32"}) {
    const PageLayout layout{DType::kFloat16, 2, 64, 64};
    const HackFormat format = Format(spec, layout);
    const std::vector<uint8_t> raw = RandomPage(layout, 4, 10);
    std::vector<uint8_t> page(format.page_bytes);
    for (int head = 0; head < 2; ++head) {
      for (int side : {kSideK, kSideV}) {
        HackCodes codes;
        ASSERT_TRUE(QuantizeHead(format, raw.data(), head, side, 3, 128, &codes));
        PackHead(format, codes, head, side, page.data());
        const HackCodes back = UnpackHead(format, page.data(), head, side);
        EXPECT_EQ(back.codes, codes.codes);
        EXPECT_EQ(back.steps, codes.steps);
        EXPECT_EQ(back.minima, codes.minima);
        EXPECT_EQ(back.tops, codes.tops);
        EXPECT_EQ(back.sums, codes.sums);
        EXPECT_EQ(back.norm_top, codes.norm_top);
        EXPECT_EQ(back.stored_norms, codes.stored_norms);
        EXPECT_EQ(back.norms, codes.norms);
        EXPECT_EQ(back.norms.size(), side == kSideV ? 64 : 0);
      }
    }
  }
}

TEST(QuantizeTest, ErrorIsAtMostHalfAStepPlusTheRoundingOfTheMetadata) {
  const PageLayout layout{DType::kFloat16, 1, 128, 64};
  for (const char* spec :
       {"hack:", "hack:k_bits=2,meta=16,", "hack:k_axis=token,k_bits=4,v_bits=4,", "hack:k_bits=8,v_bits=8,meta=16,"}) {
    const HackFormat format = Format(std::string(spec) + "rotation=none,v_norm=0", layout);
    const std::vector<uint8_t> raw = RandomPage(layout, 7, 8);
    for (int side : {kSideK, kSideV}) {
      HackCodes codes;
      ASSERT_TRUE(QuantizeHead(format, raw.data(), 0, side, 0, 0, &codes));
      const bool meta8 = format.parameters.meta_bits == 8;
      for (int t = 0; t < 64; ++t) {
        for (int c = 0; c < 128; ++c) {
          const HackCodes& m = codes;
          const size_t pair = meta8 && m.along_tokens ? 2 * (m.meta_index(t, c) / m.entries()) : 0;
          const float step_loss = meta8 ? HalfToFloat(m.tops[pair]) / 510 : 0.0f,
                      min_loss = meta8 ? HalfToFloat(m.tops[pair + 1]) / 254 : 0.0f;
          const int most = (1 << format.heads[0].side[side].segment_bits[c / 16]) - 1;
          const float x = LoadElement(raw.data() + layout.raw_offset(side, 0, t), layout.dtype, c);
          const float bound =
              m.step(t, c) * 0.501f + most * (step_loss + m.step(t, c) * 0x1p-10f) + min_loss + std::fabs(x) * 0x1p-9f;
          ASSERT_LE(std::fabs(m.value(t, c) - x), bound) << spec << " " << t << " " << c;
        }
      }
    }
  }
}

TEST(QuantizeTest, WidthZeroKeepsTheMean) {
  const PageLayout layout{DType::kFloat16, 1, 16, 64};
  const SegmentBits bits = {{{{{0}}, {{0}}}}};
  HackParameters parameters;
  parameters.meta_bits = 16;
  parameters.rotation = Rotation::kNone;
  parameters.v_norm = false;
  const HackFormat format = MakeHackFormat(layout, parameters, &bits);
  const std::vector<uint8_t> raw = RandomPage(layout, 2);
  HackCodes codes;
  ASSERT_TRUE(QuantizeHead(format, raw.data(), 0, kSideV, 0, 0, &codes));
  for (int c = 0; c < 16; ++c) {
    double mean = 0;
    for (int t = 0; t < 64; ++t)
      mean += LoadElement(raw.data() + layout.raw_offset(kSideV, 0, t), layout.dtype, c) / 64.0;
    EXPECT_NEAR(codes.value(17, c), mean, 1e-3);
    EXPECT_EQ(codes.step(17, c), 0);
  }
}

TEST(QuantizeTest, LeastSquaresBeatsMinMaxAtOneBit) {
  const PageLayout layout{DType::kFloat16, 1, 64, 64};
  const std::vector<uint8_t> raw = RandomPage(layout, 11);
  double error[2] = {0, 0};
  for (int fitted : {0, 1}) {
    const HackFormat format =
        Format(fitted ? "hack:v_bits=1,rotation=none,v_norm=0" : "hack:v_bits=1,v_range=minmax,rotation=none,v_norm=0",
               layout);
    HackCodes codes;
    ASSERT_TRUE(QuantizeHead(format, raw.data(), 0, kSideV, 0, 0, &codes));
    for (int t = 0; t < 64; ++t) {
      for (int c = 0; c < 64; ++c) {
        const double x = LoadElement(raw.data() + layout.raw_offset(kSideV, 0, t), layout.dtype, c);
        error[fitted] += (codes.value(t, c) - x) * (codes.value(t, c) - x);
      }
    }
  }
  // Of a normal distribution: 0.36 of the variance is left at best, min-max leaves more than the variance itself.
  EXPECT_LT(error[1] / (64 * 64), 0.45);
  EXPECT_GT(error[0], 1.5 * error[1]);
}

TEST(QuantizeTest, StochasticRoundingIsUnbiased) {
  const PageLayout layout{DType::kFloat16, 1, 128, 64};
  const HackFormat format = Format("hack:v_bits=2,rounding=stochastic,meta=16,rotation=none,v_norm=0", layout);
  std::vector<uint8_t> raw(layout.raw_bytes());
  for (size_t i = 0; i < raw.size() / 2; ++i)
    StoreElement(raw.data(), layout.dtype, i, i / 128 % 64 == 0 ? 0 : i / 128 % 64 == 1 ? 3 : 1.25f);
  double sum = 0;
  HackCodes codes;
  ASSERT_TRUE(QuantizeHead(format, raw.data(), 0, kSideV, 0, 0, &codes));
  for (int t = 2; t < 64; ++t) {
    for (int c = 0; c < 128; ++c) sum += codes.value(t, c);
  }
  EXPECT_NEAR(sum / (62 * 128), 1.25, 0.02);
}

TEST(QuantizeTest, DeclinesWhatDoesNotFitHalf) {
  const PageLayout layout{DType::kBFloat16, 1, 32, 64};
  for (const char* spec : {"hack:rotation=none,", "hack:rotation=hadamard,"}) {
    for (const char* norms : {"v_norm=0", "v_norm=1"}) {
      const HackFormat format = Format(std::string(spec) + norms + ",part=32", layout);
      // A value alone in its row of 32 is spread by the rotation.
      const float fits = format.parameters.rotation == Rotation::kNone ? 60000.0f : 320000.0f;
      for (float value : {fits, 1.2f * fits, -1.2f * fits, 3e38f, std::numeric_limits<float>::infinity()}) {
        std::vector<uint8_t> raw = RandomPage(layout, 1), page(format.page_bytes, 0xff);
        for (int t = 0; t < 64; ++t) StoreElement(raw.data() + layout.raw_offset(1, 0, t), layout.dtype, 9, value);
        EXPECT_EQ(ReferenceEncode(format, raw.data(), 0, 0, page.data()), value == fits) << spec << norms << value;
        EXPECT_EQ(page == std::vector<uint8_t>(format.page_bytes), value != fits) << spec << norms << value;
      }
    }
  }
}

// Hand-computed: norms 1, 0.5 and 3 of a page whose top is 3.
TEST(NormTest, IsTheRowsLargestMagnitudeRoundedUpToItsByte) {
  const PageLayout layout{DType::kFloat16, 1, 16, 64};
  const HackFormat format = Format("hack:v_bits=8,meta=16,rotation=none", layout);
  std::vector<uint8_t> raw(layout.raw_bytes());
  const auto row = [&](int side, int t, float value) {
    for (int c = 0; c < 16; ++c) {
      StoreElement(raw.data() + layout.raw_offset(side, 0, t), layout.dtype, c, c == t % 16 ? -value : value / 4);
    }
  };
  for (int t = 0; t < 64; ++t) row(kSideK, t, 5), row(kSideV, t, t == 0 ? 3 : t == 1 ? 0.5f : t == 2 ? 0 : 1);
  HackCodes v, k;
  ASSERT_TRUE(QuantizeHead(format, raw.data(), 0, kSideV, 0, 0, &v));
  ASSERT_TRUE(QuantizeHead(format, raw.data(), 0, kSideK, 0, 0, &k));
  EXPECT_TRUE(k.norms.empty());
  EXPECT_EQ(v.norm_top, FloatToHalf(3));
  EXPECT_EQ(v.stored_norms[0], 255);
  EXPECT_EQ(v.stored_norms[1], 43);  // 42.5
  EXPECT_EQ(v.stored_norms[2], 1);   // a zero row beside others
  EXPECT_EQ(v.stored_norms[3], 85);
  EXPECT_EQ(v.norms[3], 1);
  EXPECT_EQ(v.norms[1], 3.0f * 43 / 255.0f);
  for (int t = 0; t < 64; ++t) {
    for (int c = 0; c < 16; ++c) {
      const float x = LoadElement(raw.data() + layout.raw_offset(kSideV, 0, t), layout.dtype, c);
      EXPECT_NEAR(v.value(t, c), x, 0.006 * v.norms[t]) << t << " " << c;
    }
  }
}

TEST(NormTest, TheTopIsRoundedUp) {
  const PageLayout layout{DType::kBFloat16, 1, 16, 64};
  const HackFormat format = Format("hack:rotation=none", layout);
  for (const auto& [value, top] :
       {std::pair{0x5p-26f, 0x0002}, {0x1p-30f, 0x0001}, {0x1p-24f, 0x0001}, {65280.0f, 0x7bf8}, {0.0f, 0x0000}}) {
    std::vector<uint8_t> raw(layout.raw_bytes());
    for (int t = 0; t < 64; ++t) StoreElement(raw.data() + layout.raw_offset(1, 0, t), layout.dtype, t % 16, -value);
    HackCodes v;
    ASSERT_TRUE(QuantizeHead(format, raw.data(), 0, kSideV, 0, 0, &v)) << value;
    EXPECT_EQ(v.norm_top, top) << value;
    if (value == 0) {
      for (uint8_t u8 : v.stored_norms) EXPECT_EQ(u8, 0);
      for (int c = 0; c < 16; ++c) EXPECT_EQ(v.value(3, c), 0);
    }
  }
}

TEST(NormTest, QuietTokensKeepTheirValueBesideLoudOnes) {
  const PageLayout layout{DType::kFloat16, 1, 64, 64};
  std::vector<uint8_t> raw = RandomPage(layout, 31);
  for (int t = 0; t < 64; ++t) {
    for (int c = 0; c < 64; ++c) {
      const size_t at = layout.raw_offset(1, 0, t) / 2 + c;
      StoreElement(raw.data(), layout.dtype, at, LoadElement(raw.data(), layout.dtype, at) * (t % 4 ? 0.2f : 4.0f));
    }
  }
  double error[2] = {};
  for (int norms : {0, 1}) {
    const HackFormat format = Format(norms ? "hack" : "hack:v_norm=0", layout);
    std::vector<uint8_t> page(format.page_bytes), back(layout.raw_bytes());
    ASSERT_TRUE(ReferenceEncode(format, raw.data(), 0, 0, page.data()));
    ReferenceDecode(format, page.data(), back.data());
    for (int t = 0; t < 64; ++t) {
      if (t % 4 == 0) continue;
      for (int c = 0; c < 64; ++c) {
        const size_t at = layout.raw_offset(1, 0, t) / 2 + c;
        error[norms] +=
            std::pow(LoadElement(raw.data(), layout.dtype, at) - LoadElement(back.data(), layout.dtype, at), 2);
      }
    }
  }
  EXPECT_LT(error[1], 0.05 * error[0]);
}

/// Exact attention in double over decoded K and V [tokens][d] of one head.
void ExactAttend(const std::vector<double>& k, const std::vector<double>& v, int d, const float* q, double scale,
                 std::vector<double>* out, double* lse) {
  const size_t tokens = k.size() / d;
  std::vector<double> s(tokens);
  double max = -INFINITY, sum = 0;
  for (size_t t = 0; t < tokens; ++t) {
    for (int c = 0; c < d; ++c) s[t] += scale * q[c] * k[t * d + c];
    max = std::max(max, s[t]);
  }
  out->assign(d, 0);
  for (size_t t = 0; t < tokens; ++t) {
    const double p = std::exp(s[t] - max);
    sum += p;
    for (int c = 0; c < d; ++c) (*out)[c] += p * v[t * d + c];
  }
  for (double& o : *out) o /= sum;
  *lse = max + std::log(sum);
}

class AttendTest : public testing::TestWithParam<const char*> {};

TEST_P(AttendTest, IsCloseToExactAttentionOnDequantisedPages) {
  const PageLayout layout{DType::kFloat16, 2, 128, 128};
  const HackFormat format = Format(GetParam(), layout);
  constexpr int kPages = 4, kRows = 3, d = 128;
  std::vector<std::vector<uint8_t>> pages;
  std::vector<const uint8_t*> pointers;
  std::vector<double> k, v;
  for (int i = 0; i < kPages; ++i) {
    pages.emplace_back(format.page_bytes);
    ASSERT_TRUE(ReferenceEncode(format, RandomPage(layout, 20 + i).data(), 0, 0, pages.back().data()));
    pointers.push_back(pages.back().data());
    for (int side : {kSideK, kSideV}) {
      const HackCodes codes = UnpackHead(format, pages.back().data(), 1, side);
      for (int t = 0; t < codes.tokens; ++t) {
        std::vector<float> row(d);
        for (int c = 0; c < d; ++c) row[c] = codes.value(t, c);
        (side == kSideK ? k : v).insert((side == kSideK ? k : v).end(), row.begin(), row.end());
      }
    }
  }
  for (const auto& [deviation, tolerance] : {std::pair{0.0f, 4e-3}, std::pair{0.1f, 4e-3}, std::pair{1.0f, 3e-2}}) {
    std::mt19937 random(5);
    std::vector<float> q(kRows * d), max(kRows, -INFINITY), sum(kRows), acc(kRows * d);
    for (float& f : q) f = deviation * std::normal_distribution<float>()(random);
    const PageAttentionTask task{q.data(), kRows, float(1 / std::sqrt(double(d))), 0, 1, pointers};
    // In two calls, as a split would: the state carries over.
    PageAttentionTask first = task, second = task;
    first.pages = task.pages.subspan(0, 1), second.pages = task.pages.subspan(1);
    ReferenceAttend(format, first, {max.data(), sum.data(), acc.data()});
    ReferenceAttend(format, second, {max.data(), sum.data(), acc.data()});
    for (int r = 0; r < kRows; ++r) {
      std::vector<double> want;
      double lse = 0, error = 0, norm = 0;
      ExactAttend(k, v, d, q.data() + r * d, task.scale, &want, &lse);
      for (int c = 0; c < d; ++c) {
        const double got = double(acc[r * d + c]) / sum[r];
        error += (got - want[c]) * (got - want[c]), norm += want[c] * want[c];
      }
      EXPECT_LE(std::sqrt(error / norm), tolerance) << GetParam() << " deviation " << deviation;
      EXPECT_NEAR(max[r] + std::log(sum[r]), lse, 0.02);
    }
  }
}

/// The relative error of attention on random pages whose first 8 channels are a hundred times the others, against exact
/// attention on what the codes stand for.
double ErrorBesideLoudChannels(const HackFormat& format, float q_deviation) {
  const int d = format.layout.head_dim;
  std::mt19937 random(11);
  std::normal_distribution<float> normal;
  std::vector<uint8_t> raw(format.layout.raw_bytes()), page(format.page_bytes);
  for (int side : {kSideK, kSideV}) {
    for (int t = 0; t < format.layout.page_tokens; ++t) {
      for (int c = 0; c < d; ++c) {
        const float size = side == kSideK && c < 8 ? 100 : 1;
        StoreElement(raw.data() + format.layout.raw_offset(side, 0, t), format.layout.dtype, c, size * normal(random));
      }
    }
  }
  EXPECT_TRUE(ReferenceEncode(format, raw.data(), 0, 0, page.data()));
  std::vector<double> k, v;
  for (int side : {kSideK, kSideV}) {
    const HackCodes codes = UnpackHead(format, page.data(), 0, side);
    for (int t = 0; t < codes.tokens; ++t) {
      for (int c = 0; c < d; ++c) (side == kSideK ? k : v).push_back(codes.value(t, c));
    }
  }
  constexpr int kRows = 16;
  std::vector<float> q(kRows * d), max(kRows, -INFINITY), sum(kRows), acc(kRows * d);
  // The loud channels weigh a quarter of what they could: a score's deviation is q_deviation * sqrt(8 * 25^2 + d - 8).
  for (int i = 0; i < kRows * d; ++i) q[i] = q_deviation * normal(random) * (i % d < 8 ? 0.25f : 1.0f);
  const uint8_t* pages[] = {page.data()};
  const PageAttentionTask task{q.data(), kRows, float(1 / std::sqrt(double(d))), 0, 0, pages};
  ReferenceAttend(format, task, {max.data(), sum.data(), acc.data()});
  double error = 0, norm = 0;
  for (int r = 0; r < kRows; ++r) {
    std::vector<double> want;
    double lse = 0;
    ExactAttend(k, v, d, q.data() + r * d, task.scale, &want, &lse);
    for (int c = 0; c < d; ++c) {
      const double got = double(acc[r * d + c]) / sum[r];
      error += (got - want[c]) * (got - want[c]), norm += want[c] * want[c];
    }
  }
  return std::sqrt(error / norm);
}

TEST(TwoByteQueryTest, KeepsTheScoresOfSegmentsOfEightBits) {
  for (int d : {64, 128, 256}) {
    std::vector<uint8_t> k_bits(d / 16, 1);
    k_bits[0] = 8;
    const SegmentBits bits = {{k_bits, std::vector<uint8_t>(d / 16, 4)}};
    HackParameters parameters;
    parameters.rotation = Rotation::kNone;
    HackFormat format = MakeHackFormat({DType::kFloat16, 1, uint16_t(d), 64}, parameters, &bits);
    ASSERT_TRUE(format.heads[0].side[kSideK].two_byte_q);
    const float deviation = 2 * std::sqrt(float(d)) / std::sqrt(8 * 25.0f * 25.0f);  // of scores: 2
    const double two = ErrorBesideLoudChannels(format, deviation);
    format.heads[0].side[kSideK].two_byte_q = false;
    const double one = ErrorBesideLoudChannels(format, deviation);
    EXPECT_LT(two, 0.02) << d << " " << one;
    EXPECT_LT(two, 0.2 * one) << d;
  }
}

INSTANTIATE_TEST_SUITE_P(Specs, AttendTest,
                         testing::Values("hack", "hack:k_bits=2,v_bits=1", "hack:k_bits=8,v_bits=8,part=128",
                                         "hack:meta=16,part=32", "hack:k_axis=token", "hack:k_axis=token,q=asymmetric",
                                         "hack:k_axis=token,rotation=none,part=32", "hack:rotation=none,v_norm=0",
                                         "hack:v_norm=0"));

}  // namespace
}  // namespace kvmanager::hack
