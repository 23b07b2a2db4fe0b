// Which slot sizes the encoded pages of a cache's layers take, when a codec's pages differ from layer to layer.
//
// Layers share a size (a class) when their pages differ little, since a slab of the pool holds slots of one size: with
// as many sizes as layers, partly used slabs would take more than tight slots save. A slot may therefore be larger than
// the page in it; what is sent, checked and read are the page's own bytes.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace kvmanager {

inline constexpr size_t kSlotClassesMax = 8;

struct SlotClasses {
  std::vector<uint64_t> bytes;    // [classes], ascending, 1..kSlotClassesMax of them; as the pool rounds them
  std::vector<uint8_t> of_layer;  // [layers] the smallest class that the layer's pages fit
};

/// The classes that waste the fewest bytes in a page of every layer, at most `classes_max` (at least 1) of them.
/// layer_bytes [layers]: of one page, as the pool rounds them.
SlotClasses MakeSlotClasses(absl::Span<const uint64_t> layer_bytes, size_t classes_max);

/// How many classes a cache may have in a pool of `slabs`: few enough that its partly used slabs stay a small part.
size_t SlotClassesOfPool(uint64_t slabs);

/// A number of slots of each form.
struct SlotCounts {
  size_t raw = 0;
  std::array<size_t, kSlotClassesMax> encoded{};  // by class
  size_t activations = 0;                         // of these the one form that they have
  bool none() const;
  void Add(const SlotCounts& more);
};

}  // namespace kvmanager
