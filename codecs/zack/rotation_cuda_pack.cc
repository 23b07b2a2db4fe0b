// A factor in the order of fragments, so that a lane reads all parts of two registers of B at once: the scale, then
//   [32 columns m][k32 block kb][k16 step ks][tile of columns j][lane] parts of (b0, b1).
// Which elements those are is free, as rows and columns of the product are taken in any order: lane (g = lane / 4,
// t = lane % 4) has rows 32 kb + 8 t + 4 ks + {0, 1} in b0 and + {2, 3} in b1, so that 16 bytes of a row of A serve two
// steps; column n = g of tile j is 32 m + 8 (g / 2) + 2 j + g % 2, so that a lane's results of four tiles are 16 bytes.
// Rows and columns are filled up to multiples of 32 with zeros.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "codecs/zack/rotation_cuda.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager::zack {
namespace {

constexpr int kPartsOfHalf = 2, kPartsOfBFloat16 = 3;
constexpr int kLargestExponent = 13;  // of scaled float16 parts: far from where they lose bits, and from infinity
constexpr size_t kScaleBytes = 16;

int Parts(DType in) { return in == DType::kFloat16 ? kPartsOfHalf : kPartsOfBFloat16; }

}  // namespace

size_t PackedFactorBytes(int rows, int columns, DType in) {
  return kScaleBytes + size_t(rows + 31) / 32 * 32 * (size_t(columns + 31) / 32 * 32) * 2 * size_t(Parts(in));
}

void PackFactor(const float* factor, int rows, int columns, DType in, uint8_t* to) {
  KV_CHECK(rows % 16 == 0 && columns % 16 == 0 && (in == DType::kFloat16 || in == DType::kBFloat16));
  const bool half = in == DType::kFloat16;
  const int parts = Parts(in);
  float most = 0;
  for (int i = 0; i < rows * columns; ++i) most = std::max(most, std::abs(factor[i]));
  int exponent = 0;
  if (half && most > 0) std::frexp(most, &exponent), exponent = kLargestExponent - exponent;
  const float scale = std::ldexp(1.0f, -exponent);
  std::memset(to, 0, kScaleBytes);
  std::memcpy(to, &scale, sizeof scale);
  uint16_t* out = reinterpret_cast<uint16_t*>(to + kScaleBytes);
  for (int m = 0; m < columns; m += 32) {
    for (int k16 = 0; k16 < (rows + 31) / 32 * 2; ++k16) {
      for (int j = 0; j < 4; ++j) {
        for (int lane = 0; lane < 32; ++lane, out += 4 * parts) {
          const int g = lane / 4, t = lane % 4, column = m + 8 * (g / 2) + 2 * j + g % 2;
          const int row = k16 / 2 * 32 + 8 * t + k16 % 2 * 4;
          for (int i = 0; i < 4; ++i) {
            const bool there = column < columns && row + i < rows;
            double left = there ? std::ldexp(double(factor[(row + i) * columns + column]), exponent) : 0;
            for (int part = 0; part < parts; ++part) {
              const uint16_t bits = half ? FloatToHalf(float(left)) : FloatToBFloat16(float(left));
              left -= half ? HalfToFloat(bits) : BFloat16ToFloat(bits);
              out[4 * part + i] = bits;
            }
          }
        }
      }
    }
  }
}

}  // namespace kvmanager::zack
