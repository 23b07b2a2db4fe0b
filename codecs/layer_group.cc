#include "codecs/layer_group.h"

#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "codecs/codec.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr uint16_t kNoGroup = std::numeric_limits<uint16_t>::max();

std::vector<LayerGroup> OneGroup(int layers, const Codec& codec) {
  LayerGroup group{.layers = std::vector<int>(layers), .layout = codec.layout(), .codec = &codec};
  std::iota(group.layers.begin(), group.layers.end(), 0);
  std::vector<LayerGroup> groups;
  groups.push_back(std::move(group));
  return groups;
}

}  // namespace

LayerGroups::LayerGroups(int layers, std::vector<LayerGroup> groups)
    : groups_(std::move(groups)), number_of_(layers, kNoGroup) {
  KV_CHECK(groups_.size() < kNoGroup);
  size_t named = 0;
  for (size_t number = 0; number < groups_.size(); ++number) {
    const LayerGroup& group = groups_[number];
    KV_CHECK(!group.layers.empty());
    KV_CHECK(group.codec != nullptr && group.codec->layout() == group.layout);
    KV_CHECK(group.layout.page_tokens == groups_[0].layout.page_tokens);
    int layer_min = 0;
    for (const int layer : group.layers) {
      KV_CHECK(layer >= layer_min && layer < layers);
      KV_CHECK(number_of_[layer] == kNoGroup);
      number_of_[layer] = static_cast<uint16_t>(number);
      layer_min = layer + 1;
    }
    named += group.layers.size();
  }
  KV_CHECK(named == number_of_.size());
}

LayerGroups::LayerGroups(int layers, const Codec& codec) : LayerGroups(layers, OneGroup(layers, codec)) {}

std::string LayerRanges(absl::Span<const int> layers) {
  std::string text;
  for (size_t i = 0; i < layers.size(); ++i) {
    const size_t first = i;
    while (i + 1 < layers.size() && layers[i + 1] == layers[i] + 1) ++i;
    absl::StrAppend(&text, text.empty() ? "" : ",", layers[first], "..", layers[i]);
  }
  return text;
}

}  // namespace kvmanager
