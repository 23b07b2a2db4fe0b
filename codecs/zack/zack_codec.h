// The Codec that ZACK's registration makes, by name for tests and programs that ask for its ranks.
//
// Immutable once made; every method may be called from any thread at once.
#pragma once

#include <memory>
#include <string>

#include "codecs/codec.h"
#include "codecs/cpu_isa.h"
#include "codecs/zack/zack_format.h"

namespace kvmanager::zack {

class ZackCodec final : public Codec {
 public:
  /// calibration: what `format` came from, for the spec; may be nullptr. isa: at most what the processor runs.
  ZackCodec(ZackFormat format, const std::shared_ptr<const Calibration>& calibration, Isa isa = BestIsa());

  const CodecInfo& info() const override { return info_; }
  const PageLayout& layout() const override { return format_.layout; }
  size_t encode_workspace_bytes() const override;
  void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t> workspace) const override;
  void Decode(absl::Span<const DecodeItem> items) const override;
  absl::Status Validate(int layer, absl::Span<const uint8_t> encoded) const override;
  const PageAttention& attention() const override { return *attention_; }
  bool OutputFactor(int layer, int kv_head, absl::Span<float> factor) const override;
  std::unique_ptr<DeviceCodec> NewDeviceCodec() const override;

  const ZackFormat& format() const { return format_; }
  /// For a log: the true share of removed dimensions, and the least, mean and largest rank of either side.
  std::string Describe() const;

 private:
  bool EncodePage(const EncodeItem& item, float* rotated) const;

  const ZackFormat format_;
  const Isa isa_;
  CodecInfo info_;
  std::unique_ptr<PageAttention> attention_;
};

}  // namespace kvmanager::zack
