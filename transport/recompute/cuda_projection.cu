#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <memory>

#include "kvmanager/base/status.h"
#include "kvmanager/memory/device.h"
#include "transport/recompute/cuda_projection.h"

namespace kvmanager::recompute {
namespace {

constexpr int kThreads = 256;
constexpr int kFewPages = 64, kManyPages = 1024;  // of one launch
constexpr int kItemsInFlight = 4;                 // loads of a thread before its first store
constexpr int kVector = 4;                        // floats of one load

/// A launch's pages, passed as the kernel's parameter: no buffer of it has to outlive the call, and no copy of it waits
/// behind those that fill the link.
template <int kPages>
struct PageList {
  int pages = 0;
  int first_row = 0;  // of the launch
  struct Page {
    uint8_t* page;
    int64_t position;
    int row_begin;
    int tokens;
  } page[kPages];
};
static_assert(sizeof(PageList<kManyPages>) <= 32764 - 256, "CUDA's limit on a kernel's parameters");

struct Arguments {
  const double* frequencies;
  float2* angles;
  const float* products;
  const float* bias;
  int64_t* not_finite;
  int heads, head_dim, page_tokens;
  int pairs;  // that are rotated, of a head
  bool interleaved, rounded_angles, bfloat;
};

template <int kPages>
__device__ const typename PageList<kPages>::Page& PageOf(const PageList<kPages>& list, int row) {
  int low = 0, high = list.pages;  // the last page that begins at or before `row` is in [low, high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (list.page[middle].row_begin <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return list.page[low];
}

template <int kPages>
__global__ void FillAngles(const __grid_constant__ PageList<kPages> list, const Arguments a) {
  const int row = list.first_row + blockIdx.x;
  const auto& page = PageOf(list, row);
  const int64_t position = page.position + (row - page.row_begin);
  for (int i = threadIdx.x; i < a.pairs; i += blockDim.x) {
    const double angle = a.rounded_angles ? double(__fmul_rn(float(position), float(a.frequencies[i])))
                                          : double(position) * a.frequencies[i];
    double sin, cos;
    sincos(angle, &sin, &cos);
    a.angles[size_t(row) * a.pairs + i] = make_float2(float(cos), float(sin));
  }
}

template <int kWidth>
__device__ void Load(const float* from, float* to) {
  if constexpr (kWidth == kVector) {
    const float4 x = __ldcs(reinterpret_cast<const float4*>(from));
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  } else {
    to[0] = *from;
  }
}

__device__ uint16_t Rounded(float x, bool bfloat) {
  return bfloat ? __bfloat16_as_ushort(__float2bfloat16_rn(x)) : __half_as_ushort(__float2half_rn(x));
}

/// Rounds and stores; whether all is finite.
template <int kWidth>
__device__ bool Store(const float* from, bool bfloat, uint8_t* to) {
  const uint16_t exponent = bfloat ? 0x7f80 : 0x7c00;
  uint16_t bits[kWidth];
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) {
    bits[i] = Rounded(from[i], bfloat);
    finite &= (bits[i] & exponent) != exponent;
  }
  if constexpr (kWidth == kVector) {
    const uint2 both = make_uint2(bits[0] | uint32_t(bits[1]) << 16, bits[2] | uint32_t(bits[3]) << 16);
    __stcs(reinterpret_cast<uint2*>(to), both);
  } else {
    *reinterpret_cast<uint16_t*>(to) = bits[0];
  }
  return finite;
}

__device__ void Rotate(float2 angle, float* low, float* high) {
  const float p = *low, q = *high;
  *low = p * angle.x - q * angle.y;
  *high = q * angle.x + p * angle.y;
}

/// A block takes a row; a thread takes the same 2 * kWidth channels of every so many heads, of K and then of V: kWidth
/// pairs of channels, or as many channels that are not rotated.
template <int kWidth, int kPages>
__global__ void __launch_bounds__(kThreads)
    StoreRows(const __grid_constant__ PageList<kPages> list, const Arguments a) {
  const int row = list.first_row + blockIdx.x;
  const auto& page = PageOf(list, row);
  const int token = row - page.row_begin;
  const int units = a.head_dim / 2 / kWidth, at_once = kThreads / units;
  const int unit = threadIdx.x % units, lane = threadIdx.x / units;
  if (lane >= at_once) return;
  const bool rotated = unit * kWidth < a.pairs;
  float2 angles[kWidth] = {};
  if (rotated) {
#pragma unroll
    for (int v = 0; v < kWidth; ++v) angles[v] = a.angles[size_t(row) * a.pairs + unit * kWidth + v];
  }
  const int width = a.heads * a.head_dim;
  const float* const products = a.products + size_t(row) * 2 * width;
  for (int base = lane; base < 2 * a.heads; base += at_once * kItemsInFlight) {
    float x[kItemsInFlight][2 * kWidth];
#pragma unroll
    for (int k = 0; k < kItemsInFlight; ++k) {
      const int item = base + k * at_once;  // side * heads + head
      if (item >= 2 * a.heads) continue;
      const bool apart = rotated && !a.interleaved && item < a.heads;
      const int first = apart ? unit * kWidth : 2 * unit * kWidth, second = first + (apart ? a.pairs : kWidth);
      Load<kWidth>(products + item * a.head_dim + first, x[k]);
      Load<kWidth>(products + item * a.head_dim + second, x[k] + kWidth);
    }
#pragma unroll
    for (int k = 0; k < kItemsInFlight; ++k) {
      const int item = base + k * at_once;
      if (item >= 2 * a.heads) continue;
      const bool rotate = rotated && item < a.heads, apart = rotate && !a.interleaved;
      const int first = apart ? unit * kWidth : 2 * unit * kWidth, second = first + (apart ? a.pairs : kWidth);
      if (a.bias != nullptr) {
#pragma unroll
        for (int v = 0; v < kWidth; ++v) {
          x[k][v] += a.bias[item * a.head_dim + first + v];
          x[k][kWidth + v] += a.bias[item * a.head_dim + second + v];
        }
      }
      if (rotate && a.interleaved) {
#pragma unroll
        for (int v = 0; v < kWidth; ++v) Rotate(angles[v], &x[k][2 * v], &x[k][2 * v + 1]);
      } else if (rotate) {
#pragma unroll
        for (int v = 0; v < kWidth; ++v) Rotate(angles[v], &x[k][v], &x[k][kWidth + v]);
      }
      // PageLayout::raw_offset, with item = side * heads + head.
      uint8_t* const to = page.page + (size_t(item) * a.page_tokens + token) * a.head_dim * 2;
      const bool finite = Store<kWidth>(x[k], a.bfloat, to + 2 * first);
      if (!(Store<kWidth>(x[k] + kWidth, a.bfloat, to + 2 * second) && finite)) {
        *a.not_finite = row * NotFiniteCode::kRow + item / a.heads * PageLayout::kKvHeadsMax + item % a.heads;
      }
    }
  }
}

Arguments ArgumentsOf(const ProjectionModel& model, const StoreBuffers& buffers, int64_t* not_finite) {
  return {.frequencies = buffers.frequencies,
          .angles = reinterpret_cast<float2*>(buffers.angles),
          .products = buffers.products,
          .bias = buffers.bias,
          .not_finite = not_finite,
          .heads = model.layout.kv_heads,
          .head_dim = model.layout.head_dim,
          .page_tokens = model.layout.page_tokens,
          .pairs = model.rope.rotary_dims / 2,
          .interleaved = model.rope.pairs == RopeFacts::Pairs::kInterleaved,
          .rounded_angles = model.rope.angles == RopeFacts::Angles::kFloat32,
          .bfloat = model.layout.dtype == DType::kBFloat16};
}

absl::Status Launch(const void* kernel, int rows, int threads, void* list, const Arguments& arguments,
                    cudaStream_t stream) {
  void* all[] = {list, const_cast<Arguments*>(&arguments)};
  // Not <<<>>>, whose error cannot be told from one that an earlier call of somebody else left behind.
  return CudaStatus(cudaLaunchKernel(kernel, dim3(rows), dim3(threads), all, 0, stream),
                    "cudaLaunchKernel of recomputed rows");
}

/// launch(list, rows) for every kPages of `pages`.
template <int kPages, typename Call>
absl::Status ForLists(absl::Span<const PageRows> pages, Call launch) {
  // Too large for a small stack, and for every thread to have room for it. The launch copies it.
  static thread_local std::unique_ptr<PageList<kPages>> kept;
  if (kept == nullptr) kept = std::make_unique<PageList<kPages>>();
  PageList<kPages>& list = *kept;
  int row = 0;
  for (size_t begin = 0; begin < pages.size(); begin += kPages) {
    list.pages = int(std::min<size_t>(kPages, pages.size() - begin));
    list.first_row = row;
    for (int p = 0; p < list.pages; ++p) {
      const PageRows& page = pages[begin + p];
      list.page[p] = {page.page, page.position, row, page.tokens};
      row += page.tokens;
    }
    KV_RETURN_IF_ERROR(launch(&list, row - list.first_row));
  }
  return absl::OkStatus();
}

constexpr int kAngleThreads = 64;

const void* AnglesKernel(bool many) {
  return many ? reinterpret_cast<const void*>(FillAngles<kManyPages>)
              : reinterpret_cast<const void*>(FillAngles<kFewPages>);
}
const void* StoreKernel(bool many, bool vectors) {
  if (vectors) {
    return many ? reinterpret_cast<const void*>(StoreRows<kVector, kManyPages>)
                : reinterpret_cast<const void*>(StoreRows<kVector, kFewPages>);
  }
  return many ? reinterpret_cast<const void*>(StoreRows<1, kManyPages>)
              : reinterpret_cast<const void*>(StoreRows<1, kFewPages>);
}

template <typename Call>
absl::Status ForAnyLists(absl::Span<const PageRows> pages, Call launch) {
  return pages.size() > kFewPages ? ForLists<kManyPages>(pages, launch) : ForLists<kFewPages>(pages, launch);
}

}  // namespace

