#include "kvmanager/store/slot_classes.h"

#include <algorithm>
#include <limits>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr uint64_t kSlabsPerClass = 8;  // a class of encoded slots per so many slabs of the pool

}  // namespace

bool SlotCounts::none() const {
  return raw == 0 && activations == 0 &&
         std::all_of(encoded.begin(), encoded.end(), [](size_t count) { return count == 0; });
}

size_t SlotClassesOfPool(uint64_t slabs) {
  return static_cast<size_t>(std::clamp<uint64_t>(slabs / kSlabsPerClass, 1, kSlotClassesMax));
}

SlotClasses MakeSlotClasses(absl::Span<const uint64_t> layer_bytes, size_t classes_max) {
  KV_CHECK(!layer_bytes.empty() && classes_max >= 1 && classes_max <= kSlotClassesMax);
  std::vector<uint64_t> sorted(layer_bytes.begin(), layer_bytes.end());
  std::sort(sorted.begin(), sorted.end());
  std::vector<uint64_t> sizes;        // distinct, ascending
  std::vector<uint64_t> below = {0};  // [i] layers whose size is among the first i
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (sizes.empty() || sizes.back() != sorted[i]) {
      sizes.push_back(sorted[i]);
      below.push_back(i);
    }
    below.back() = i + 1;
  }
  // bytes[c][i]: of the slots of the layers among the first i sizes, in at most c + 1 classes, the last of which is
  // sizes[i - 1] and begins at size from[c][i].
  const size_t n = sizes.size(), classes = std::min(classes_max, n);
  constexpr uint64_t kNever = std::numeric_limits<uint64_t>::max();
  std::vector<std::vector<uint64_t>> bytes(classes, std::vector<uint64_t>(n + 1, kNever));
  std::vector<std::vector<size_t>> from(classes, std::vector<size_t>(n + 1, 0));
  for (size_t c = 0; c < classes; ++c) {
    bytes[c][0] = 0;
    for (size_t i = 1; i <= n; ++i) {
      for (size_t first = 0; first < i; ++first) {
        const uint64_t before = c == 0 ? (first == 0 ? 0 : kNever) : bytes[c - 1][first];
        if (before == kNever) continue;
        const uint64_t all = before + (below[i] - below[first]) * sizes[i - 1];
        if (all < bytes[c][i]) {
          bytes[c][i] = all;
          from[c][i] = first;
        }
      }
    }
  }
  SlotClasses out;
  for (size_t c = classes, i = n; i > 0; i = from[c][i]) {
    --c;
    out.bytes.push_back(sizes[i - 1]);
  }
  std::reverse(out.bytes.begin(), out.bytes.end());
  for (uint64_t layer : layer_bytes) {
    out.of_layer.push_back(
        static_cast<uint8_t>(std::lower_bound(out.bytes.begin(), out.bytes.end(), layer) - out.bytes.begin()));
  }
  return out;
}

void SlotCounts::Add(const SlotCounts& more) {
  raw += more.raw;
  activations += more.activations;
  for (size_t i = 0; i < encoded.size(); ++i) encoded[i] += more.encoded[i];
}

}  // namespace kvmanager
