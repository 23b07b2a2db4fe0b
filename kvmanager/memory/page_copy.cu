#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "kvmanager/base/status.h"
#include "kvmanager/memory/page_copy.h"

namespace kvmanager {
namespace {

constexpr uint32_t kPagesPerLaunch = 2000;
/// Of a launch: 0.9 ms over a link of 55 GB/s, so that other kernels of this device have their turn. A launch's first
/// and last pieces wait for the link's latency, some microseconds.
constexpr uint64_t kBytesPerLaunch = 48 << 20;

/// A launch's list, passed as the kernel's parameter: no buffer of it has to outlive the call.
struct CopyList {
  uint32_t pages;
  uint32_t page_bytes;
  struct Page {
    const uint8_t* from;
    uint8_t* to;
  } page[kPagesPerLaunch];
};
static_assert(sizeof(CopyList) <= 32764, "CUDA's limit on a kernel's parameters");

constexpr uint32_t kThreads = 32;  // one of them works
// 24 KiB of shared memory: a block finds room beside one of 200 KiB, and holds up nobody's.
constexpr uint32_t kStages = 12;
constexpr uint32_t kStageBytes = 2048;
/// Pieces being read; the other stages' pieces are being written.
constexpr uint32_t kReadsAhead = kStages / 2;

__device__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ void StartRead(uint8_t* stage, uint64_t* arrived, const uint8_t* from, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(arrived)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   SharedAddress(stage)),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(SharedAddress(arrived))
               : "memory");
}

__device__ void AwaitRead(uint64_t* arrived, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(SharedAddress(arrived)),
      "r"(parity)
      : "memory");
}

__device__ void StartWrite(uint8_t* to, const uint8_t* stage, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(to)),
               "r"(SharedAddress(stage)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__global__ void __launch_bounds__(kThreads) CopyPages(const __grid_constant__ CopyList list) {
  extern __shared__ __align__(128) uint8_t stages[];  // [kStages][kStageBytes]
  __shared__ uint64_t arrived[kStages];
  if (threadIdx.x != 0) return;
  for (uint32_t i = 0; i < kStages; ++i) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(&arrived[i])) : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");

  const uint32_t pieces = (list.page_bytes + kStageBytes - 1) / kStageBytes;  // of a page
  const uint32_t all = list.pages * pieces;
  // This block's n-th piece is number blockIdx.x + n * gridDim.x, and uses stage n % kStages.
  const uint32_t count = all <= blockIdx.x ? 0 : (all - blockIdx.x + gridDim.x - 1) / gridDim.x;
  const auto read = [&](uint32_t n) {
    const uint32_t work = blockIdx.x + n * gridDim.x, offset = work % pieces * kStageBytes;
    StartRead(stages + n % kStages * kStageBytes, &arrived[n % kStages], list.page[work / pieces].from + offset,
              min(kStageBytes, list.page_bytes - offset));
  };
  for (uint32_t n = 0; n < min(kReadsAhead, count); ++n) read(n);
  for (uint32_t n = 0; n < count; ++n) {
    AwaitRead(&arrived[n % kStages], n / kStages % 2);
    const uint32_t work = blockIdx.x + n * gridDim.x, offset = work % pieces * kStageBytes;
    StartWrite(list.page[work / pieces].to + offset, stages + n % kStages * kStageBytes,
               min(kStageBytes, list.page_bytes - offset));
    if (n + kReadsAhead < count) {
      // The stage to read into next was written from kStages - kReadsAhead pieces ago; later writes may go on.
      asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kStages - kReadsAhead) : "memory");
      read(n + kReadsAhead);
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

/// A launch takes as few multiprocessors as keep the link busy, since a kernel of another stream whose blocks need
/// their shared memory waits for them, and more writes to host memory in flight slow down everything on the device.
int Blocks(PageDirection direction, uint32_t page_bytes) {
  constexpr uint32_t kFetchBytesInFlight = 96 << 10, kDemoteBytesInFlight = 48 << 10, kBlocksMax = 32;
  constexpr uint32_t kSmallPageBytes = 8192;  // each begins at another place in memory
  const bool much = direction == PageDirection::kFetch || page_bytes < kSmallPageBytes;
  const uint32_t wanted = much ? kFetchBytesInFlight : kDemoteBytesInFlight;
  const uint32_t each = kReadsAhead * std::min(page_bytes, kStageBytes);
  return std::min((wanted + each - 1) / each, kBlocksMax);
}

absl::Status Launch(const CopyList& list, int blocks, cudaStream_t stream) {
  // Once per device and process would do; it costs less than knowing whether it was done.
  const void* const kernel = reinterpret_cast<const void*>(CopyPages);
  KV_RETURN_IF_ERROR(
      CudaStatus(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kStages * kStageBytes),
                 "cudaFuncSetAttribute"));
  void* arguments[] = {const_cast<CopyList*>(&list)};
  // Not <<<>>>, whose error cannot be told from one that an earlier call of somebody else left behind.
  return CudaStatus(cudaLaunchKernel(kernel, dim3(blocks), dim3(kThreads), arguments, kStages * kStageBytes, stream),
                    "cudaLaunchKernel of page copies");
}

