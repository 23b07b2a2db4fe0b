// How fast scattered pages move between device slots and pinned host slots, beside one large pinned copy of the same
// run.
//
//   page_copy_bench [--small-pages] [--all]
//
// --small-pages: host memory without huge pages. --all: every page size and number of blocks, else the encoded pages of
// 8 KV heads and the method in use. Prints medians of kRuns, what the copies cost a kernel that reads device memory on
// the attention stream at the same time, and what making and zeroing slabs costs.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "kvmanager/base/status.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/device_pool.h"
#include "kvmanager/memory/device_region.h"
#include "kvmanager/memory/host_pinner.h"
#include "kvmanager/memory/page_copy.h"
#include "kvmanager/memory/page_copy_neighbour.h"
#include "kvmanager/memory/page_pool.h"

namespace kvmanager {
namespace {

constexpr uint64_t kSlabBytes = uint64_t{512} << 20;
constexpr uint64_t kMovedBytes = uint64_t{256} << 20;
constexpr int kRuns = 11;

double Seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

struct Setup {
  std::unique_ptr<Device> device;
  std::unique_ptr<PagePool> host;
  std::unique_ptr<HostPinner> pinner;  // before `host` goes
  std::unique_ptr<DevicePool> pool;
};

struct Variant {
  PageCopyMethod method;
  int blocks = 0;
  int streams = 1;  // 1..kStreamsMax: the list is cut into as many parts
};
constexpr int kStreamsMax = 3;

/// Copies on several streams at once, which begin behind the encode stream's work and end before what comes next there.
struct Streams {
  absl::Status Create() {
    for (int i = 0; i < kStreamsMax; ++i) {
      KV_RETURN_IF_ERROR(CudaStatus(cudaStreamCreateWithFlags(&stream[i], cudaStreamNonBlocking), "cudaStreamCreate"));
      KV_RETURN_IF_ERROR(CudaStatus(cudaEventCreateWithFlags(&done[i], cudaEventDisableTiming), "cudaEventCreate"));
    }
    return CudaStatus(cudaEventCreateWithFlags(&begun, cudaEventDisableTiming), "cudaEventCreate");
  }
  absl::Status Enqueue(PageDirection direction, absl::Span<const PageCopy> copies, const Variant& variant,
                       CUstream_st* behind) const {
    if (variant.streams == 1) {
      return EnqueuePageCopies(direction, copies, behind, variant.method, variant.blocks);
    }
    KV_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(begun, behind), "cudaEventRecord"));
    const size_t part = (copies.size() + variant.streams - 1) / variant.streams;
    for (int i = 0; i < variant.streams; ++i) {
      KV_RETURN_IF_ERROR(CudaStatus(cudaStreamWaitEvent(stream[i], begun, 0), "cudaStreamWaitEvent"));
      KV_RETURN_IF_ERROR(EnqueuePageCopies(direction, copies.subspan(std::min(copies.size(), i * part), part),
                                           stream[i], variant.method, variant.blocks));
      KV_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(done[i], stream[i]), "cudaEventRecord"));
      KV_RETURN_IF_ERROR(CudaStatus(cudaStreamWaitEvent(behind, done[i], 0), "cudaStreamWaitEvent"));
    }
    return absl::OkStatus();
  }

  CUstream_st* stream[kStreamsMax] = {};
  cudaEvent_t begun = nullptr, done[kStreamsMax] = {};
};

/// Of kRuns calls of `enqueue`, after one that is not counted, timed by the device.
template <typename F>
absl::StatusOr<double> MedianMilliseconds(CUstream_st* stream, F enqueue) {
  cudaEvent_t begin, end;
  KV_RETURN_IF_ERROR(CudaStatus(cudaEventCreate(&begin), "cudaEventCreate"));
  KV_RETURN_IF_ERROR(CudaStatus(cudaEventCreate(&end), "cudaEventCreate"));
  std::vector<float> times;
  for (int i = 0; i <= kRuns; ++i) {
    KV_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(begin, stream), "cudaEventRecord"));
    KV_RETURN_IF_ERROR(enqueue());
    KV_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(end, stream), "cudaEventRecord"));
    KV_RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(end), "cudaEventSynchronize"));
    float milliseconds = 0;
    KV_RETURN_IF_ERROR(CudaStatus(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime"));
    if (i > 0) times.push_back(milliseconds);
  }
  cudaEventDestroy(begin);
  cudaEventDestroy(end);
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return times[kRuns / 2];
}

