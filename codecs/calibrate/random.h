// A small random generator whose numbers are the same on every platform (SplitMix64), for training and test data.
#pragma once

#include <cstdint>

namespace kvmanager::calibrate {

/// A value: a copy goes on with the same numbers.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  /// 0 .. n - 1, n >= 1; the bias is below n / 2^64.
  uint64_t Below(uint64_t n) { return uint64_t((unsigned __int128)(Next()) * n >> 64); }
  /// In [0, 1).
  double Uniform() { return double(Next() >> 11) * 0x1p-53; }
  /// Mean 0, variance 1: twelve uniform numbers of 16 bits added up, which is normal enough for data.
  float Normal() {
    int64_t sum = 0;
    for (int i = 0; i < 3; ++i) {
      const uint64_t bits = Next();
      for (int part = 0; part < 4; ++part) sum += int64_t(bits >> (16 * part) & 0xffff);
    }
    return float(double(sum) / 65536.0 - 6.0);
  }

 private:
  uint64_t state_;
};

}  // namespace kvmanager::calibrate