absl::Status EnqueueBatch(PageDirection direction, absl::Span<const PageCopy> copies, cudaStream_t stream) {
  std::vector<const void*> from(copies.size());
  std::vector<void*> to(copies.size());
  std::vector<size_t> bytes(copies.size());
  for (size_t i = 0; i < copies.size(); ++i) {
    from[i] = direction == PageDirection::kFetch ? copies[i].host : copies[i].device;
    to[i] = direction == PageDirection::kFetch ? copies[i].device : copies[i].host;
    bytes[i] = copies[i].bytes;
  }
  cudaMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;
  size_t first = 0;
  return CudaStatus(
      cudaMemcpyBatchAsync(to.data(), from.data(), bytes.data(), copies.size(), &attributes, &first, 1, stream),
      "cudaMemcpyBatchAsync");
}

absl::Status EnqueueKernels(PageDirection direction, absl::Span<const PageCopy> copies, int blocks,
                            cudaStream_t stream) {
  static thread_local CopyList list;  // too large for a small stack; the launch copies it
  for (size_t i = 0; i < copies.size();) {
    list.page_bytes = copies[i].bytes;
    const uint64_t pages_max = std::clamp<uint64_t>(kBytesPerLaunch / list.page_bytes, 1, kPagesPerLaunch);
    for (list.pages = 0; i < copies.size() && list.pages < pages_max && copies[i].bytes == list.page_bytes; ++i) {
      CopyList::Page& page = list.page[list.pages++];
      page.from = direction == PageDirection::kFetch ? copies[i].host : copies[i].device;
      page.to = direction == PageDirection::kFetch ? copies[i].device : copies[i].host;
    }
    KV_RETURN_IF_ERROR(Launch(list, blocks > 0 ? blocks : Blocks(direction, list.page_bytes), stream));
  }
  return absl::OkStatus();
}

/// From this size on the copy engines are faster.
constexpr uint32_t kBatchBytesMin = 1 << 20;

}  // namespace

absl::Status EnqueuePageCopies(PageDirection direction, absl::Span<const PageCopy> copies, CUstream_st* stream,
                               PageCopyMethod method, int blocks) {
  if (copies.empty()) return absl::OkStatus();
  for (const PageCopy& copy : copies) {
    const uintptr_t bits =
        reinterpret_cast<uintptr_t>(copy.device) | reinterpret_cast<uintptr_t>(copy.host) | copy.bytes;
    if (copy.device == nullptr || copy.host == nullptr || copy.bytes == 0 || copy.bytes > kPageCopyBytesMax ||
        bits % 16 != 0) {
      return InvalidField("page copy",
                          absl::StrCat(copy.bytes, " bytes, device ", reinterpret_cast<uintptr_t>(copy.device),
                                       ", host ", reinterpret_cast<uintptr_t>(copy.host)),
                          absl::StrCat("16-byte aligned, 16..", kPageCopyBytesMax, " bytes"));
    }
  }
  if (method == PageCopyMethod::kBest) {
    for (size_t i = 0; i < copies.size();) {
      const bool batch = copies[i].bytes >= kBatchBytesMin;
      const size_t first = i;
      while (i < copies.size() && (copies[i].bytes >= kBatchBytesMin) == batch) ++i;
      KV_RETURN_IF_ERROR(EnqueuePageCopies(direction, copies.subspan(first, i - first), stream,
                                           batch ? PageCopyMethod::kBatch : PageCopyMethod::kKernel, blocks));
    }
    return absl::OkStatus();
  }
  if (method == PageCopyMethod::kBatch) return EnqueueBatch(direction, copies, stream);
  return EnqueueKernels(direction, copies, blocks, stream);
}

}  // namespace kvmanager
