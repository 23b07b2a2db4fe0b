#include "codecs/zack_hack/allocation.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager::zack_hack {
namespace {

/// Widths of the sides that `wanted` says, from weighted energies, into `widths`.
void AllocateTogether(const SegmentEnergies& energies, int64_t bits, bool k, bool v, LayerWidths& widths) {
  std::vector<double> weighted;
  // A record is no larger than one of kWidthMax throughout, which is what kernels have room for.
  WideSegments wide;
  wide.record_bits_max = int64_t(k + v) * kWidthMax * energies.segments;
  const auto for_each = [&](auto visit) {
    for (int layer = 0; layer < energies.layers; ++layer) {
      if (!energies.serves(layer)) continue;
      for (int head = 0; head < energies.kv_heads; ++head) {
        for (int side = 0; side < 2; ++side) {
          if (side == 0 ? k : v) visit(layer, head, side, energies.index(layer, head, side));
        }
      }
    }
  };
  for_each([&](int layer, int head, int side, size_t at) {
    for (int s = 0; s < energies.segments; ++s) {
      weighted.push_back(energies.energy[at * energies.segments + s] * energies.sensitivity[at]);
      wide.allowed.push_back(side == 0);
      wide.record.push_back(layer * energies.kv_heads + head);
    }
  });
  const std::vector<uint8_t> given = AllocateBits(weighted, bits, kMeasuredLoss, wide);
  auto next = given.begin();
  for_each([&](int layer, int head, int side, size_t) {
    widths[layer][head][side].assign(next, next + energies.segments);
    next += energies.segments;
  });
}

LayerWidths Empty(const SegmentEnergies& energies) {
  const std::vector<uint8_t> none(energies.segments, 0);
  return LayerWidths(energies.layers, hack::SegmentBits(energies.kv_heads, {none, none}));
}

}  // namespace

std::vector<uint8_t> AllocateBits(absl::Span<const double> energies, int64_t bits, const LossTable& loss,
                                  const WideSegments& wide) {
  std::vector<uint8_t> widths(energies.size(), 0);
  const auto next_width = [](int width) { return width == kWidthMax ? kWideWidth : width + 1; };
  const auto gain = [&](size_t i) {
    const int next = next_width(widths[i]);
    return energies[i] * (LossOf(loss, widths[i]) - LossOf(loss, next)) / (next - widths[i]);
  };
  using Candidate = std::pair<double, size_t>;
  const auto later = [](const Candidate& a, const Candidate& b) {
    return a.first != b.first ? a.first < b.first : a.second > b.second;
  };
  std::vector<int64_t> record_bits(wide.record.empty() ? 0
                                                       : *std::max_element(wide.record.begin(), wide.record.end()) + 1);
  std::priority_queue<Candidate, std::vector<Candidate>, decltype(later)> candidates(later);
  for (size_t i = 0; i < energies.size(); ++i) candidates.emplace(gain(i), i);
  while (bits > 0 && !candidates.empty()) {
    const size_t i = candidates.top().second;
    candidates.pop();
    const int next = next_width(widths[i]), more = next - widths[i];
    if (more > bits) continue;
    if (!record_bits.empty()) {
      int64_t& record = record_bits[wide.record[i]];
      if (record + more > wide.record_bits_max) continue;
      record += more;
    }
    bits -= more;
    widths[i] = uint8_t(next);
    if (next < kWidthMax || (next == kWidthMax && !wide.allowed.empty() && wide.allowed[i])) {
      candidates.emplace(gain(i), i);
    }
  }
  return widths;
}

LayerWidths AllocatePerHead(const SegmentEnergies& energies, const std::array<int64_t, 2>& bits) {
  LayerWidths widths = Empty(energies);
  for (int layer = 0; layer < energies.layers; ++layer) {
    for (int head = 0; head < energies.kv_heads; ++head) {
      for (int side = 0; side < 2; ++side) {
        const size_t at = energies.index(layer, head, side) * energies.segments;
        widths[layer][head][side] =
            AllocateBits(absl::MakeConstSpan(&energies.energy[at], energies.segments), bits[side], kRoughLoss);
      }
    }
  }
  return widths;
}

LayerWidths AllocatePerSide(const SegmentEnergies& energies, const std::array<int64_t, 2>& bits) {
  LayerWidths widths = Empty(energies);
  AllocateTogether(energies, bits[0], true, false, widths);
  AllocateTogether(energies, bits[1], false, true, widths);
  return widths;
}

LayerWidths AllocateAcrossModel(const SegmentEnergies& energies, int64_t bits) {
  LayerWidths widths = Empty(energies);
  AllocateTogether(energies, bits, true, true, widths);
  return widths;
}

int64_t BitsOfK(int64_t bits, int segments) {
  // Average bits per channel: of K and V together, of K.
  constexpr std::pair<double, double> kSplit[] = {{0, 0}, {1.5, 1}, {2, 1.25}, {2.5, 1.5}, {3, 2}, {5, 3}, {8, 4}};
  KV_CHECK(bits >= 0 && bits <= 2 * kWidthMax * segments);
  const double average = double(bits) / segments;
  size_t i = 1;
  while (average > kSplit[i].first) ++i;
  const auto [x0, y0] = kSplit[i - 1];
  const auto [x1, y1] = kSplit[i];
  const int64_t k = std::llround((y0 + (y1 - y0) * (average - x0) / (x1 - x0)) * segments);
  return std::clamp<int64_t>(k, std::max<int64_t>(0, bits - kWidthMax * segments),
                             std::min<int64_t>(bits, kWidthMax * segments));
}

}  // namespace kvmanager::zack_hack
