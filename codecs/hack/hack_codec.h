// Codec over HACK pages: a format, the kernels chosen for this machine, and attention on the codes.
//
// Owned by the cache that opened it; immutable, so every method may be called from any thread at once.
#pragma once

#include <memory>

#include "codecs/codec.h"
#include "codecs/hack/hack_format.h"
#include "codecs/hack/hack_kernels.h"
#include "codecs/page_attention.h"

namespace kvmanager::hack {

class HackCodec final : public Codec {
 public:
  HackCodec(HackFormat format, const HackKernels& kernels);

  const CodecInfo& info() const override { return info_; }
  const PageLayout& layout() const override { return format_.layout; }
  size_t encode_workspace_bytes() const override { return HackEncodeWorkspaceBytes(format_); }
  void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t> workspace) const override;
  void Decode(absl::Span<const DecodeItem> items) const override;
  absl::Status Validate(int layer, absl::Span<const uint8_t> encoded) const override;
  const PageAttention& attention() const override { return *attention_; }
  std::unique_ptr<DeviceCodec> NewDeviceCodec() const override;

  const HackFormat& format() const { return format_; }

 private:
  const HackFormat format_;
  const HackKernels& kernels_;
  CodecInfo info_;
  std::unique_ptr<PageAttention> attention_;  // reads format_
};

}  // namespace kvmanager::hack
