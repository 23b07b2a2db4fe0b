// A factor in the order of fragments, so that a lane reads all parts of two registers of B at once:
//   [k32 block kb][k16 step ks][tile of columns j][lane] parts of (b0, b1), then the scale.
// Which elements those are is free, as rows and columns of the product are taken in any order: lane (g = lane / 4,
// t = lane % 4) has rows 32 kb + 8 t + 4 ks + {0, 1} in b0 and + {2, 3} in b1, so that 16 bytes of a row of A serve two
// steps; column n = g of tile j is 32 (j / 4) + 8 (g / 2) + 2 (j % 4) + g % 2, so that a lane's results of four tiles
// are 16 bytes.
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

size_t PackedFactorBytes(int d, DType in) { return size_t(d) * d * 2 * Parts(in) + kScaleBytes; }

void PackFactor(const float* factor, int d, DType in, uint8_t* to) {
  KV_CHECK((d == 64 || d == 128) && (in == DType::kFloat16 || in == DType::kBFloat16));
  const bool half = in == DType::kFloat16;
  const int parts = Parts(in);
  float most = 0;
  for (int i = 0; i < d * d; ++i) most = std::max(most, std::abs(factor[i]));
  int exponent = 0;
  if (half && most > 0) std::frexp(most, &exponent), exponent = kLargestExponent - exponent;
  uint16_t* out = reinterpret_cast<uint16_t*>(to);
  for (int kb = 0; kb < d / 32; ++kb) {
    for (int ks = 0; ks < 2; ++ks) {
      for (int j = 0; j < d / 8; ++j) {
        for (int lane = 0; lane < 32; ++lane, out += 4 * parts) {
          const int g = lane / 4, t = lane % 4, column = 32 * (j / 4) + 8 * (g / 2) + 2 * (j % 4) + g % 2;
          for (int i = 0; i < 4; ++i) {
            double left = std::ldexp(double(factor[(32 * kb + 8 * t + 4 * ks + i) * d + column]), exponent);
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
  const float scale = std::ldexp(1.0f, -exponent);
  std::memset(out, 0, kScaleBytes);
  std::memcpy(out, &scale, sizeof scale);
}

}  // namespace kvmanager::zack
