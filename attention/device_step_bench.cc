// What a device step costs beside its attention: the host's time of a layer's Append and Attend, of Prepare, and the
// device's time of a whole step of all layers, replayed as a CUDA graph, against that of its attention alone.
//
//   bazel run --config=opt //attention:device_step_bench
//
// Pages are shared by all layers (a layer's own would not fit), of random bits; the newest page is open, two are raw by
// lag. Medians of many steps, at positions that move on by one token.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "attention/device_step.h"
#include "codecs/hack/hack.h"
#include "codecs/raw/raw.h"
#include "codecs/registry.h"

namespace kvmanager {
namespace {

#define CHECK_CUDA(call)                                                                      \
  do {                                                                                        \
    const cudaError_t error_ = (call);                                                        \
    if (error_ != cudaSuccess) {                                                              \
      std::fprintf(stderr, "device_step_bench: %s: %s\n", #call, cudaGetErrorString(error_)); \
      std::exit(1);                                                                           \
    }                                                                                         \
  } while (0)

void CheckOk(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "device_step_bench: %s\n", std::string(status.message()).c_str());
  std::exit(1);
}

constexpr int kLayers = 32, kQueryHeads = 32, kKvHeads = 8, kHeadDim = 128, kPageTokens = 64, kLagPages = 2;
constexpr int kSteps = 60;

double Median(std::vector<double> x) {
  std::sort(x.begin(), x.end());
  return x[x.size() / 2];
}

template <typename Call>
double HostUs(Call call) {
  const auto begin = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

template <typename T>
T* Allocate(size_t count) {
  void* p = nullptr;
  CHECK_CUDA(cudaMalloc(&p, count * sizeof(T)));
  return static_cast<T*>(p);
}

/// Device microseconds of what `call` puts on the stream.
class Timer {
 public:
  explicit Timer(cudaStream_t stream) : stream_(stream) {
    CHECK_CUDA(cudaEventCreate(&begin_));
    CHECK_CUDA(cudaEventCreate(&end_));
  }
  template <typename Call>
  double Us(Call call) {
    CHECK_CUDA(cudaEventRecord(begin_, stream_));
    call();
    CHECK_CUDA(cudaEventRecord(end_, stream_));
    CHECK_CUDA(cudaEventSynchronize(end_));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin_, end_));
    return ms * 1e3;
  }

 private:
  const cudaStream_t stream_;
  cudaEvent_t begin_, end_;
};

struct Graph {
  cudaGraphExec_t ready = nullptr;
  template <typename Call>
  Graph(cudaStream_t stream, Call call) {
    cudaGraph_t graph;
    CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    call();
    CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&ready, graph, 0));
    CHECK_CUDA(cudaGraphDestroy(graph));
  }
  ~Graph() { cudaGraphExecDestroy(ready); }
};

