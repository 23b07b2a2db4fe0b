// How fast scattered pages move between device slots and pinned host slots, beside one large pinned copy of the same
// run.
//
//   page_copy_bench [--small-pages] [--all]
//
// --small-pages: host memory without huge pages. --all: every page size and number of blocks, else the encoded pages of
// 8 KV heads and the method in use. Prints medians of kRuns, and what making and zeroing slabs costs.
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
  int blocks;
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
    case PageCopyMethod::kLoadStore:
      return "load/store";
    case PageCopyMethod::kBulk:
      return "bulk";
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
  KV_ASSIGN_OR_RETURN(setup.host, PagePool::Create(host));
  std::mt19937_64 random(1);
  const absl::Span<uint8_t> memory = setup.host->SlabData(0);
  for (size_t i = 0; i < memory.size(); i += sizeof(uint64_t)) {
    const uint64_t word = random();
    std::memcpy(memory.data() + i, &word, sizeof(word));
  }
  HostPinner::Calls calls;
  calls.pin = [device](uint8_t* data, size_t bytes) { return device->PinHost(data, bytes); };
  calls.unpin = [device](uint8_t* data) { device->UnpinHost(data); };
  double start = Seconds();
  setup.pinner = std::make_unique<HostPinner>(std::vector<absl::Span<uint8_t>>{memory}, calls);
  setup.pinner->Wait();
  KV_RETURN_IF_ERROR(setup.pinner->status());
  std::printf("host memory: huge pages %s; pinned at %.2f s per GiB\n", setup.host->huge_page_state().c_str(),
              (Seconds() - start) / (static_cast<double>(kSlabBytes) / (uint64_t{1} << 30)));
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

absl::Status Run(bool huge_pages, bool all) {
  std::printf("%s\n", DeviceSummary().c_str());
  KV_ASSIGN_OR_RETURN(Setup setup, Prepare(huge_pages));
  CUstream_st* const stream = setup.device->encode_stream();
  std::vector<uint32_t> sizes = {37376, 45568};
  std::vector<Variant> variants = {{PageCopyMethod::kBest, 0}};
  if (all) {
    sizes = {4096, 8192, 16384, 37376, 45568, 65536};
    for (const int blocks : {4, 8, 16, 32, 64, 128}) variants.push_back({PageCopyMethod::kLoadStore, blocks});
    for (const int blocks : {4, 8, 16, 32, 64, 128}) variants.push_back({PageCopyMethod::kBulk, blocks});
  }
  variants.push_back({PageCopyMethod::kBatch, 0});
  std::printf("%-7s %10s %-22s %6s %8s %8s %16s\n", "", "page bytes", "method", "blocks", "GB/s", "of large",
              "host us per page");
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
    std::printf("%-7s %10llu %-22s %6s %8.1f %8.3f\n", name, static_cast<unsigned long long>(kMovedBytes),
                "one large copy", "", large, 1.0);
    for (const uint32_t page_bytes : sizes) {
      std::vector<PageId> host_ids, device_ids;
      KV_ASSIGN_OR_RETURN(const std::vector<PageCopy> copies, Scatter(&setup, page_bytes, &host_ids, &device_ids));
      for (const Variant& variant : variants) {
        double host_seconds = 0;
        KV_ASSIGN_OR_RETURN(const double ms, MedianMilliseconds(stream, [&] {
                              const double start = Seconds();
                              const absl::Status status =
                                  EnqueuePageCopies(direction, copies, stream, variant.method, variant.blocks);
                              host_seconds = Seconds() - start;
                              return status;
                            }));
        const double rate = static_cast<double>(copies.size()) * page_bytes / ms / 1e6;
        std::printf("%-7s %10u %-22s %6d %8.1f %8.3f %16.3f\n", name, page_bytes, Name(variant.method), variant.blocks,
                    rate, rate / large, 1e6 * host_seconds / copies.size());
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
