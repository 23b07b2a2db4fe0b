#include "codecs/raw/raw_device_codec.h"

#include "codecs/raw/raw_attention_cuda.h"
#include "codecs/raw/raw_prefill_cuda.h"

namespace kvmanager {
namespace {

class RawDeviceCodec final : public DeviceCodec {
 public:
  RawDeviceCodec(const device::AttendKernels* attention, const device::PrefillKernels* prefill)
      : attention_(attention), prefill_(prefill) {}

  const device::AttendKernels* attention(int) const override { return attention_; }
  device::Prefill prefill(int) const override { return {prefill_, nullptr}; }
  absl::Status Encode(const DeviceEncodeItem*, uint32_t, uint32_t*, CUstream_st*) const override { return Refused(); }
  absl::Status Decode(const DeviceDecodeItem*, uint32_t, CUstream_st*) const override { return Refused(); }

 private:
  static absl::Status Refused() {
    return absl::FailedPreconditionError("raw pages are their own encoded form: there is nothing to encode or decode");
  }

  const device::AttendKernels* const attention_;
  const device::PrefillKernels* const prefill_;
};

}  // namespace

std::unique_ptr<DeviceCodec> MakeRawDeviceCodec(const PageLayout& layout) {
  const device::AttendKernels* const attention = RawAttentionKernels(layout.head_dim);
  if (attention == nullptr) return nullptr;
  const bool prefills = layout.page_tokens == device::kPrefillPageTokens;
  return std::make_unique<RawDeviceCodec>(attention, prefills ? RawPrefillKernels(layout.head_dim) : nullptr);
}

}  // namespace kvmanager
