#include "codecs/device/device_encoder.h"

#include <cstring>
#include <deque>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/piece_ring.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device_memory.h"

namespace kvmanager {
namespace {

class DeviceEncoderImpl final : public DeviceEncoder {
 public:
  DeviceEncoderImpl(CUstream_st* stream, uint32_t items_max) : stream_(stream), ring_(items_max) {}
  ~DeviceEncoderImpl() override {
    cudaStreamSynchronize(stream_);
    for (cudaEvent_t event : batches_) cudaEventDestroy(event);
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }

  absl::Status Init() {
    KV_ASSIGN_OR_RETURN(items_, AllocatePinned<DeviceEncodeItem>(ring_.places()));
    return absl::OkStatus();
  }

  absl::Status Encode(const DeviceCodec& codec, absl::Span<const DeviceEncodeItem> items, uint32_t* declined) override {
    if (items.empty()) return absl::OkStatus();
    while (!batches_.empty() && cudaEventQuery(batches_.front()) == cudaSuccess) {
      ring_.Release();
      events_.push_back(batches_.front());
      batches_.pop_front();
    }
    if (events_.empty()) {
      cudaEvent_t event = nullptr;
      KV_RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate"));
      events_.push_back(event);
    }
    const uint32_t count = static_cast<uint32_t>(items.size());
    const std::optional<uint32_t> at = ring_.Take(count);
    if (!at.has_value()) {
      return FieldError(absl::StatusCode::kResourceExhausted, "pages to be encoded",
                        absl::StrCat(ring_.used(), " and ", count, " more"),
                        absl::StrCat("at most ", ring_.places(), " on their way"));
    }
    std::memcpy(items_.get() + *at, items.data(), items.size() * sizeof(DeviceEncodeItem));
    absl::Status status = Launch(codec, items, items_.get() + *at, declined);
    const cudaEvent_t passed = events_.back();
    events_.pop_back();
    batches_.push_back(passed);  // the piece is given back in its turn, whatever happened
    status.Update(CudaStatus(cudaEventRecord(passed, stream_), "cudaEventRecord"));
    return status;
  }

 private:
  /// `on_device`: the items where the device reads them.
  absl::Status Launch(const DeviceCodec& codec, absl::Span<const DeviceEncodeItem> items,
                      const DeviceEncodeItem* on_device, uint32_t* declined) const {
    const auto of = [&](const DeviceEncodeItem& item) -> const DeviceCodec* {
      return codec.keeps_raw(int(item.layer), item.first_token) ? nullptr : &codec.of(int(item.layer));
    };
    for (size_t begin = 0; begin < items.size();) {
      const DeviceCodec* const one = of(items[begin]);
      size_t end = begin + 1;
      while (end < items.size() && of(items[end]) == one) ++end;
      KV_RETURN_IF_ERROR(
          one == nullptr ? CudaStatus(cudaMemsetAsync(declined + begin, 1, (end - begin) * sizeof(uint32_t), stream_),
                                      "cudaMemsetAsync")
                         : one->Encode(on_device + begin, uint32_t(end - begin), declined + begin, stream_));
      begin = end;
    }
    return absl::OkStatus();
  }

  CUstream_st* const stream_;
  PieceRing ring_;
  PinnedArray<DeviceEncodeItem> items_;  // [ring_.places()]
  std::deque<cudaEvent_t> batches_;      // behind each, in the order of the stream
  std::vector<cudaEvent_t> events_;      // to be used again
};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceEncoder>> DeviceEncoder::Create(CUstream_st* stream, uint32_t items_max) {
  auto encoder = std::make_unique<DeviceEncoderImpl>(stream, items_max);
  KV_RETURN_IF_ERROR(encoder->Init());
  return std::unique_ptr<DeviceEncoder>(std::move(encoder));
}

}  // namespace kvmanager
