#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "codecs/pq/pq.h"
#include "codecs/pq/pq_index.h"
#include "codecs/raw/raw.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

/// Pages as raw keeps them, and an index for each sequence. Immutable but for the cost model; any thread.
class PqCodec final : public Codec {
 public:
  PqCodec(std::unique_ptr<Codec> raw, std::shared_ptr<const pq::Shape> shape)
      : raw_(std::move(raw)), shape_(std::move(shape)), info_(raw_->info()) {
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

 private:
  const std::unique_ptr<Codec> raw_;
  const std::shared_ptr<const pq::Shape> shape_;
  CodecInfo info_;
};

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
  return std::make_unique<PqCodec>(std::move(raw), std::move(shape));
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
