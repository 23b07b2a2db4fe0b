#include <cuda_runtime.h>

#include <algorithm>

#include "attention/device_step_kernels.h"

namespace kvmanager::step {
namespace {

constexpr int kThreads = 256;

// ---- upload ----

// A thread per change, per word, per row, and per 16 bytes of a plan, one kind behind the other.
__global__ void __launch_bounds__(kThreads) UploadKernel(const __grid_constant__ Upload u) {
  uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  const auto at = [&](uint32_t count) {
    if (i < count) return true;
    i -= count;
    return false;
  };
  if (at(u.change_count)) {
    const uint2 change = __ldcv(reinterpret_cast<const uint2*>(u.changes) + i);
    u.tables[change.x] = change.y;
  } else if (at(u.reset_count)) {
    const uint32_t place = __ldcv(u.resets + i);
    u.first[place] = kAllFinite;
    if (u.non_finite != nullptr) u.non_finite[place] = 0;
  } else if (at(u.row_count)) {
    reinterpret_cast<uint4*>(u.rows_to)[i] = __ldcv(reinterpret_cast<const uint4*>(u.rows) + i);
  } else {
#pragma unroll
    for (const Upload::PlanPart& part : u.plan) {
      if (!at(part.count)) continue;
      const uint4 vector = __ldcv(static_cast<const uint4*>(part.from) + i);
      for (uint32_t l = 0; l < u.layer_count; ++l) {
        static_cast<uint4*>(part.to)[size_t{u.layers[l]} * part.of_layer + i] = vector;
      }
      break;
    }
  }
  // The last block says so to the host.
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence();
  if (atomicAdd(u.arrived, 1) + 1 < gridDim.x) return;
  *u.arrived = 0;
  __threadfence_system();
  *static_cast<volatile uint64_t*>(u.done) = u.number;
}

// ---- append ----

/// Index of the first of eight elements that is not finite, or 8.
__device__ __forceinline__ int FirstNonFinite(const uint4& eight, uint32_t exponent) {
  const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
  int first = 8;
#pragma unroll
  for (int w = 3; w >= 0; --w) {
    if ((words[w] >> 16 & exponent) == exponent) first = 2 * w + 1;
    if ((words[w] & exponent) == exponent) first = 2 * w;
  }
  return first;
}

/// The smallest code that any block found, in device memory, and from there to the host's word. Blocks may find at
/// once: each stores what is the smallest then, until nobody changed it meanwhile.
__device__ void Report(uint64_t* first, uint64_t* word, unsigned long long code) {
  auto* const smallest = reinterpret_cast<unsigned long long*>(first);
  unsigned long long now = atomicMin(smallest, code);
  if (now <= code) return;
  now = code;
  for (unsigned long long stored = 0; stored != now;) {
    *static_cast<volatile uint64_t*>(word) = now;
    __threadfence_system();
    stored = now;
    now = atomicMin(smallest, kAllFinite);
  }
}

// A block per token.
__global__ void __launch_bounds__(kThreads) AppendKernel(const __grid_constant__ Append a) {
  __shared__ uint32_t found;
  if (threadIdx.x == 0) found = UINT32_MAX;
  __syncthreads();
  const uint4 bits = reinterpret_cast<const uint4*>(a.rows)[blockIdx.x];
  const AppendRow row = {bits.x, bits.y, bits.z, bits.w};
  const PageLayout& layout = a.layout;
  uint8_t* const page = a.pool + a.slots[row.page] * device::kSlotUnitBytes;
  const uint32_t of_head = layout.head_dim / 8u;  // vectors of 16 bytes
  const uint32_t of_side = layout.kv_heads * of_head;
  const uint32_t exponent = layout.dtype == DType::kBFloat16 ? 0x7f80 : 0x7c00;
  for (uint32_t i = threadIdx.x; i < 2 * of_side; i += kThreads) {
    const uint32_t side = i >= of_side ? 1 : 0, in_side = i - side * of_side;
    const uint32_t head = in_side / of_head, chunk = in_side % of_head;
    const uint4* const from = static_cast<const uint4*>(side == 0 ? a.k : a.v) + size_t{blockIdx.x} * of_side;
    const uint4 eight = __ldg(from + in_side);
    const size_t run = size_t{side * layout.kv_heads + head} * layout.page_tokens + row.offset;
    reinterpret_cast<uint4*>(page)[run * of_head + chunk] = eight;
    const int bad = FirstNonFinite(eight, exponent);
    if (bad < 8) {
      atomicMin(&found, (side << kHeadBits | head) << kChannelBits | (chunk * 8 + bad));
    }
  }
  if (a.non_finite == nullptr) return;
  __syncthreads();
  if (threadIdx.x != 0 || found == UINT32_MAX) return;
  const unsigned long long place = static_cast<unsigned long long>(row.position) << kLayerBits | a.layer;
  Report(a.first + row.place, a.non_finite + row.place,
         kNonFinite | place << (kSideBits + kHeadBits + kChannelBits) | found);
}

// ---- copies ----

// Blocks: [copy][side, head].
__global__ void __launch_bounds__(kThreads) CopyKernel(const __grid_constant__ Copies c) {
  const Copies::Item item = c.items[blockIdx.x];
  const size_t run = size_t{blockIdx.y} * c.layout.page_tokens * c.layout.head_dim / 8;  // vectors of 16 bytes
  const uint32_t count = item.tokens * c.layout.head_dim / 8;
  const uint4* const from = reinterpret_cast<const uint4*>(c.pool + item.from * device::kSlotUnitBytes) + run;
  uint4* const to = reinterpret_cast<uint4*>(c.pool + item.to * device::kSlotUnitBytes) + run;
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) to[i] = from[i];
}

// Returns the launch's own error, not an older call's.
template <typename Params>
int Launch(void (*kernel)(Params), dim3 blocks, const Params& params, CUstream_st* stream) {
  void* arguments[] = {const_cast<Params*>(&params)};
  return cudaLaunchKernel(reinterpret_cast<const void*>(kernel), blocks, dim3(kThreads), arguments, 0, stream);
}

}  // namespace

int LaunchUpload(const Upload& upload, CUstream_st* stream) {
  uint32_t threads = upload.change_count + upload.reset_count + upload.row_count;
  for (const Upload::PlanPart& part : upload.plan) threads += part.count;
  return Launch(UploadKernel, dim3(std::max(1u, (threads + kThreads - 1) / kThreads)), upload, stream);
}

int LaunchAppend(const Append& append, CUstream_st* stream) {
  return Launch(AppendKernel, dim3(append.tokens), append, stream);
}

int LaunchCopies(const Copies& copies, CUstream_st* stream) {
  return Launch(CopyKernel, dim3(copies.count, 2 * copies.layout.kv_heads), copies, stream);
}

}  // namespace kvmanager::step