absl::Status LoadStoreKernels() {
  for (const bool many : {false, true}) {
    for (const void* const kernel : {AnglesKernel(many), StoreKernel(many, false), StoreKernel(many, true)}) {
      cudaFuncAttributes attributes;
      KV_RETURN_IF_ERROR(CudaStatus(cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes"));
    }
  }
  return absl::OkStatus();
}

absl::Status EnqueueAngles(const ProjectionModel& model, absl::Span<const PageRows> pages, const StoreBuffers& buffers,
                           CUstream_st* stream) {
  if (model.rope.rotary_dims == 0) return absl::OkStatus();
  const Arguments arguments = ArgumentsOf(model, buffers, nullptr);
  return ForAnyLists(pages, [&](void* list, int rows) {
    return Launch(AnglesKernel(pages.size() > kFewPages), rows, kAngleThreads, list, arguments, stream);
  });
}

absl::Status EnqueueStore(const ProjectionModel& model, absl::Span<const PageRows> pages, const StoreBuffers& buffers,
                          int64_t* not_finite, CUstream_st* stream) {
  const Arguments arguments = ArgumentsOf(model, buffers, not_finite);
  uintptr_t bits = 0;
  for (const PageRows& page : pages) bits |= reinterpret_cast<uintptr_t>(page.page);
  const bool vectors = arguments.pairs % kVector == 0 && bits % (2 * kVector) == 0;
  return ForAnyLists(pages, [&](void* list, int rows) {
    return Launch(StoreKernel(pages.size() > kFewPages, vectors), rows, kThreads, list, arguments, stream);
  });
}

}  // namespace kvmanager::recompute
