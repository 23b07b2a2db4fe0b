// How fast a codec's kernels encode and decode pages: GB/s of raw pages, all in one launch, replays of a CUDA graph,
// the median of many. For benchmarks: an error ends the program.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "codecs/codec.h"
#include "codecs/device/device_codec.h"
#include "kvmanager/base/half.h"
#include "kvmanager/memory/gpu_benchmark.h"

namespace kvmanager::device {

class EncodeBench {
 public:
  static constexpr int kWarmUps = 2, kRepetitions = 9;
  static constexpr size_t kDifferent = 128;  // random pages; the others are copies

  EncodeBench(const PageLayout& layout, size_t pages) : layout_(layout), pages_(pages) {
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 1);
    std::vector<uint8_t> raw(pages * layout.raw_bytes());
    const size_t different = std::min(pages, kDifferent) * layout.raw_bytes();
    for (size_t i = 0; i < different / 2; ++i) StoreElement(raw.data(), layout.dtype, i, normal(random));
    for (size_t at = different; at < raw.size(); ++at) raw[at] = raw[at - different];
    from_ = Upload(raw);
    to_ = Upload(raw);
  }

  struct Rates {
    double encode_gb_per_s = 0, decode_gb_per_s = 0;
  };
  /// Of the first `pages` pages, spread over the model's layers: layer by layer, or by blocks of all layers, as
  /// engines' connectors have them.
  Rates Measure(const Codec& codec, int layers, size_t pages, bool by_blocks = false) const {
    const auto kernels = codec.NewDeviceCodec();
    if (kernels == nullptr) CHECK_CUDA(cudaErrorMemoryAllocation);
    const size_t page_bytes = codec.info().encoded_bytes;
    const DeviceArray<uint8_t> encoded = Allocate<uint8_t>(pages * page_bytes);
    std::vector<DeviceEncodeItem> items;
    std::vector<DeviceDecodeItem> back;
    for (size_t i = 0; i < pages; ++i) {
      const uint32_t layer = static_cast<uint32_t>(by_blocks ? i % layers : i * layers / pages);
      items.push_back({from_.get() + i * layout_.raw_bytes(), encoded.get() + i * page_bytes, 0, layer});
      back.push_back({encoded.get() + i * page_bytes, to_.get() + i * layout_.raw_bytes(), layer});
    }
    const auto d_items = Upload(items);
    const auto d_back = Upload(back);
    const auto declined = Allocate<uint32_t>(pages);
    const auto us = [&](auto enqueue) {
      return GraphUs(1, kWarmUps, kRepetitions, [&](int, cudaStream_t stream) {
        const absl::Status status = enqueue(stream);
        if (status.ok()) return cudaSuccess;
        std::fprintf(stderr, "%s\n", status.ToString().c_str());
        return cudaErrorUnknown;
      });
    };
    const uint32_t count = static_cast<uint32_t>(pages);
    const double gb = static_cast<double>(pages) * static_cast<double>(layout_.raw_bytes()) * 1e-3;
    const double encode =
        us([&](cudaStream_t stream) { return kernels->Encode(d_items.get(), count, declined.get(), stream); });
    const double decode = us([&](cudaStream_t stream) { return kernels->Decode(d_back.get(), count, stream); });
    return {gb / encode, gb / decode};
  }
  size_t pages() const { return pages_; }

 private:
  const PageLayout layout_;
  const size_t pages_;
  DeviceArray<uint8_t> from_, to_;
};

}  // namespace kvmanager::device
