// Layer groups: layers whose pages have the same shape and the same codec.
//
// A cache is described by its groups. Codec::groups() makes them: one group for a codec that serves all layers, and for
// a policy (codecs/policy) one for each codec that it names. Immutable; any thread. The codec that made the groups owns
// the codecs in them and outlives them.
//
// Invariants, checked at construction:
//  1. Each layer of the model is in exactly one group; no group is empty.
//  2. A group's layout is that of its codec.
//  3. All groups have the same page_tokens, since a block is the pages of the same tokens in all layers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager {

class Codec;

struct LayerGroup {
  std::vector<int> layers;  // of the model, ascending
  PageLayout layout;        // of each page of these layers
  /// Encodes these layers' pages. It does not know which pages stay raw: CodecInfo::keeps_raw of the whole says that.
  const Codec* codec = nullptr;
};

class LayerGroups {
 public:
  /// No layers and no groups.
  LayerGroups() = default;
  /// layers: of the model. Aborts if the groups break an invariant.
  LayerGroups(int layers, std::vector<LayerGroup> groups);
  /// One group: `codec` serves all layers.
  LayerGroups(int layers, const Codec& codec);

  int layers() const { return static_cast<int>(number_of_.size()); }
  absl::Span<const LayerGroup> all() const { return groups_; }
  /// The place of the layer's group in all(). REQUIRES: `layer` is below layers().
  size_t number_of(uint32_t layer) const { return number_of_[layer]; }
  const LayerGroup& of(uint32_t layer) const { return groups_[number_of_[layer]]; }

 private:
  std::vector<LayerGroup> groups_;
  std::vector<uint16_t> number_of_;  // [layers]
};

/// Ascending layers as text: "0..1,5..5" for 0, 1 and 5.
std::string LayerRanges(absl::Span<const int> layers);

}  // namespace kvmanager
