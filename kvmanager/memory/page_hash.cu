#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/page_hash.h"
#include "kvmanager/memory/page_hash_device.h"
#include "kvmanager/memory/page_hash_secret.h"

namespace kvmanager {
namespace {

namespace hash = page_hash;

constexpr uint32_t kPagesPerLaunch = 1900;
/// Of a launch, or one page: 0.6 ms at 3.5 TB/s.
constexpr uint64_t kBytesPerLaunch = uint64_t{2} << 30;
constexpr uint32_t kThreads = 128;
constexpr uint32_t kSecretWords = hash::kSecretBytes / 8;
constexpr uint32_t kSumsMax = 256;  // of 1 KiB each, kept at once: 16 KiB of shared memory

/// A launch's list, passed as the kernel's parameter: no buffer of it has to outlive the call.
struct HashList {
  uint64_t secret[kSecretWords];
  uint64_t* out;
  PageBytes page[kPagesPerLaunch];
};
static_assert(sizeof(HashList) <= 32764, "CUDA's limit on a kernel's parameters");

/// One page for each block of threads. Four threads have a block of XXH3, each two of the accumulators of all its
/// stripes: what they read together is whole sectors, and nothing has to be added up across threads.
__global__ void __launch_bounds__(kThreads, 4) HashPages(const __grid_constant__ HashList list) {
  __shared__ uint64_t secret[kSecretWords];
  __shared__ ulonglong2 sums[kSumsMax][4];
  __shared__ uint64_t accumulators[8];
  const uint8_t* const data = list.page[blockIdx.x].data;
  const uint32_t bytes = list.page[blockIdx.x].bytes;
  if (threadIdx.x < kSecretWords) secret[threadIdx.x] = list.secret[threadIdx.x];
  __syncthreads();
  const uint32_t pair = threadIdx.x % 4, i = threadIdx.x % 8;
  uint64_t key[hash::kBlockStripes + 1];
#pragma unroll
  for (uint32_t stripe = 0; stripe <= hash::kBlockStripes; ++stripe) key[stripe] = secret[stripe + 2 * pair];
  const uint32_t blocks = (bytes - 1) / hash::kBlockBytes;
  uint64_t accumulator = hash::Initial(i);  // of the first eight threads
  for (uint32_t first = 0; first < blocks; first += kSumsMax) {
    const uint32_t count = min(kSumsMax, blocks - first);
    for (uint32_t block = threadIdx.x / 4; block < count; block += kThreads / 4) {
      const auto* at = reinterpret_cast<const ulonglong2*>(data + size_t{first + block} * hash::kBlockBytes) + pair;
      ulonglong2 sum = {0, 0};
#pragma unroll
      for (uint32_t stripe = 0; stripe < hash::kBlockStripes; ++stripe) {
        const ulonglong2 word = at[stripe * (hash::kStripeBytes / sizeof(ulonglong2))];
        sum.x += hash::Added(word.x, word.y, key[stripe]);
        sum.y += hash::Added(word.y, word.x, key[stripe + 1]);
      }
      sums[block][pair] = sum;
    }
    __syncthreads();
    if (threadIdx.x < 8) {
      const uint64_t* own = reinterpret_cast<const uint64_t*>(sums) + i;
      const uint64_t scramble = secret[hash::kScrambleAt / 8 + i];
      for (uint32_t block = 0; block < count; ++block) {
        accumulator = hash::Scrambled(accumulator + own[8 * block], scramble);
      }
    }
    __syncthreads();
  }
  if (threadIdx.x >= 8) return;
  const uint8_t* const rest = data + size_t{blocks} * hash::kBlockBytes;
  const uint32_t stripes = (bytes - 1 - blocks * hash::kBlockBytes) / hash::kStripeBytes;
  for (uint32_t stripe = 0; stripe < stripes; ++stripe) {
    const auto* at = reinterpret_cast<const uint64_t*>(rest + stripe * hash::kStripeBytes);
    accumulator += hash::Added(at[i], at[i ^ 1], secret[stripe + i]);
  }
  const auto* const secret_bytes = reinterpret_cast<const uint8_t*>(secret);
  const uint8_t* const last = data + bytes - hash::kStripeBytes;
  accumulator += hash::Added(hash::Load(last + 8 * i), hash::Load(last + 8 * (i ^ 1)),
                             hash::Load(secret_bytes + hash::kLastStripeAt + 8 * i));
  accumulators[i] = accumulator;
  __syncwarp(0xff);
  if (i == 0) list.out[blockIdx.x] = hash::Merged(accumulators, secret_bytes, bytes);
}

}  // namespace

absl::Status EnqueuePageHashes(absl::Span<const PageBytes> pages, uint64_t* out, CUstream_st* stream) {
  for (const PageBytes& page : pages) {
    if (page.bytes < kPageHashBytesMin || reinterpret_cast<uintptr_t>(page.data) % 16 != 0 || page.data == nullptr) {
      return InvalidField("page to hash",
                          absl::StrCat(page.bytes, " bytes at ", reinterpret_cast<uintptr_t>(page.data)),
                          absl::StrCat("16-byte aligned, at least ", kPageHashBytesMin, " bytes"));
    }
  }
  // Too large for a small stack, and for every thread's static memory; the launch copies it.
  const auto list = std::make_unique<HashList>();
  std::memcpy(list->secret, hash::DefaultSecret(), hash::kSecretBytes);
  for (size_t at = 0, count = 0; at < pages.size(); at += count) {
    uint64_t bytes = pages[at].bytes;
    for (count = 1; count < std::min<size_t>(kPagesPerLaunch, pages.size() - at); ++count) {
      bytes += pages[at + count].bytes;
      if (bytes > kBytesPerLaunch) break;
    }
    const auto some = pages.subspan(at, count);
    std::copy(some.begin(), some.end(), list->page);
    list->out = out + at;
    void* arguments[] = {list.get()};
    KV_RETURN_IF_ERROR(
        CudaStatus(cudaLaunchKernel(reinterpret_cast<const void*>(HashPages), dim3(static_cast<unsigned>(some.size())),
                                    dim3(kThreads), arguments, 0, stream),
                   "cudaLaunchKernel of page hashes"));
  }
  return absl::OkStatus();
}

}  // namespace kvmanager
