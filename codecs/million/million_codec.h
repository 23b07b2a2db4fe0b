// Codec over MILLION pages: a format, codebooks and attention on indices.
//
// Owned by the cache that opened it; immutable, so every method may be called from any thread at once. Pages hold
// nothing but indices and zero padding, and every index of `bits` bits names a centroid: no page of the right size can
// reach outside a table.
#pragma once

#include <memory>
#include <string>

#include "codecs/codec.h"
#include "codecs/million/million_codebooks.h"
#include "codecs/million/million_format.h"

namespace kvmanager::million {

class MillionCodec final : public Codec {
 public:
  MillionCodec(const MillionFormat& format, const MillionCodebooks& codebooks, std::string spec,
               std::string calibration_digest);

  const CodecInfo& info() const override { return info_; }
  const PageLayout& layout() const override { return format_.layout; }
  size_t encode_workspace_bytes() const override;
  void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t> workspace) const override;
  void Decode(absl::Span<const DecodeItem> items) const override;
  absl::Status Validate(int layer, absl::Span<const uint8_t> encoded) const override;
  const PageAttention& attention() const override { return *attention_; }
  std::unique_ptr<DeviceCodec> NewDeviceCodec() const override;
  const MillionFormat& format() const { return format_; }
  const MillionTables& tables() const { return tables_; }

 private:
  const MillionFormat format_;
  const MillionTables tables_;
  CodecInfo info_;
  std::unique_ptr<PageAttention> attention_;  // reads format_ and tables_
};

}  // namespace kvmanager::million
