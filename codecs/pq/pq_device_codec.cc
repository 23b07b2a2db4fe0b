#include "codecs/pq/pq_device_codec.h"

#include <utility>

#include "codecs/device/device_selection.h"
#include "codecs/pq/pq_rows_cuda.h"
#include "codecs/pq/pq_selects.h"

namespace kvmanager {
namespace {

/// The kernels of a layout and its parameters.
class PqDeviceSelection final : public DeviceSelection {
 public:
  PqDeviceSelection(const pq::DeviceShape& shape, const pq::Parameters& parameters, const device::AttendKernels* rows)
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
  int LaunchSelect(const device::SelectionParams& params, int blocks, uint32_t middle_max,
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
  PqDeviceCodec(std::unique_ptr<DeviceCodec> raw, const PqDeviceSelection& selection)
      : raw_(std::move(raw)), selection_(selection) {}

  const device::AttendKernels* attention(int layer) const override { return raw_->attention(layer); }
  device::Prefill prefill(int layer) const override { return raw_->prefill(layer); }
  const DeviceSelection* selection() const override { return &selection_; }
  absl::Status Encode(const DeviceEncodeItem* items, uint32_t count, uint32_t* declined,
                      CUstream_st* stream) const override {
    return raw_->Encode(items, count, declined, stream);
  }
  absl::Status Decode(const DeviceDecodeItem* items, uint32_t count, CUstream_st* stream) const override {
    return raw_->Decode(items, count, stream);
  }

 private:
  const std::unique_ptr<DeviceCodec> raw_;
  const PqDeviceSelection selection_;
};

}  // namespace

std::unique_ptr<DeviceCodec> MakePqDeviceCodec(const Codec& raw, const pq::DeviceShape& shape,
                                               const pq::Parameters& parameters) {
  const device::AttendKernels* const rows = pq::SelectedRowsKernels(shape.head_dim);
  std::unique_ptr<DeviceCodec> made = raw.NewDeviceCodec();
  if (made == nullptr || rows == nullptr || !pq::CanSelectOnDevice(shape) ||
      parameters.scores != pq::Parameters::Scores::kCodes || parameters.rebuild != 0) {
    return nullptr;
  }
  return std::make_unique<PqDeviceCodec>(std::move(made), PqDeviceSelection(shape, parameters, rows));
}

}  // namespace kvmanager