const char* Name(PageCopyMethod method) {
  switch (method) {
    case PageCopyMethod::kBest:
      return "in use";
    case PageCopyMethod::kKernel:
      return "kernel";
    case PageCopyMethod::kBatch:
      return "cudaMemcpyBatchAsync";
  }
  return "";
}

absl::StatusOr<Setup> Prepare(bool huge_pages) {
  Setup setup;
  KV_ASSIGN_OR_RETURN(setup.device, Device::Open(0));
  const Device* const device = setup.device.get();
  PagePool::Options host;
  host.pool_bytes = host.slab_bytes = kSlabBytes;
  host.huge_pages = huge_pages;
  double start = Seconds();
  KV_ASSIGN_OR_RETURN(setup.host, PagePool::Create(host));
  const double created = Seconds() - start;
  std::mt19937_64 random(1);
  const absl::Span<uint8_t> memory = setup.host->SlabData(0);
  for (size_t i = 0; i < memory.size(); i += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(memory.data() + i, &word, sizeof(word));
  }
  HostPinner::Calls calls;
  calls.pin = [device](uint8_t* data, size_t bytes) { return device->PinHost(data, bytes); };
  calls.unpin = [device](uint8_t* data) { device->UnpinHost(data); };
  start = Seconds();
  setup.pinner = std::make_unique<HostPinner>(std::vector<absl::Span<uint8_t>>{memory}, calls);
  setup.pinner->Wait();
  KV_RETURN_IF_ERROR(setup.pinner->status());
  const double gib = static_cast<double>(kSlabBytes) / (uint64_t{1} << 30);
  std::printf("host memory: huge pages %s; made at %.2f and pinned at %.2f s per GiB\n",
              setup.host->huge_page_state().c_str(), created / gib, (Seconds() - start) / gib);
  KV_ASSIGN_OR_RETURN(std::unique_ptr<DeviceRegion> region, DeviceRegion::Reserve(device, kSlabBytes, 2));
  for (const char* when : {"made and zeroed", "made again"}) {
    start = Seconds();
    KV_RETURN_IF_ERROR(region->Make(0));
    const double made = Seconds();
    KV_RETURN_IF_ERROR(region->Zero(0));
    const double zeroed = Seconds();
    region->Unmake(0);
    std::printf("device slab of %llu MiB: %s in %.2f ms, zeroed once more in %.2f ms, unmade in %.2f ms\n",
                static_cast<unsigned long long>(kSlabBytes >> 20), when, 1e3 * (made - start), 1e3 * (zeroed - made),
                1e3 * (Seconds() - zeroed));
  }
  KV_ASSIGN_OR_RETURN(setup.pool, DevicePool::Create(std::move(region)));
  return setup;
}

struct Neighbour {
  double median_ms = 0;
  double worst_ms = 0;
};

