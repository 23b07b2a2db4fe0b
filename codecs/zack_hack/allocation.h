// Which widths the segments of rotated channels get: each bit goes where it removes most of the expected error.
//
// A segment is 16 channels of one layer, head and side. Its energy is what would be lost without codes: the sum over
// its channels of (variance inside a page) * (second moment of the other side), as calibration measured it; with b bits
// about energy * loss[b] is lost. Pure functions of their arguments, deterministic to the bit; any thread.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "codecs/hack/hack_format.h"

namespace kvmanager::zack_hack {

inline constexpr int kWidthMax = 4;
/// The one width beyond kWidthMax, which segments of K may have with allocation=model. Real models have heads of which
/// a few channels hold most of the energy: at 4 bits they lose the retrieval of single tokens.
inline constexpr int kWideWidth = 8;
using LossTable = std::array<double, kWidthMax + 2>;  // what is left of a segment's energy with 0..4 bits, with 8

/// The rough table of allocation=head.
inline constexpr LossTable kRoughLoss = {1.0, 0.36, 0.12, 0.035, 0.0095, 3.7e-5};
/// Measured over rotated K and V of a real model, pages of 64 tokens, 8-bit metadata, least squares at 1 bit and
/// min-max above: the table of allocation=model. The last one is by a quarter for each bit.
inline constexpr LossTable kMeasuredLoss = {1.0, 0.40, 0.21, 0.038, 0.0082, 3.2e-5};

/// What is left with `width` bits, 0..kWidthMax or kWideWidth.
constexpr double LossOf(const LossTable& loss, int width) { return loss[width == kWideWidth ? kWidthMax + 1 : width]; }

/// Which segments may have kWideWidth, and how large that may make a head's record. Empty: none may.
struct WideSegments {
  std::vector<bool> allowed;  // [energies]
  std::vector<int> record;    // [energies]: segments of equal numbers are of one record
  int64_t record_bits_max = 0;
};

/// Gives away `bits`, one at a time, each to the segment where it removes most (the first of equals); widths are at
/// most kWidthMax, so that bits beyond kWidthMax * energies.size() are left. Segments that may be wide go on to
/// kWideWidth in one step, for its mean gain of a bit, where as many bits are left. energies: finite, at least 0.
std::vector<uint8_t> AllocateBits(absl::Span<const double> energies, int64_t bits, const LossTable& loss,
                                  const WideSegments& wide = {});

/// Energies of segments: [layers][kv_heads][side: K, V][segments].
struct SegmentEnergies {
  int layers = 0, kv_heads = 0, segments = 0;
  std::vector<double> energy;
  std::vector<double> sensitivity;  // [layers][kv_heads][side]: the cost of a unit of energy lost there
  std::vector<bool> served;         // [layers]: whether a budget for several layers is for this one too; empty: all

  bool serves(int layer) const { return served.empty() || served[layer]; }
  int served_layers() const { return served.empty() ? layers : int(std::count(served.begin(), served.end(), true)); }
  size_t index(int layer, int head, int side) const { return (size_t(layer) * kv_heads + head) * 2 + side; }
};

/// Widths per layer, as hack::MakeHackFormat takes them.
using LayerWidths = std::vector<hack::SegmentBits>;

/// The same number of bits for every layer and head: `bits[side]` of all segments of one head and side together.
LayerWidths AllocatePerHead(const SegmentEnergies& energies, const std::array<int64_t, 2>& bits);
/// One budget for K of all served layers and heads, and one for V; energies weighted by sensitivity. Others get 0 bits.
/// K's segments may be wide.
LayerWidths AllocatePerSide(const SegmentEnergies& energies, const std::array<int64_t, 2>& bits);
/// One budget for everything that is served; K's segments may be wide. Other layers get 0 bits.
LayerWidths AllocateAcrossModel(const SegmentEnergies& energies, int64_t bits);

/// How many of `bits` (per head, of `segments` on either side) K gets, the rest being V's: the split that lost least at
/// 32, 40, 48, 56 and 88 bytes on a real model, linear between.
int64_t BitsOfK(int64_t bits, int segments);

}  // namespace kvmanager::zack_hack
