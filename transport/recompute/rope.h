// Rotary position embedding of K, as a model's configuration states it. Frequencies are theta^(-2 i / rotary_dims);
// there is no scaling of them: a model with scaled frequencies (linear, NTK, YaRN, Llama 3) is not covered.
//
// Values and pure functions; any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace kvmanager::recompute {

struct RopeFacts {
  static constexpr double kThetaMax = 1e12;
  static constexpr int64_t kPositionMax = int64_t{1} << 40;

  enum class Pairs {
    kHalfSplit,    // channel i with i + rotary_dims / 2 (GPT-NeoX, Llama of transformers)
    kInterleaved,  // channel 2 i with 2 i + 1 (GPT-J, Llama as published)
  };
  enum class Angles {
    kFloat32,  // frequency, and its product with the position, rounded to float: as engines compute it
    kDouble,
  };

  int rotary_dims = 0;   // even, 0..head_dim: the first ones of a head; 0: K is not rotated
  double theta = 10000;  // above 0, at most kThetaMax
  Pairs pairs = Pairs::kHalfSplit;
  /// At position p kFloat32 is off by up to p * 2^-24 of a radian. What is recomputed equals what the engine stored
  /// only if both do alike.
  Angles angles = Angles::kFloat32;
};

/// Errors: INVALID_ARGUMENT naming the field.
absl::Status CheckRope(const RopeFacts& rope, int head_dim);

class Rope {
 public:
  /// facts: checked.
  explicit Rope(const RopeFacts& facts);
  int pairs() const { return int(frequencies_.size()); }
  /// Radians per position of each pair, as facts.angles has them.
  const std::vector<double>& frequencies() const { return frequencies_; }
  /// cos, sin: [pairs()] of one position, 0..kPositionMax.
  void Fill(int64_t position, float* cos, float* sin) const;
  /// Rotates the head_dim channels at `head` in place.
  void Rotate(float* head, const float* cos, const float* sin) const;

 private:
  const RopeFacts facts_;
  std::vector<double> frequencies_;
};

}  // namespace kvmanager::recompute
