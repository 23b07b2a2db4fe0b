#include "codecs/pq/pq_device.h"
#include "codecs/pq/pq_rows_cuda.h"
#include "codecs/raw/raw_attention_device.cuh"
#include "codecs/raw/raw_attention_launch.cuh"

namespace kvmanager::pq {
namespace {

using device::AttendItem;
using device::AttendKernels;
using device::AttendParams;

static_assert(kRowUnitBytes == device::kSlotUnitBytes);

/// A lane reads its row's place ahead, and gives it to those that copy the row.
template <int kHeadDim, int kRows>
struct SelectedRows : device::RawPages<kHeadDim, kRows> {
  using Base = device::RawPages<kHeadDim, kRows>;

  __device__ __forceinline__ void Begin(const AttendParams& p, const AttendItem& item, uint8_t* scratch) {
    device::LetNextBegin();  // the next layer's selection fetches its codebooks (SelectParams::early)
    Base::Begin(p, item, scratch);
  }
  static __device__ __forceinline__ int PageOf(const AttendParams&, const AttendItem&, int unit) {
    return unit * Base::kUnitTokens + threadIdx.x % Base::kUnitTokens;
  }
  /// page: of row lane % 16.
  static __device__ __forceinline__ void Load(const AttendParams& p, const AttendItem&, const uint8_t* page, int,
                                              int side, uint32_t to, device::Barrier barrier) {
    const int lane = threadIdx.x % 32;
    if (p.codec != nullptr) {
      const SecondPlace second = *static_cast<const SecondPlace*>(p.codec);
      const uint64_t unit = static_cast<uint64_t>(page - p.pool) / kRowUnitBytes;
      if (unit >= second.first_unit) page = second.at + (unit - second.first_unit) * kRowUnitBytes;
    }
    page += static_cast<size_t>(side * p.kv_heads) * p.page_tokens * Base::kRowBytes;
#pragma unroll
    for (int i = 0; i < Base::kPieceBytes / 512; ++i) {
      const int at = i * 32 + lane, r = at / Base::kChunks, chunk = at % Base::kChunks;
      const auto row = __shfl_sync(device::kAllLanes, reinterpret_cast<unsigned long long>(page), r);
      device::CopyAsync(to + r * Base::kRowBytes + (chunk ^ (r % 8)) * 16,
                        reinterpret_cast<const uint8_t*>(row) + chunk * 16);
    }
    barrier.ArriveWithCopies();
  }
};

}  // namespace

const AttendKernels* SelectedRowsKernels(int head_dim) { return device::FindAttendRaw<SelectedRows>(head_dim); }

}  // namespace kvmanager::pq
