#include "codecs/policy/policy_device_codec.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace kvmanager {
namespace {

class PolicyDeviceCodec final : public DeviceCodec {
 public:
  PolicyDeviceCodec(std::vector<std::unique_ptr<DeviceCodec>> codecs, const LayerGroups& groups, const CodecInfo& info)
      : codecs_(std::move(codecs)), info_(info) {
    for (int layer = 0; layer < groups.layers(); ++layer) of_layer_.push_back(codecs_[groups.number_of(layer)].get());
  }

  const DeviceCodec& of(int layer) const override { return *of_layer_[layer]; }
  bool keeps_raw(int layer, uint64_t first_token) const override { return info_.keeps_raw(layer, first_token); }
  const device::AttendKernels* attention(int layer) const override { return of(layer).attention(layer); }
  const void* attention_data(int layer) const override { return of(layer).attention_data(layer); }
  device::HeadCosts head_costs(int layer) const override { return of(layer).head_costs(layer); }
  device::Prefill prefill(int layer) const override { return of(layer).prefill(layer); }
  absl::Status Encode(const DeviceEncodeItem*, uint32_t, uint32_t*, CUstream_st*) const override { return Refused(); }
  absl::Status Decode(const DeviceDecodeItem*, uint32_t, CUstream_st*) const override { return Refused(); }

 private:
  static absl::Status Refused() {
    return absl::FailedPreconditionError("layers have codecs of their own: ask the one of the layer (of(layer))");
  }

  const std::vector<std::unique_ptr<DeviceCodec>> codecs_;  // [groups]
  std::vector<const DeviceCodec*> of_layer_;                // not the groups: their codecs may be gone before this is
  const CodecInfo info_;
};

}  // namespace

std::unique_ptr<DeviceCodec> MakePolicyDeviceCodec(const LayerGroups& groups, const CodecInfo& info) {
  std::vector<std::unique_ptr<DeviceCodec>> codecs;
  for (const LayerGroup& group : groups.all()) codecs.push_back(group.codec->NewDeviceCodec());
  if (std::find(codecs.begin(), codecs.end(), nullptr) != codecs.end()) return nullptr;
  return std::make_unique<PolicyDeviceCodec>(std::move(codecs), groups, info);
}

}  // namespace kvmanager