/// Of kNeighbourRuns runs of the neighbour on the attention stream, beside copies that are kept queued.
template <typename F>
absl::StatusOr<Neighbour> TimeNeighbour(const Setup& setup, uint32_t* sums, F enqueue_copies) {
  constexpr int kNeighbourRuns = 40, kBatchesAhead = 2;
  CUstream_st* const stream = setup.device->attention_stream();
  const uint8_t* const data = setup.pool->data() + kSlabBytes;  // the second slab: no page lies there
  cudaEvent_t begin, end, batch[kBatchesAhead];
  KV_RETURN_IF_ERROR(CudaStatus(cudaEventCreate(&begin), "cudaEventCreate"));
  KV_RETURN_IF_ERROR(CudaStatus(cudaEventCreate(&end), "cudaEventCreate"));
  for (cudaEvent_t& event : batch) {
    KV_RETURN_IF_ERROR(CudaStatus(cudaEventCreate(&event), "cudaEventCreate"));
    KV_RETURN_IF_ERROR(enqueue_copies());
    KV_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(event, setup.device->encode_stream()), "cudaEventRecord"));
  }
  std::vector<float> times;
  for (int run = 0, next = 0; run < kNeighbourRuns; ++run) {
    if (cudaEventQuery(batch[next]) == cudaSuccess) {
      KV_RETURN_IF_ERROR(enqueue_copies());
      KV_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(batch[next], setup.device->encode_stream()), "cudaEventRecord"));
      next = (next + 1) % kBatchesAhead;
    }
    KV_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(begin, stream), "cudaEventRecord"));
    KV_RETURN_IF_ERROR(EnqueueNeighbour(data, kSlabBytes, setup.device->info().multiprocessors, sums, stream));
    KV_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(end, stream), "cudaEventRecord"));
    KV_RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(end), "cudaEventSynchronize"));
    float milliseconds = 0;
    KV_RETURN_IF_ERROR(CudaStatus(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime"));
    times.push_back(milliseconds);
  }
  KV_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(setup.device->encode_stream()), "cudaStreamSynchronize"));
  for (cudaEvent_t event : {begin, end, batch[0], batch[1]}) cudaEventDestroy(event);
  std::sort(times.begin(), times.end());
  return Neighbour{times[times.size() / 2], times.back()};
}

/// Pages of `page_bytes` in shuffled slots on both sides; allocated in `ids`, which the caller frees.
absl::StatusOr<std::vector<PageCopy>> Scatter(Setup* setup, uint32_t page_bytes, std::vector<PageId>* host_ids,
                                              std::vector<PageId>* device_ids) {
  const size_t count = kMovedBytes / page_bytes;
  for (size_t i = 0; i < count; ++i) {
    KV_ASSIGN_OR_RETURN(host_ids->emplace_back(), setup->host->Allocate(1, page_bytes));
    KV_ASSIGN_OR_RETURN(device_ids->emplace_back(), setup->pool->Allocate(1, page_bytes));
  }
  std::mt19937_64 random(page_bytes);
  std::shuffle(host_ids->begin(), host_ids->end(), random);
  std::shuffle(device_ids->begin(), device_ids->end(), random);
  std::vector<PageCopy> copies;
  for (size_t i = 0; i < count; ++i) {
    copies.push_back(PageCopy{setup->pool->Data((*device_ids)[i]), setup->host->Data((*host_ids)[i]), page_bytes});
  }
  return copies;
}

/// What it costs the host to have a plan released in stream order.
absl::Status PrintReleaseCost(const Setup& setup) {
  constexpr int kReleases = 1000;
  uint8_t* const counter = setup.host->SlabData(0).data();
  KV_RETURN_IF_ERROR(setup.device->EnqueueRelease(setup.device->attention_stream(), counter, 1));
  std::vector<double> times;
  for (int i = 0; i < kReleases; ++i) {
    const double start = Seconds();
    KV_RETURN_IF_ERROR(setup.device->EnqueueRelease(setup.device->attention_stream(), counter, i));
    times.push_back(Seconds() - start);
    KV_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(setup.device->attention_stream()), "cudaStreamSynchronize"));
  }
  std::sort(times.begin(), times.end());
  std::printf("a release enqueued in %.2f us of the host's time\n", 1e6 * times[kReleases / 2]);
  return absl::OkStatus();
}

