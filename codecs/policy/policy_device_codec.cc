#include "codecs/policy/policy_device_codec.h"

#include <algorithm>
#include <utility>

namespace kvmanager {
namespace {

class PolicyDeviceCodec final : public DeviceCodec {
 public:
  PolicyDeviceCodec(std::vector<std::unique_ptr<DeviceCodec>> codecs, std::vector<size_t> codec_of,
                    const CodecInfo& info)
      : codecs_(std::move(codecs)), codec_of_(std::move(codec_of)), info_(info) {}

  const DeviceCodec& of(int layer) const override { return *codecs_[codec_of_[layer]]; }
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

  const std::vector<std::unique_ptr<DeviceCodec>> codecs_;
  const std::vector<size_t> codec_of_;
  const CodecInfo info_;
};

}  // namespace

std::unique_ptr<DeviceCodec> MakePolicyDeviceCodec(std::vector<std::unique_ptr<DeviceCodec>> codecs,
                                                   std::vector<size_t> codec_of, const CodecInfo& info) {
  if (std::find(codecs.begin(), codecs.end(), nullptr) != codecs.end()) return nullptr;
  return std::make_unique<PolicyDeviceCodec>(std::move(codecs), std::move(codec_of), info);
}

}  // namespace kvmanager
