// Raw pages of every kind that an encoder should meet.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "kvmanager/base/half.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager::hack {

enum class Data {
  kRandom,
  kOutliers,
  kConstant,
  kZeros,
  kTiny,
  kMixedSigns,
  kLarge,
  kHuge,
  kHeavyTails,
  kTwoValues,
  kOffset,  // a range that is small beside its middle
};
inline constexpr int kDataKinds = 11;

/// A page of one kind; equal seeds give equal pages. kHuge has values that hack declines.
inline std::vector<uint8_t> DataPage(const PageLayout& layout, Data kind, uint32_t seed) {
  std::vector<uint8_t> raw(layout.raw_bytes());
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < raw.size() / 2; ++i) {
    const int channel = int(i % layout.head_dim);
    float f = normal(random);
    switch (kind) {
      case Data::kRandom:
        break;
      case Data::kOutliers:
        f = channel % 16 == 3 ? 20 + 4 * f : f;
        break;
      case Data::kConstant:
        f = channel % 2 ? 1.37f : -0.25f * float(channel);
        break;
      case Data::kZeros:
        f = random() % 2 ? 0.0f : -0.0f;
        break;
      case Data::kTiny:
        f *= 1e-7f;
        break;
      case Data::kMixedSigns:
        f = random() % 8 ? -0.0f : f;
        break;
      case Data::kLarge:
        f *= 9000;
        break;
      case Data::kHuge:
        f = random() % 9997 ? f : f * 1e6f;
        break;
      case Data::kHeavyTails:
        f = f * f * f;
        break;
      case Data::kTwoValues:
        f = random() % 3 ? 0.5f : float(channel % 5) - 2;
        break;
      case Data::kOffset:
        f = float(channel - 40) + 0.01f * f;
        break;
    }
    if (layout.dtype == DType::kFloat16) f = std::fmin(std::fmax(f, -65504.0f), 65504.0f);
    StoreElement(raw.data(), layout.dtype, i, f);
  }
  return raw;
}

}  // namespace kvmanager::hack
