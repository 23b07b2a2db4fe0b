#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "codecs/device/device_choice.h"
#include "codecs/pq/pq.h"
#include "codecs/pq/pq_device.h"
#include "codecs/pq/pq_index.h"
#include "codecs/pq/pq_rows_cuda.h"
#include "codecs/pq/pq_selects.h"
#include "codecs/raw/raw.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

/// The kernels of a layout and its parameters.
class PqDeviceChoice final : public DeviceChoice {
 public:
  PqDeviceChoice(const pq::DeviceShape& shape, const pq::Parameters& parameters, const device::AttendKernels* rows)
      : shape_(shape), parameters_(parameters), rows_(*rows) {}

  const device::AttendKernels& rows() const override { return rows_; }
  bool Serves(int query_heads) const override { return pq::CanSelectOnDevice(Of(query_heads)); }
  void SetReads(uint64_t position, device::Select* select) const override {
    pq::SetReads(parameters_, position, select);
  }
  absl::StatusOr<device::SelectSizes> Place(absl::Span<device::Select> queries) const override {
    return pq::PlaceSelects(shape_, queries);
  }
  size_t ScratchBytes(int query_heads, uint32_t runs) const override {
    return pq::SelectScratchBytes(Of(query_heads), runs);
  }
  int Blocks(int query_heads, uint32_t count, uint32_t middle_max, int multiprocessors) const override {
    return pq::SelectBlocks(Of(query_heads), count, middle_max, multiprocessors);
  }
  int Prepare() const override {
    const int error = rows_.prepare();
    return error != 0 ? error : pq::PrepareSelect();
  }
  int LaunchSelect(const device::ChoiceParams& params, int blocks, uint32_t middle_max,
                   CUstream_st* stream) const override {
    pq::SelectParams p;
    p.shape = Of(params.query_heads);
    p.slots = params.slots;
    p.index = params.index;
    p.queries = params.queries;
    p.count = params.count;
    p.q = params.q;
    p.scale = params.scale;
    p.scratch = params.scratch;
    p.runs = params.runs;
    p.rows = params.rows;
    return pq::LaunchPqSelect(p, blocks, middle_max, stream);
  }
  int LaunchEncode(const uint8_t* pool, const uint32_t* slots, const device::IndexTable& index,
                   const device::EncodeCodes* items, uint32_t count, CUstream_st* stream) const override {
    return pq::LaunchPqEncode(shape_, pool, slots, index, items, count, stream);
  }
  int LaunchPrepareIndexes(uint8_t* const* indexes, uint32_t count, CUstream_st* stream) const override {
    return pq::LaunchPqPrepareBooks(shape_, indexes, count, stream);
  }

 private:
  pq::DeviceShape Of(int query_heads) const {
    pq::DeviceShape shape = shape_;
    shape.query_heads = query_heads;
    return shape;
  }

  const pq::DeviceShape shape_;
  const pq::Parameters parameters_;
  const device::AttendKernels& rows_;
};

/// Pages as raw keeps them, of which queries choose rows. Immutable; any thread.
class PqDeviceCodec final : public DeviceCodec {
 public:
  PqDeviceCodec(std::unique_ptr<DeviceCodec> raw, const PqDeviceChoice& choice)
      : raw_(std::move(raw)), choice_(choice) {}

  const device::AttendKernels* attention(int layer) const override { return raw_->attention(layer); }
  device::Prefill prefill(int layer) const override { return raw_->prefill(layer); }
  const DeviceChoice* choice() const override { return &choice_; }
  absl::Status Encode(const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                      CUstream_st* stream) const override {
    return raw_->Encode(items, count, declined, stream);
  }
  absl::Status Decode(const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) const override {
    return raw_->Decode(items, count, stream);
  }

 private:
  const std::unique_ptr<DeviceCodec> raw_;
  const PqDeviceChoice choice_;
};

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
  std::unique_ptr<DeviceCodec> NewDeviceCodec() const override;

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

// Not for the oracle's scores, and not for codebooks that are made anew.
std::unique_ptr<DeviceCodec> PqCodec::NewDeviceCodec() const {
  const pq::Parameters& parameters = shape_->parameters;
  const device::AttendKernels* const rows = pq::SelectedRowsKernels(raw_->layout().head_dim);
  std::unique_ptr<DeviceCodec> raw = raw_->NewDeviceCodec();
  if (raw == nullptr || rows == nullptr || !pq::CanSelectOnDevice(DeviceShape()) ||
      parameters.scores != pq::Parameters::Scores::kCodes || parameters.rebuild != 0) {
    return nullptr;
  }
  return std::make_unique<PqDeviceCodec>(std::move(raw), PqDeviceChoice(DeviceShape(), parameters, rows));
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