absl::Status Run(bool huge_pages, bool all) {
  std::printf("%s\n", DeviceSummary().c_str());
  KV_ASSIGN_OR_RETURN(Setup setup, Prepare(huge_pages));
  CUstream_st* const stream = setup.device->encode_stream();
  std::vector<uint32_t> sizes = {37376, 45568};
  std::vector<Variant> variants = {{PageCopyMethod::kBest, 0}};
  if (all) {
    sizes = {4096, 16384, 37376, 45568, 65536, 262144, 1048576};
    for (const int blocks : {1, 2, 4, 8, 16, 32}) variants.push_back({PageCopyMethod::kKernel, blocks});
  }
  for (int count = 1; count <= (all ? kStreamsMax : 1); ++count) {
    variants.push_back({PageCopyMethod::kBatch, /*blocks=*/0, count});
  }
  Streams streams;
  KV_RETURN_IF_ERROR(streams.Create());
  uint32_t* sums = nullptr;
  KV_RETURN_IF_ERROR(
      CudaStatus(cudaMalloc(reinterpret_cast<void**>(&sums), 4096 * 256 * sizeof(uint32_t)), "cudaMalloc"));
  KV_ASSIGN_OR_RETURN(const Neighbour alone, TimeNeighbour(setup, sums, [] { return absl::OkStatus(); }));
  std::printf("neighbour alone: median %.3f ms (%.0f GB/s), worst %.3f ms\n", alone.median_ms,
              kSlabBytes / alone.median_ms / 1e6, alone.worst_ms);
  KV_RETURN_IF_ERROR(PrintReleaseCost(setup));
  std::printf("\"beside\": the neighbour meanwhile, median and worst\n");
  std::printf("%-7s %9s %-20s %6s %7s %6s %8s %12s %9s %9s\n", "", "bytes", "method", "blocks", "streams", "GB/s",
              "of large", "host us/page", "beside ms", "worst ms");
  for (const PageDirection direction : {PageDirection::kFetch, PageDirection::kDemote}) {
    const char* const name = direction == PageDirection::kFetch ? "fetch" : "demote";
    KV_ASSIGN_OR_RETURN(const double large_ms, MedianMilliseconds(stream, [&] {
                          uint8_t *on_device = setup.pool->data(), *on_host = setup.host->SlabData(0).data();
                          const bool fetch = direction == PageDirection::kFetch;
                          return CudaStatus(cudaMemcpyAsync(fetch ? on_device : on_host, fetch ? on_host : on_device,
                                                            kMovedBytes, cudaMemcpyDefault, stream),
                                            "cudaMemcpyAsync");
                        }));
    const double large = kMovedBytes / large_ms / 1e6;
    std::printf("%-7s %9llu %-20s %6s %7s %6.1f %8.3f\n", name, static_cast<unsigned long long>(kMovedBytes),
                "one large copy", "", "", large, 1.0);
    for (const uint32_t page_bytes : sizes) {
      std::vector<PageId> host_ids, device_ids;
      KV_ASSIGN_OR_RETURN(const std::vector<PageCopy> copies, Scatter(&setup, page_bytes, &host_ids, &device_ids));
      for (const Variant& variant : variants) {
        double host_seconds = 0;
        KV_ASSIGN_OR_RETURN(const double ms, MedianMilliseconds(stream, [&] {
                              const double start = Seconds();
                              const absl::Status status = streams.Enqueue(direction, copies, variant, stream);
                              host_seconds = Seconds() - start;
                              return status;
                            }));
        KV_ASSIGN_OR_RETURN(const Neighbour beside, TimeNeighbour(setup, sums, [&] {
                              return streams.Enqueue(direction, copies, variant, stream);
                            }));
        const double rate = static_cast<double>(copies.size()) * page_bytes / ms / 1e6;
        std::printf("%-7s %9u %-20s %6d %7d %6.1f %8.3f %12.3f %9.3f %9.3f\n", name, page_bytes, Name(variant.method),
                    variant.blocks, variant.streams, rate, rate / large, 1e6 * host_seconds / copies.size(),
                    beside.median_ms, beside.worst_ms);
      }
      for (const PageId id : host_ids) setup.host->Free(id);
      for (const PageId id : device_ids) setup.pool->Free(id);
    }
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace kvmanager

int main(int argc, char** argv) {
  bool huge_pages = true, all = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--small-pages") {
      huge_pages = false;
    } else if (argument == "--all") {
      all = true;
    } else {
      std::fprintf(stderr, "usage: page_copy_bench [--small-pages] [--all]\n");
      return 2;
    }
  }
  const absl::Status status = kvmanager::Run(huge_pages, all);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
