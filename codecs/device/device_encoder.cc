#include "codecs/device/device_encoder.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <deque>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/device.h"

namespace kvmanager {
namespace {

class DeviceEncoderImpl final : public DeviceEncoder {
 public:
  DeviceEncoderImpl(CUstream_st* stream, uint32_t items_max) : stream_(stream), items_max_(items_max) {}
  ~DeviceEncoderImpl() override {
    cudaStreamSynchronize(stream_);
    for (const Batch& batch : batches_) cudaEventDestroy(batch.passed);
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
    if (items_ != nullptr) cudaFreeHost(items_);
  }

  absl::Status Init() {
    return CudaStatus(
        cudaHostAlloc(reinterpret_cast<void**>(&items_), items_max_ * sizeof(DeviceEncodeItem), cudaHostAllocMapped),
        "cudaHostAlloc");
  }

  absl::Status Encode(const DeviceCodec& codec, absl::Span<const DeviceEncodeItem> items, uint32_t* declined) override {
    if (items.empty()) return absl::OkStatus();
    while (!batches_.empty() && cudaEventQuery(batches_.front().passed) == cudaSuccess) {
      used_ -= batches_.front().places;
      events_.push_back(batches_.front().passed);
      batches_.pop_front();
    }
    if (batches_.empty()) next_ = 0;
    // A batch lies in one piece: at the end of the ring, if it does not fit there, its rest is left out.
    const uint32_t count = static_cast<uint32_t>(items.size());
    const uint32_t skipped = next_ + count > items_max_ ? items_max_ - next_ : 0;
    if (items.size() > items_max_ || used_ + skipped + count > items_max_) {
      return FieldError(absl::StatusCode::kResourceExhausted, "pages to be encoded",
                        absl::StrCat(used_, " and ", items.size(), " more"), absl::StrCat("at most ", items_max_));
    }
    if (events_.empty()) {
      cudaEvent_t event = nullptr;
      KV_RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate"));
      events_.push_back(event);
    }
    const uint32_t at = skipped > 0 ? 0 : next_;
    std::memcpy(items_ + at, items.data(), items.size() * sizeof(DeviceEncodeItem));
    KV_RETURN_IF_ERROR(codec.Encode(items_ + at, count, declined, stream_));
    const cudaEvent_t passed = events_.back();
    KV_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(passed, stream_), "cudaEventRecord"));
    events_.pop_back();
    batches_.push_back({passed, skipped + count});
    used_ += skipped + count;
    next_ = at + count;
    return absl::OkStatus();
  }

 private:
  struct Batch {
    cudaEvent_t passed;
    uint32_t places;  // of the ring
  };

  CUstream_st* const stream_;
  const uint32_t items_max_;
  DeviceEncodeItem* items_ = nullptr;  // [items_max_], a ring
  uint32_t next_ = 0, used_ = 0;
  std::deque<Batch> batches_;  // in the order of the stream
  std::vector<cudaEvent_t> events_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceEncoder>> DeviceEncoder::Create(CUstream_st* stream, uint32_t items_max) {
  auto encoder = std::make_unique<DeviceEncoderImpl>(stream, items_max);
  KV_RETURN_IF_ERROR(encoder->Init());
  return std::unique_ptr<DeviceEncoder>(std::move(encoder));
}

}  // namespace kvmanager
