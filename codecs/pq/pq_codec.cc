#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "codecs/pq/pq.h"
#include "codecs/pq/pq_device.h"
#include "codecs/pq/pq_device_codec.h"
#include "codecs/pq/pq_index.h"
#include "codecs/raw/raw.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

/// Pages as raw keeps them, and an index for each sequence. Immutable but for the cost model; any thread.
class PqCodec final : public Codec {
 public:
  PqCodec(std::unique_ptr<Codec> raw, std::shared_ptr<const pq::Shape> shape, int query_heads)
      : raw_(std::move(raw)),
        shape_(std::move(shape)),
        device_shape_(OnDevice(*shape_)),
        query_heads_(query_heads),
        info_(raw_->info()) {
    info_.name = "pq";
    info_.spec = shape_->parameters.Spec();
  }

  const CodecInfo& info() const override { return info_; }
  const PageLayout& layout() const override { return raw_->layout(); }
  size_t encode_workspace_bytes() const override { return raw_->encode_workspace_bytes(); }
  void Encode(absl::Span<EncodeItem> items, absl::Span<uint8_t> workspace) const override {
    raw_->Encode(items, workspace);
  }
  void Decode(absl::Span<const DecodeItem> items) const override { raw_->Decode(items); }
  absl::Status Validate(int layer, absl::Span<const uint8_t> encoded) const override {
    return raw_->Validate(layer, encoded);
  }
  const PageAttention& attention() const override { return raw_->attention(); }
  std::unique_ptr<SequenceIndex> NewIndex(const IndexFacts& facts) const override {
    return pq::MakeIndex(shape_, facts);
  }
  std::unique_ptr<SequenceIndex> NewDeviceIndex(const IndexFacts& facts) const override {
    return pq::MakeIndex(device_shape_, facts);
  }
  DeviceIndexLayout device_index() const override {
    const pq::DeviceShape shape = DeviceShape();
    return {shape.book_bytes(), shape.chunk_bytes(), pq::kCodeChunkTokens};
  }
  std::unique_ptr<DeviceCodec> NewDeviceCodec() const override {
    return MakePqDeviceCodec(*raw_, DeviceShape(), shape_->parameters);
  }

 private:
  static std::shared_ptr<const pq::Shape> OnDevice(const pq::Shape& shape);
  pq::DeviceShape DeviceShape() const;

  const std::unique_ptr<Codec> raw_;
  const std::shared_ptr<const pq::Shape> shape_, device_shape_;
  const int query_heads_;
  CodecInfo info_;
};

std::shared_ptr<const pq::Shape> PqCodec::OnDevice(const pq::Shape& shape) {
  auto on_device = std::make_shared<pq::Shape>(shape);
  on_device->on_device = true;
  return on_device;
}

pq::DeviceShape PqCodec::DeviceShape() const {
  const PageLayout& layout = raw_->layout();
  pq::DeviceShape shape;
  shape.kv_heads = layout.kv_heads;
  shape.query_heads = query_heads_;
  shape.head_dim = layout.head_dim;
  shape.page_tokens = layout.page_tokens;
  shape.m = shape_->parameters.m;
  shape.bits = shape_->parameters.bits;
  shape.bfloat16 = layout.dtype == DType::kBFloat16;
  return shape;
}

absl::StatusOr<std::unique_ptr<Codec>> MakePqCodec(const CodecContext& context, const CodecParameters& parameters) {
  if (context.calibration != nullptr) {
    return InvalidField("codec parameter calibration", context.calibration->digest(),
                        "absent: pq trains on each sequence's prompt");
  }
  CodecRegistry raw_registry;
  RegisterRaw(raw_registry);
  KV_ASSIGN_OR_RETURN(std::unique_ptr<Codec> raw, raw_registry.Create("raw", context));
  auto shape = std::make_shared<pq::Shape>();
  KV_ASSIGN_OR_RETURN(shape->parameters, pq::ParseParameters(context.layout, parameters));
  shape->layout = context.layout;
  shape->layers = context.layers;
  shape->kernels = &pq::KernelsOf(BestIsa());
  shape->model = std::make_shared<pq::CostModel>();
  return std::make_unique<PqCodec>(std::move(raw), std::move(shape),
                                   context.query_heads > 0 ? context.query_heads : context.layout.kv_heads);
}

}  // namespace

void RegisterPq(CodecRegistry& registry) {
  registry.Register(
      "pq",
      "raw pages, of which a decode query reads a part: m, bits, ratio, sinks, scores, iterations, rebuild, "
      "cache_blocks, cache_policy",
      MakePqCodec);
}

}  // namespace kvmanager
