// Encode and decode of MILLION pages on a GPU: GB/s of raw pages.
//
//   bazel run --config=opt //codecs/million:million_encode_gpu_bench
//
// Random pages and centroids, one launch for all pages, replays of a CUDA graph, the median of many.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "codecs/million/million.h"
#include "codecs/million/million_testing.h"

namespace kvmanager::million {
namespace {

constexpr int kRepetitions = 9, kLayers = 4;
constexpr size_t kPages = 2048;     // 512 MB
constexpr size_t kDifferent = 128;  // pages; the others are copies

void Check(int error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "million_encode_gpu_bench: %s: %s\n", what, cudaGetErrorString(cudaError_t(error)));
  std::exit(1);
}

template <typename T>
T* Upload(const std::vector<T>& from) {
  void* to = nullptr;
  Check(cudaMalloc(&to, from.size() * sizeof(T)), "cudaMalloc");
  Check(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return static_cast<T*>(to);
}

template <typename Call>
double MedianUs(cudaStream_t stream, Call call) {
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "an event");
  Check(cudaEventCreate(&end), "an event");
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
  call();
  Check(cudaStreamEndCapture(stream, &graph), "capture");
  Check(cudaGraphInstantiate(&ready, graph, 0), "a graph");
  std::vector<double> us;
  for (int r = -2; r < kRepetitions; ++r) {
    Check(cudaEventRecord(begin, stream), "an event");
    Check(cudaGraphLaunch(ready, stream), "a launch");
    Check(cudaEventRecord(end, stream), "an event");
    Check(cudaEventSynchronize(end), "a launch");
    float ms = 0;
    Check(cudaEventElapsedTime(&ms, begin, end), "events");
    if (r >= 0) us.push_back(ms * 1e3);
  }
  std::sort(us.begin(), us.end());
  return us[us.size() / 2];
}

int Main() {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
    std::fprintf(stderr, "million_encode_gpu_bench: no GPU here: %s\n", cudaGetErrorString(error));
    return 1;
  }
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream), "a stream");
  const PageLayout layout = MakeLayout(8, 128, 64);
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1);
  std::vector<uint8_t> raw(kPages * layout.raw_bytes());
  const size_t different = kDifferent * layout.raw_bytes();
  for (size_t i = 0; i < different / 2; ++i) StoreElement(raw.data(), layout.dtype, i, normal(random));
  for (size_t at = different; at < raw.size(); at += different) std::copy_n(raw.begin(), different, raw.begin() + at);
  uint8_t* const from = Upload(raw);
  uint8_t* const to = Upload(raw);
  std::printf("%-36s %12s %12s\n", "codec", "encode GB/s", "decode GB/s");
  for (const SideParameters side : {SideParameters{64, 8}, SideParameters{32, 8}, SideParameters{32, 12}}) {
    const MillionFormat format = MakeFormat(layout, side, side);
    const size_t pages = side.bits == 8 && side.m == 64 ? kPages : kPages / 32;
    const Books books(format, kLayers, 2);
    const auto codec = MakeMillionCodec(format, books.books, "million");
    const auto device = codec->NewDeviceCodec();
    if (device == nullptr) Check(cudaErrorMemoryAllocation, "codebooks");
    const std::vector<uint8_t> none(pages * format.page_bytes);
    uint8_t* const encoded = Upload(none);
    std::vector<DeviceEncodeItem> items;
    std::vector<DeviceDecodeItem> back;
    for (size_t i = 0; i < pages; ++i) {
      const uint32_t layer = uint32_t(i * kLayers / pages);
      items.push_back({from + i * layout.raw_bytes(), encoded + i * format.page_bytes, 0, layer});
      back.push_back({encoded + i * format.page_bytes, to + i * layout.raw_bytes(), layer});
    }
    DeviceEncodeItem* const on_device = Upload(items);
    DeviceDecodeItem* const back_on_device = Upload(back);
    uint32_t* const declined = Upload(std::vector<uint32_t>(pages));
    const auto ok = [](const absl::Status& status) { Check(status.ok() ? 0 : 1, "a launch"); };
    const double bytes = double(pages) * double(layout.raw_bytes());
    const double encode = MedianUs(stream, [&] { ok(device->Encode(on_device, uint32_t(pages), declined, stream)); });
    const double decode = MedianUs(stream, [&] { ok(device->Decode(back_on_device, uint32_t(pages), stream)); });
    std::printf("%-36s %12.1f %12.1f\n", MillionSpec(format.parameters).c_str(), bytes / encode * 1e-3,
                bytes / decode * 1e-3);
    for (void* p : {static_cast<void*>(encoded), static_cast<void*>(on_device), static_cast<void*>(back_on_device),
                    static_cast<void*>(declined)}) {
      cudaFree(p);
    }
  }
  return 0;
}

}  // namespace
}  // namespace kvmanager::million

int main() { return kvmanager::million::Main(); }
