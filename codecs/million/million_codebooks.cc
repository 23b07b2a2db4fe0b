#include "codecs/million/million_codebooks.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>

#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager::million {
namespace {

constexpr size_t kAlignment = 64;
constexpr int kEntriesMin = 64;  // of a permute's table
constexpr float kLevels = 254;   // steps between the codes -127 and 127

size_t AlignUp(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

MillionTables::MillionTables(const MillionFormat& format, const MillionCodebooks& codebooks, TableOrder k_order,
                             TableOrder v_order)
    : layers_(codebooks.layers), kv_heads_(format.layout.kv_heads) {
  for (int side = 0; side < 2; ++side) {
    KV_CHECK(codebooks.side[side].size() == size_t(layers_) * kv_heads_);
    std::map<const uint16_t*, SideTable> made;
    for (const uint16_t* codebook : codebooks.side[side]) {
      const auto [at, added] = made.try_emplace(codebook);
      if (added) at->second = Make(format, side, codebook, side == kSideK ? k_order : v_order);
      tables_[side].push_back(at->second);
    }
  }
}

MillionTables::~MillionTables() {
  for (void* memory : memory_) std::free(memory);
}

SideTable MillionTables::Make(const MillionFormat& format, int side, const uint16_t* codebook, TableOrder order) {
  const SideLayout& layout = format.side[side];
  const int d = format.layout.head_dim, width = layout.width, centroids = layout.centroids;
  const int entries = std::max(centroids, kEntriesMin);
  const size_t floats = AlignUp(d * sizeof(float)), by_channel = size_t(d) * entries;
  const size_t by_index = order == TableOrder::kBoth ? AlignUp(size_t(d) * centroids) : 0;
  const size_t bytes = 2 * floats + by_channel + by_index;
  uint8_t* memory = static_cast<uint8_t*>(std::aligned_alloc(kAlignment, bytes));
  KV_CHECK(memory != nullptr);
  std::memset(memory, 0, bytes);
  memory_.push_back(memory);
  bytes_ += bytes;

  float* mid = reinterpret_cast<float*>(memory);
  float* step = reinterpret_cast<float*>(memory + floats);
  uint8_t* channels = memory + 2 * floats;
  uint8_t* indices = channels + by_channel;
  for (int c = 0; c < d; ++c) {
    const uint16_t* components = codebook + size_t(c / width) * centroids * width + c % width;
    float low = HalfToFloat(components[0]), high = low;
    for (int i = 1; i < centroids; ++i) {
      const float x = HalfToFloat(components[size_t(i) * width]);
      low = std::min(low, x);
      high = std::max(high, x);
    }
    mid[c] = (low + high) / 2;
    step[c] = (high - low) / kLevels;
    for (int i = 0; i < centroids; ++i) {
      const float x = HalfToFloat(components[size_t(i) * width]) - mid[c];
      const float code = step[c] > 0 ? std::nearbyint(x / step[c]) : 0.0f;
      const uint8_t byte = uint8_t(int8_t(std::clamp(code, -127.0f, 127.0f))) ^ kFlip[side];
      channels[size_t(c) * entries + i] = byte;
      if (by_index > 0) indices[(size_t(c / width) * centroids + i) * width + c % width] = byte;
    }
  }
  return {channels, by_index > 0 ? indices : nullptr, mid, step, entries};
}

}  // namespace kvmanager::million
