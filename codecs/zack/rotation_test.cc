#include "codecs/zack/rotation.h"

#include <cmath>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "gtest/gtest.h"
#include "kvmanager/base/half.h"

namespace kvmanager::zack {
namespace {

struct Product {
  std::vector<uint8_t> raw;
  std::vector<float> x, factor;
  std::vector<double> exact, magnitude;  // [tokens][n]; magnitude: the sum of the terms' absolute values
};

Product MakeProduct(DType dtype, int tokens, int d, int n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 1);
  Product p;
  p.raw.resize(size_t(tokens) * d * DTypeBytes(dtype));
  p.x.resize(size_t(tokens) * d);
  p.factor.resize(size_t(d) * n);
  for (size_t i = 0; i < p.x.size(); ++i) {
    StoreElement(p.raw.data(), dtype, i, normal(random));
    p.x[i] = LoadElement(p.raw.data(), dtype, i);
  }
  for (float& f : p.factor) f = normal(random);
  p.exact.assign(size_t(tokens) * n, 0);
  p.magnitude.assign(p.exact.size(), 0);
  for (int t = 0; t < tokens; ++t) {
    for (int i = 0; i < d; ++i) {
      for (int c = 0; c < n; ++c) {
        const double term = double(p.x[t * d + i]) * p.factor[i * n + c];
        p.exact[t * n + c] += term;
        p.magnitude[t * n + c] += std::abs(term);
      }
    }
  }
  return p;
}

using Shape = std::tuple<DType, int, int, int>;  // dtype, tokens, d, n
class RotateTest : public testing::TestWithParam<Shape> {};

TEST_P(RotateTest, RawIsNearExactAndSummedInOrderOnEveryInstructionSet) {
  const auto [dtype, tokens, d, n] = GetParam();
  const Product p = MakeProduct(dtype, tokens, d, n, 1);
  std::vector<float> wanted(p.exact.size());
  for (int t = 0; t < tokens; ++t) {
    for (int c = 0; c < n; ++c) {
      float sum = 0;
      for (int i = 0; i < d; ++i) {
        const float term = p.x[t * d + i] * p.factor[i * n + c];
        sum = sum + term;
      }
      wanted[t * n + c] = sum;
    }
  }
  for (size_t i = 0; i < wanted.size(); ++i) ASSERT_NEAR(wanted[i], p.exact[i], p.magnitude[i] * d * 6e-8);
  for (Isa isa : SupportedIsas()) {
    std::vector<float> out(wanted.size() + 1, 7);
    RotateRaw(p.raw.data(), dtype, tokens, d, p.factor.data(), n, out.data(), isa);
    EXPECT_EQ(std::memcmp(out.data(), wanted.data(), wanted.size() * 4), 0) << IsaName(isa);
    EXPECT_EQ(out.back(), 7) << IsaName(isa);
  }
}

TEST_P(RotateTest, RowsAreNearExactWhateverStandsBesideThem) {
  const auto [dtype, rows, d, n] = GetParam();
  const Product p = MakeProduct(DType::kFloat32, rows, d, n, 2);
  const int x_stride = d + 3, out_stride = n + 5;
  std::vector<float> x(size_t(rows) * x_stride, std::nanf("")), out(size_t(rows) * out_stride, 7);
  for (int r = 0; r < rows; ++r) std::copy_n(p.x.data() + r * d, d, x.data() + r * x_stride);
  for (Isa isa : SupportedIsas()) {
    RotateRows(x.data(), x_stride, rows, d, p.factor.data(), n, out.data(), out_stride, isa);
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < n; ++c) {
        ASSERT_NEAR(out[r * out_stride + c], p.exact[r * n + c], p.magnitude[r * n + c] * d * 6e-8) << IsaName(isa);
      }
      for (int c = n; c < out_stride; ++c) ASSERT_EQ(out[r * out_stride + c], 7) << IsaName(isa);
      std::vector<float> alone(n);
      RotateRows(x.data() + r * x_stride, x_stride, 1, d, p.factor.data(), n, alone.data(), n, isa);
      EXPECT_EQ(std::memcmp(alone.data(), out.data() + r * out_stride, n * 4), 0) << IsaName(isa) << " row " << r;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, RotateTest,
                         testing::Values(Shape{DType::kFloat16, 64, 128, 128}, Shape{DType::kBFloat16, 16, 128, 48},
                                         Shape{DType::kFloat16, 1, 16, 16}, Shape{DType::kFloat32, 7, 64, 80},
                                         Shape{DType::kFloat16, 32, 256, 256}, Shape{DType::kBFloat16, 11, 96, 112},
                                         Shape{DType::kFloat16, 5, 48, 144}, Shape{DType::kFloat16, 3, 80, 16}));

TEST(RotateTest, UnitRowsGiveTheFactorsRows) {
  constexpr int kD = 32, kN = 48;
  const Product p = MakeProduct(DType::kFloat16, 1, kD, kN, 3);
  std::vector<uint16_t> unit(kD * kD, 0);
  for (int i = 0; i < kD; ++i) unit[i * kD + i] = FloatToHalf(1);
  std::vector<float> out(kD * kN);
  for (Isa isa : SupportedIsas()) {
    RotateRaw(reinterpret_cast<const uint8_t*>(unit.data()), DType::kFloat16, kD, kD, p.factor.data(), kN, out.data(),
              isa);
    EXPECT_EQ(out, p.factor) << IsaName(isa);
  }
}

}  // namespace
}  // namespace kvmanager::zack
