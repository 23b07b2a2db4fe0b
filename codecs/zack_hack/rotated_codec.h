// A codec in front of which K and V are rotated: each head's K' = K R_k and V' = V R_v, kept in all head_dim channels,
// are what an inner codec encodes and attends to. Stacks (zack+hack, zack+million) are this and their inner codecs.
//
// Encoding rotates in fp32 with equal bits on every instruction set, rounds to fp16 and hands a page of fp16 to the
// layer's inner codec; a value beyond fp16 declines the page. Attention maps queries into the space once and outputs
// out of it once (page_attention.h), and between the two it is the inner codec's. Immutable once made; every method may
// be called from any thread at once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "codecs/codec.h"
#include "codecs/cpu_isa.h"
#include "codecs/zack/factors.h"

namespace kvmanager::zack {

/// What the rows of one head are multiplied with; each matrix [d][d], row-major.
struct HeadRotation {
  std::vector<float> encode[2];  // K' = K encode[0], V' = V encode[1]; an output o of raw pages is o encode[1] there
  std::vector<float> decode[2];  // K = K' decode[0], V = V' decode[1], likewise outputs
  std::vector<float> query;      // q' = q query, so that q' k' = q k
};

/// order: [side][d], the factors' columns in the order in which the channels are kept; nullptr: as they are.
HeadRotation MakeHeadRotation(const Factors& factors, int layer, int head, const int32_t* order);

class RotatedCodec;

struct RotatedCodecOptions {
  std::string name;
  std::string spec;  // canonical, without the calibration
  uint32_t version = 0;
  PageLayout layout;  // of raw pages; inner codecs have the same with dtype float16
  std::string space;  // equal texts: equal rotations (PageAttention::space). Empty: unknown
  bool fold = false;  // outputs stay in the space, for a client that folded decode[1] into W_O
  std::shared_ptr<const Calibration> calibration;
  Isa isa = BestIsa();  // of rotations: at most what the processor runs
  std::unique_ptr<DeviceCodec> (*new_device_codec)(const RotatedCodec& codec) = nullptr;  // nullptr: no GPU
};

class RotatedCodec final : public Codec {
 public:
  /// heads: [layers][kv_heads]. inner: [layers], each asked with its layer's number; one codec may serve several.
  RotatedCodec(RotatedCodecOptions options, std::vector<HeadRotation> heads,
               std::vector<std::shared_ptr<const Codec>> inner);
  ~RotatedCodec() override;

  const CodecInfo& info() const override { return info_; }
  const PageLayout& layout() const override { return options_.layout; }
  size_t encode_workspace_bytes() const override { return inner_workspace_bytes_ + page_bytes() + rows_bytes(); }
  void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t> workspace) const override;
  /// The inner codec's values, rounded to fp16 in the space, then rotated back. Allocates a page.
  void Decode(absl::Span<const DecodeItem> items) const override;
  absl::Status Validate(int layer, absl::Span<const uint8_t> encoded) const override;
  const PageAttention& attention() const override { return *attention_; }
  bool OutputFactor(int layer, int kv_head, absl::Span<float> factor) const override;

  std::unique_ptr<DeviceCodec> NewDeviceCodec() const override {
    return options_.new_device_codec == nullptr ? nullptr : options_.new_device_codec(*this);
  }

  int layers() const { return int(inner_.size()); }
  bool folds() const { return options_.fold; }
  const Codec& inner(int layer) const { return *inner_[layer]; }
  const HeadRotation& rotation(int layer, int head) const {
    return heads_[size_t(layer) * options_.layout.kv_heads + head];
  }
  /// A raw page's K' and V' in fp16, as the inner codec gets them. rotated: a page; rows: [page_tokens][head_dim].
  /// False: a value does not fit.
  bool Rotate(const uint8_t* raw, int layer, uint8_t* rotated, float* rows) const;

 private:
  class Attention;
  size_t page_bytes() const { return options_.layout.raw_bytes(); }
  size_t rows_bytes() const { return size_t{options_.layout.page_tokens} * options_.layout.head_dim * sizeof(float); }

  const RotatedCodecOptions options_;
  const std::vector<HeadRotation> heads_;
  const std::vector<std::shared_ptr<const Codec>> inner_;
  size_t inner_workspace_bytes_ = 0;  // a multiple of 64
  CodecInfo info_;
  std::unique_ptr<PageAttention> attention_;
};

}  // namespace kvmanager::zack
