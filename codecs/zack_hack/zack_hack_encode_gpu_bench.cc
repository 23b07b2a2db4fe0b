// Encode and decode of ZACK+HACK pages on a GPU: GB/s of raw pages.
//
//   bazel run --config=opt //codecs/zack_hack:zack_hack_encode_gpu_bench
//
// Random pages, a made-up artifact, one call for all pages of four layers, replays of a CUDA graph, the median of many.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

#include "absl/strings/str_cat.h"
#include "codecs/device/device_codec.h"
#include "codecs/zack_hack/stack_testing.h"
#include "codecs/zack_hack/zack_hack.h"
#include "kvmanager/base/half.h"

namespace kvmanager::zack_hack {
namespace {

constexpr int kRepetitions = 9, kLayers = 4;
constexpr size_t kPages = 4096;     // 1 GB
constexpr size_t kDifferent = 128;  // pages; the others are copies

void Check(int error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "zack_hack_encode_gpu_bench: %s: %s\n", what, cudaGetErrorString(cudaError_t(error)));
  std::exit(1);
}
void Check(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "zack_hack_encode_gpu_bench: %s\n", status.ToString().c_str());
  std::exit(1);
}

template <typename T>
T* Upload(const std::vector<T>& from) {
  void* to = nullptr;
  Check(cudaMalloc(&to, from.size() * sizeof(T)), "cudaMalloc");
  Check(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "cudaMemcpy");
  return static_cast<T*>(to);
}

double MedianUs(cudaStream_t stream, const std::function<absl::Status()>& call) {
  cudaGraph_t graph;
  cudaGraphExec_t ready;
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin), "an event");
  Check(cudaEventCreate(&end), "an event");
  Check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  const absl::Status status = call();
  Check(cudaStreamEndCapture(stream, &graph), "capture");
  Check(status);
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
  cudaGraphExecDestroy(ready);
  cudaGraphDestroy(graph);
  std::sort(us.begin(), us.end());
  return us[us.size() / 2];
}

int Main() {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess || count == 0) {
    std::fprintf(stderr, "zack_hack_encode_gpu_bench: no GPU here: %s\n", cudaGetErrorString(error));
    return 1;
  }
  cudaStream_t stream;
  Check(cudaStreamCreate(&stream), "a stream");
  std::printf("%-40s %12s %12s\n", "codec", "encode GB/s", "decode GB/s");
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    PageLayout layout;
    layout.dtype = dtype;
    layout.kv_heads = 8;
    layout.head_dim = 128;
    layout.page_tokens = 64;
    std::mt19937 random(1);
    std::normal_distribution<float> normal(0, 1);
    std::vector<uint8_t> raw(kPages * layout.raw_bytes());
    const size_t different = kDifferent * layout.raw_bytes();
    for (size_t i = 0; i < different / 2; ++i) StoreElement(raw.data(), dtype, i, normal(random));
    for (size_t at = different; at < raw.size(); at += different) std::copy_n(raw.begin(), different, raw.begin() + at);
    uint8_t* const from = Upload(raw);
    uint8_t* const to = Upload(raw);
    for (const char* const bytes : {"88", "56", "48"}) {
      auto made = MakeCodec(zack::SyntheticContext(layout, kLayers, 32), {{"bytes", bytes}});
      Check(made.status());
      const Codec& codec = **made;
      const auto device = codec.NewDeviceCodec();
      if (device == nullptr) Check(cudaErrorMemoryAllocation, "factors");
      const size_t page_bytes = codec.info().encoded_bytes;
      uint8_t* const encoded = Upload(std::vector<uint8_t>(kPages * page_bytes));
      std::vector<DeviceEncodeItem> items;
      std::vector<DeviceDecodeItem> back;
      for (size_t i = 0; i < kPages; ++i) {
        const uint32_t layer = uint32_t(i * kLayers / kPages);
        items.push_back({from + i * layout.raw_bytes(), encoded + i * page_bytes, 0, layer});
        back.push_back({encoded + i * page_bytes, to + i * layout.raw_bytes(), layer});
      }
      DeviceEncodeItem* const on_device = Upload(items);
      DeviceDecodeItem* const back_on_device = Upload(back);
      uint32_t* const declined = Upload(std::vector<uint32_t>(kPages));
      const double size = double(kPages) * double(layout.raw_bytes());
      const double encode = MedianUs(stream, [&] { return device->Encode(on_device, kPages, declined, stream); });
      const double decode = MedianUs(stream, [&] { return device->Decode(back_on_device, kPages, stream); });
      std::printf("%-40s %12.1f %12.1f\n",
                  absl::StrCat("zack+hack:bytes=", bytes, dtype == DType::kFloat16 ? " fp16" : " bf16").c_str(),
                  size / encode * 1e-3, size / decode * 1e-3);
      std::fflush(stdout);
      for (void* p : {static_cast<void*>(encoded), static_cast<void*>(on_device), static_cast<void*>(back_on_device),
                      static_cast<void*>(declined)}) {
        cudaFree(p);
      }
    }
    cudaFree(from);
    cudaFree(to);
  }
  return 0;
}

}  // namespace
}  // namespace kvmanager::zack_hack

int main() { return kvmanager::zack_hack::Main(); }
