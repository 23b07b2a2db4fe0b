#include "transport/recompute/rope.h"

#include <cmath>

#include "kvmanager/base/status.h"

namespace kvmanager::recompute {

absl::Status CheckRope(const RopeFacts& rope, int head_dim) {
  if (rope.rotary_dims < 0 || rope.rotary_dims > head_dim || rope.rotary_dims % 2 != 0) {
    return InvalidField("rope.rotary_dims", rope.rotary_dims, absl::StrCat("even, 0..", head_dim));
  }
  if (!(rope.theta > 0) || rope.theta > RopeFacts::kThetaMax) {
    return InvalidField("rope.theta", rope.theta, absl::StrCat("above 0, at most ", RopeFacts::kThetaMax));
  }
  return absl::OkStatus();
}

Rope::Rope(const RopeFacts& facts) : facts_(facts) {
  for (int i = 0; i < facts.rotary_dims / 2; ++i) {
    const double frequency = std::pow(facts.theta, -2.0 * i / facts.rotary_dims);
    frequencies_.push_back(facts.angles == RopeFacts::Angles::kFloat32 ? float(frequency) : frequency);
  }
}

void Rope::Fill(int64_t position, float* cos, float* sin) const {
  const bool rounded = facts_.angles == RopeFacts::Angles::kFloat32;
  for (int i = 0; i < pairs(); ++i) {
    const double angle = rounded ? float(position) * float(frequencies_[i]) : double(position) * frequencies_[i];
    cos[i] = float(std::cos(angle));
    sin[i] = float(std::sin(angle));
  }
}

void Rope::Rotate(float* head, const float* cos, const float* sin) const {
  const int n = pairs();
  if (facts_.pairs == RopeFacts::Pairs::kHalfSplit) {
    for (int i = 0; i < n; ++i) {
      const float a = head[i], b = head[i + n];
      head[i] = a * cos[i] - b * sin[i];
      head[i + n] = b * cos[i] + a * sin[i];
    }
    return;
  }
  for (int i = 0; i < n; ++i) {
    const float a = head[2 * i], b = head[2 * i + 1];
    head[2 * i] = a * cos[i] - b * sin[i];
    head[2 * i + 1] = b * cos[i] + a * sin[i];
  }
}

}  // namespace kvmanager::recompute
