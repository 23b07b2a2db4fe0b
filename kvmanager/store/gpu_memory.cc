// A GPU's memory: kernels touch the bytes, behind the store's calls.
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/cache.h"
#include "kvmanager/store/memory_backend.h"
#include "kvmanager/store/tier.h"

namespace kvmanager {
namespace {

class GpuMemory final : public MemoryBackend {
 public:
  explicit GpuMemory(EncodeExecutor* executor) : executor_(executor) {}

  bool follows_tables() const override { return true; }
  bool writes_at_once() const override { return false; }
  bool keeps_activations() const override { return false; }
  absl::Status CheckTransfers(const Cache& cache) const override {
    return FieldError(absl::StatusCode::kFailedPrecondition, "device", absl::StrCat(cache.config.device),
                      absl::StrCat(CacheConfig::kHost, ", host memory, to read and write whole blocks"));
  }
  DeviceIndexLayout index_layout(const Codec& codec) const override { return codec.device_index(); }
  std::unique_ptr<SequenceIndex> NewIndex(const Codec& codec, const IndexFacts& facts) const override {
    return codec.NewDeviceIndex(facts);
  }

  absl::Status Write(const PendingAppend&) const override { return absl::OkStatus(); }
  absl::Status Plan(const PendingAppend& append, std::vector<PageWrite>*) const override {
    return FieldError(absl::StatusCode::kFailedPrecondition, "device", absl::StrCat(append.cache.config.device),
                      "host memory: kernels write to a GPU's");
  }
  absl::Status WritePage(const Cache&, int, const AppendEntry&, const PageWrite&) const override {
    return absl::OkStatus();
  }
  void CopyOpen(const Cache&, uint32_t layer, const Page& from, PageId to, int tokens,
                std::vector<OpenCopy>* copies) const override {
    copies->push_back({layer, from.raw.valid() ? from.raw : from.encoded, to, tokens});
  }
  uint64_t Checksum(const uint8_t*, size_t) const override { return 0; }
  absl::StatusOr<uint64_t> LookAtArrival(absl::FunctionRef<absl::StatusOr<uint64_t>()>) const override { return 0; }
  void Train(IndexTraining training) const override {
    const Cache& cache = training.cache;
    IndexJob& job = *training.job;
    const int layer = job.layer();
    job.place = training.sequence.index_places[layer].book;
    KV_CHECK(job.place != nullptr);
    executor_->Train({training.sequence.id, training.job, std::move(training.pages),
                      cache.layout(layer).raw_bytes() / 2, cache.tier->pool()->Data(job.place->slot),
                      std::move(training.done)});
  }

 private:
  EncodeExecutor* const executor_;
};

}  // namespace

std::unique_ptr<MemoryBackend> MakeGpuMemory(EncodeExecutor* executor) { return std::make_unique<GpuMemory>(executor); }

}  // namespace kvmanager