void Run(const char* name, std::unique_ptr<Codec> codec, int batch, int context, uint8_t* pool) {
  const auto device_codec = codec->NewDeviceCodec();
  PageLayout layout = codec->layout();
  int multiprocessors = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, 0));
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  const uint32_t pages = uint32_t(context / kPageTokens);
  const bool identity = codec->info().identity;
  DeviceStep::Options o;
  o.stream = stream;
  o.pool = pool;
  o.layout = layout;
  o.layers = kLayers;
  o.query_heads = kQueryHeads;
  o.lag_pages = kLagPages;
  o.identity = identity;
  o.codec = device_codec.get();
  o.multiprocessors = multiprocessors;
  o.pages_max = uint64_t(batch) * (pages + 4);
  o.sequences_max = batch;
  o.tokens_max = batch;
  uint64_t* words = nullptr;
  CHECK_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&words), batch * 8, cudaHostAllocMapped));
  o.non_finite = words;
  o.non_finite_words = uint32_t(batch);
  auto made = DeviceStep::Create(o);
  CheckOk(made.status());
  DeviceStep& step = **made;

  // Slots: encoded ones, then raw ones, shuffled.
  const size_t encoded_bytes = codec->info().encoded_bytes, raw_bytes = layout.raw_bytes();
  const uint32_t encoded_pages = identity ? 0 : pages - kLagPages - 1, raw_pages = pages + 2 - encoded_pages;
  std::mt19937 random(1);
  std::vector<uint32_t> encoded(size_t(batch) * encoded_pages), raw(size_t(batch) * raw_pages);
  for (size_t i = 0; i < encoded.size(); ++i) encoded[i] = uint32_t(i * encoded_bytes / device::kSlotUnitBytes);
  const size_t raw_at = encoded.size() * encoded_bytes;
  for (size_t i = 0; i < raw.size(); ++i) raw[i] = uint32_t((raw_at + i * raw_bytes) / device::kSlotUnitBytes);
  std::shuffle(encoded.begin(), encoded.end(), random);
  std::shuffle(raw.begin(), raw.end(), random);
  std::vector<DeviceStep::Entry> entries;
  const double set_us = HostUs([&] {
    for (int s = 0; s < batch; ++s) {
      const auto place = step.AddSequence(pages + 2);
      CheckOk(place.status());
      std::vector<DevicePage> list(pages + 2);
      for (uint32_t j = 0; j < list.size(); ++j) {
        if (j < encoded_pages) {
          list[j].encoded = encoded[size_t(s) * encoded_pages + j];
        } else {
          list[j].raw = raw[size_t(s) * raw_pages + j - encoded_pages];
        }
      }
      for (int layer = 0; layer < kLayers; ++layer) CheckOk(step.SetPages(*place, layer, 0, list));
      entries.push_back({*place, uint64_t(context - kPageTokens), 1, 0});
    }
  });
  const size_t kv = size_t(batch) * kKvHeads * kHeadDim, q_size = size_t(batch) * kQueryHeads * kHeadDim;
  uint16_t* const k = Allocate<uint16_t>(kv);
  uint16_t* const v = Allocate<uint16_t>(kv);
  uint16_t* const q = Allocate<uint16_t>(q_size);
  uint16_t* const out = Allocate<uint16_t>(q_size);
  for (uint16_t* p : {k, v}) CHECK_CUDA(cudaMemset(p, 0x11, kv * 2));
  CHECK_CUDA(cudaMemset(q, 0x11, q_size * 2));
  CHECK_CUDA(cudaDeviceSynchronize());

  Timer timer(stream);
  double first_us = 0;
  const double first_device_us =
      timer.Us([&] { first_us = HostUs([&] { CheckOk(step.Prepare(0, kLayers, entries, true, true)); }); });
  const auto layers = [&](bool append, bool attend) {
    for (int layer = 0; layer < kLayers; ++layer) {
      if (append) CheckOk(step.Append(layer, k, v));
      if (attend) CheckOk(step.Attend(layer, q, out, nullptr));
    }
  };
  layers(true, true);
  CHECK_CUDA(cudaStreamSynchronize(stream));
  const Graph attention(stream, [&] { layers(false, true); }), appends(stream, [&] { layers(true, false); }),
      both(stream, [&] { layers(true, true); });
  std::vector<double> prepare, run, prepare_device, attend_device, append_device, both_device, whole_device;
  for (int i = 0; i < kSteps; ++i) {
    for (DeviceStep::Entry& entry : entries) ++entry.position;
    prepare_device.push_back(
        timer.Us([&] { prepare.push_back(HostUs([&] { CheckOk(step.Prepare(0, kLayers, entries, true, true)); })); }));
    run.push_back(HostUs([&] { layers(true, true); }) / kLayers);
    CHECK_CUDA(cudaStreamSynchronize(stream));
    attend_device.push_back(timer.Us([&] { CHECK_CUDA(cudaGraphLaunch(attention.ready, stream)); }));
    append_device.push_back(timer.Us([&] { CHECK_CUDA(cudaGraphLaunch(appends.ready, stream)); }));
    both_device.push_back(timer.Us([&] { CHECK_CUDA(cudaGraphLaunch(both.ready, stream)); }));
    for (DeviceStep::Entry& entry : entries) entry.position ^= 1;  // another step
    whole_device.push_back(timer.Us([&] {
      CheckOk(step.Prepare(0, kLayers, entries, true, true));
      CHECK_CUDA(cudaGraphLaunch(both.ready, stream));
    }));
    for (DeviceStep::Entry& entry : entries) entry.position ^= 1;
  }
  std::printf(
      "%-10s B=%-3d L=%-6d host us: tables %.0f, first Prepare %.0f, Prepare %.1f, Append+Attend of a layer %.2f | "
      "device us: first Prepare %.0f, Prepare %.1f, attention of %d layers %.1f, appends %.1f, both %.1f, with Prepare "
      "%.1f\n",
      name, batch, context, set_us, first_us, Median(prepare), Median(run), first_device_us, Median(prepare_device),
      kLayers, Median(attend_device), Median(append_device), Median(both_device), Median(whole_device));
  std::fflush(stdout);
  for (void* p : {k, v, q, out}) cudaFree(p);
  made->reset();
  cudaFreeHost(words);
  cudaStreamDestroy(stream);
}

int Main() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
    std::fprintf(stderr, "device_step_bench: no GPU here\n");
    return 1;
  }
  PageLayout layout;
  layout.kv_heads = kKvHeads;
  layout.head_dim = kHeadDim;
  const size_t pool_bytes = size_t{10} << 30;
  uint8_t* const pool = Allocate<uint8_t>(pool_bytes);
  // Any code is valid, and so are small numbers in steps and minima.
  CHECK_CUDA(cudaMemset(pool, 0x11, pool_bytes));
  for (const auto& [batch, context] : {std::pair{16, 32768}, {1, 4096}, {64, 8192}}) {
    CodecRegistry registry;
    RegisterRaw(registry);
    RegisterHack(registry);
    Run("hack 2,2", *registry.Create("hack:k_bits=2,v_bits=2", layout), batch, context, pool);
    Run("hack 3,2", *registry.Create("hack:k_bits=3,v_bits=2", layout), batch, context, pool);
    if (batch * size_t(context / kPageTokens + 2) * layout.raw_bytes() <= pool_bytes) {
      Run("raw", *registry.Create("raw", layout), batch, context, pool);
    }
  }
  cudaFree(pool);
  return 0;
}

}  // namespace
}  // namespace kvmanager

int main() { return kvmanager::Main(); }
