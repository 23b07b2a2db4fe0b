#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention/gpu_oracle.h"
#include "codecs/device/attend_params.h"
#include "codecs/zack/zack_device.h"

namespace kvmanager {
namespace {

constexpr int kThreads = 32 * kOracleRowsMax;  // a warp per row where rows matter
constexpr int kChannelsMax = 128, kTokens = kOraclePageTokens, kRows = kOracleRowsMax;
constexpr int kPagesPerBlock = 32;
enum Arithmetic { kSame, kExact };

/// Of one block's pages: [row][StateFields]: maximum, sum, acc of each arithmetic; then count, sum, squares of scores.
__host__ __device__ constexpr size_t StateFields(int head_dim) { return 2 * (size_t(head_dim) + 2) + 3; }

uint32_t Chunks(const OracleInput& in) {
  return uint32_t((in.position_max / kTokens + 1 + kPagesPerBlock - 1) / kPagesPerBlock);
}

struct Shared {
  double value[kTokens][kChannelsMax + 1];  // of one side
  int16_t code[kTokens][kChannelsMax + 2];  // of one side, where it is encoded; ZACK's elements
  float step[kChannelsMax], minimum[kChannelsMax];
  float norm[kTokens];  // of V's tokens as they are stored, else 1
  double norm_unit;     // what they are multiples of
  double q[kRows][kChannelsMax];
  int16_t folded[kRows][kChannelsMax];  // q times K's steps, in codes
  double unit[kRows], base[kRows];      // score = unit * integer + base
  double score[2][kRows][kTokens];      // then P
  float probability[kRows][kTokens];    // P of a page, its largest being 1
  uint8_t weight[kRows][kTokens];       // P times norms in codes
  double page_weight[kRows], rescale[2][kRows];
  double max[2][kRows], sum[2][kRows], acc[2][kRows][kChannelsMax];
  double scores[kRows][3];
};

__device__ double Element(const void* from, size_t i, bool bfloat16) {
  return bfloat16 ? double(__bfloat162float(static_cast<const __nv_bfloat16*>(from)[i]))
                  : double(__half2float(static_cast<const __half*>(from)[i]));
}

__device__ double Sum(double x) {
  for (int i = 16; i > 0; i /= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}
__device__ double Max(double x) {
  for (int i = 16; i > 0; i /= 2) x = fmax(x, __shfl_xor_sync(0xffffffffu, x, i));
  return x;
}

/// hack_format.h's planes.
__device__ int CodeAt(const uint8_t* record, const hack::HackDeviceSide& s, bool is_k, int token, int channel) {
  const int c = channel % 16, i = token / 16;
  const int j = is_k ? c / 4 : token % 16 / 4, lane = is_k ? c % 4 : token % 4, r = is_k ? token % 16 : c;
  const int width = s.segment_bits[channel / 16];
  const uint8_t* plane = record + s.codes + s.segment_offset[channel / 16];
  if (width == 8) return plane[((j * 4 + i) * 16 + r) * 4 + lane] ^ (is_k ? 0 : 0x80);
  int code = 0;
  for (int low = 0; low < width; low += 2) {
    if (width - low >= 2) {
      code |= (plane[(j * 16 + r) * 4 + lane] >> 2 * i & 3) << low;
      plane += 256;
    } else {
      code |= (plane[(j / 2 * 16 + r) * 4 + lane] >> ((i & 1) + 4 * (i >> 1) + 2 * (j % 2)) & 1) << low;
    }
  }
  return code;
}

__device__ float HalfAt(const uint8_t* at) { return __half2float(*reinterpret_cast<const __half*>(at)); }

/// Indices of 8 bits: a subspace's 64 tokens, and then the next subspace.
__device__ void LoadPairs(const OracleInput& in, const OracleQuery& query, const OraclePage& page, bool is_k,
                          Shared& s) {
  const million::MillionPairTables& tables = in.pairs[query.kv_head];
  const int side = is_k ? 0 : 1;
  const uint8_t* const indices =
      in.pool + size_t{page.encoded} * device::kSlotUnitBytes + (2 * query.kv_head + side) * 64 * kTokens;
  for (int i = threadIdx.x; i < kTokens * 128; i += kThreads) {
    const int token = i / 128, c = i % 128, subspace = c / 2;
    int index = indices[subspace * kTokens + token];
    if (in.spoil_codes && is_k && c == 0) index ^= 1;
    const int place = 128 * side + subspace % 32 * 4 + subspace / 32 * 2 + c % 2;
    s.code[token][c] = int8_t(tables.rows[index][place]);
    s.value[token][c] = double(s.code[token][c]) * double(tables.step[side][c]) + double(tables.mid[side][c]);
    if (token == 0) s.step[c] = tables.step[side][c], s.minimum[c] = tables.mid[side][c];
  }
}

/// Decoded in double precision.
__device__ void LoadZack(const OracleInput& in, const OracleQuery& query, const OraclePage& page, bool is_k,
                         Shared& s) {
  const auto& space = *static_cast<const device::MappedSpace*>(in.zack);
  const auto& head = reinterpret_cast<const zack::ZackDeviceHead*>(&space + 1)[query.kv_head];
  const int d = in.head_dim, rank = head.chunks[is_k ? 0 : 1] * 8;
  const uint8_t* const rows = in.pool + size_t{page.encoded} * device::kSlotUnitBytes + head.offset +
                              (is_k ? 0 : size_t(kTokens) * head.chunks[0] * 16);
  const float* const factor = (is_k ? space.query : space.output) + size_t{query.kv_head} * d * d;
  for (int i = threadIdx.x; i < kTokens * rank; i += kThreads) {
    s.code[i / rank][i % rank] = reinterpret_cast<const int16_t*>(rows)[i];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kTokens * d; i += kThreads) {
    const int token = i % kTokens, c = i / kTokens;  // a warp reads one element of the factor at a time
    double value = 0;
    for (int j = in.spoil_codes && is_k ? 1 : 0; j < rank; ++j) {
      value += Element(s.code[token], j, false) * double(__ldg(factor + (is_k ? c * d + j : j * d + c)));
    }
    s.value[token][c] = value;
  }
}

__device__ void LoadSide(const OracleInput& in, const OracleQuery& query, const OraclePage& page, bool encoded,
                         bool is_k, Shared& s) {
  const int d = in.head_dim;
  if (!encoded) {
    const uint8_t* const raw = in.pool + size_t{page.raw} * device::kSlotUnitBytes +
                               ((is_k ? 0 : in.kv_heads) + query.kv_head) * size_t(kTokens) * d * 2;
    for (int i = threadIdx.x; i < kTokens * d; i += kThreads) s.value[i / d][i % d] = Element(raw, i, in.bfloat16);
    return;
  }
  if (in.zack != nullptr) return LoadZack(in, query, page, is_k, s);
  if (in.pairs != nullptr) return LoadPairs(in, query, page, is_k, s);
  const hack::HackDeviceHead& head = in.heads[query.kv_head];
  const hack::HackDeviceSide& side = head.side[is_k ? 0 : 1];
  const uint8_t* const record = in.pool + size_t{page.encoded} * device::kSlotUnitBytes + head.offset;
  const double unit = side.norms == 0 ? 1 : double(HalfAt(record + side.norm_top)) / 255;
  if (threadIdx.x < kTokens) s.norm[threadIdx.x] = side.norms == 0 ? 1 : record[side.norms + threadIdx.x];
  if (threadIdx.x == 0) s.norm_unit = unit;
  for (int i = threadIdx.x; i < kTokens * d; i += kThreads) {
    const int token = i / d, c = i % d;
    const double norm = side.norms == 0 ? 1 : unit * record[side.norms + token];
    const float step = __fdiv_rn(__fmul_rn(HalfAt(record + side.tops), float(record[side.steps + c])), 255.f);
    const float minimum =
        __fdiv_rn(__fmul_rn(HalfAt(record + side.tops + 2), float(int8_t(record[side.minima + c]))), 127.f);
    int code = CodeAt(record, side, is_k, token, c);
    if (in.spoil_codes && is_k && c == 0) code ^= 1;
    s.code[token][c] = int16_t(code);
    s.value[token][c] = (double(code) * double(step) + double(minimum)) * norm;
    if (token == 0) s.step[c] = step, s.minimum[c] = minimum;
  }
}

/// By the row's warp: q times steps, in codes.
__device__ void Fold(const OracleInput& in, int row, int lane, Shared& s) {
  constexpr double kNegligible = 0x1p-100;  // hack_reference.h
  const float levels = in.pairs != nullptr ? 127.f * 256 : 127.f;
  double largest = 0, constant = 0;
  for (int c = lane; c < in.head_dim; c += 32) {
    largest = fmax(largest, double(fabsf(__fmul_rn(float(s.q[row][c]), s.step[c]))));
    constant += s.q[row][c] * double(s.minimum[c]);
  }
  largest = Max(largest), constant = Sum(constant);
  for (int c = lane; c < in.head_dim; c += 32) {
    const float product = __fmul_rn(float(s.q[row][c]), s.step[c]);
    const float code = largest > kNegligible ? rintf(__fmul_rn(product, __fdiv_rn(levels, float(largest)))) : 0;
    s.folded[row][c] = int16_t(code);
  }
  if (lane == 0) s.unit[row] = largest / levels, s.base[row] = constant;
}

/// By the row's warp: the scores of a page to P, and what becomes of the state.
__device__ void Softmax(bool encoded, int seen, int row, int lane, Shared& s) {
  for (int a = 0; a < 2; ++a) {
    double top = -INFINITY, total = 0;
    for (int t = lane; t < seen; t += 32) top = fmax(top, s.score[a][row][t]);
    top = Max(top);
    const double next = fmax(s.max[a][row], top);
    double count = 0, sum = 0, squares = 0;
    for (int t = lane; t < kTokens; t += 32) {
      const double score = s.score[a][row][t];
      if (t < seen) count += 1, sum += score, squares += score * score;
      if (a == kSame && encoded) s.probability[row][t] = float(exp(score - top));
      const double p = t < seen ? exp(score - next) : 0;
      s.score[a][row][t] = p;
      total += p;
    }
    total = Sum(total), count = Sum(count), sum = Sum(sum), squares = Sum(squares);
    if (lane == 0) {
      const double rescale = exp(s.max[a][row] - next);
      s.rescale[a][row] = rescale;
      s.sum[a][row] = s.sum[a][row] * rescale + total;
      s.max[a][row] = next;
      if (a == kSame) s.page_weight[row] = exp(top - next);
      if (a == kExact) s.scores[row][0] += count, s.scores[row][1] += sum, s.scores[row][2] += squares;
    }
  }
}

/// By the row's warp: P times V's norms in codes, and what a unit of them weighs.
__device__ void Weigh(int row, int lane, Shared& s) {
  double largest = 0;
  for (int t = lane; t < kTokens; t += 32) largest = fmax(largest, double(s.probability[row][t] * s.norm[t]));
  largest = Max(largest);
  for (int t = lane; t < kTokens; t += 32) {
    s.weight[row][t] = uint8_t(rint(double(s.probability[row][t] * s.norm[t]) * (255 / largest)));
  }
  __syncwarp();
  if (lane == 0) s.page_weight[row] *= largest * s.norm_unit;
}

__global__ void __launch_bounds__(kThreads) Pages(const OracleInput in, double* scratch) {
  extern __shared__ char space[];
  Shared& s = *reinterpret_cast<Shared*>(space);
  const OracleQuery query = in.queries[blockIdx.x];
  const int d = in.head_dim, rows = in.query_heads / in.kv_heads, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const double scale = double(1 / sqrtf(float(d)));
  for (int i = threadIdx.x; i < kRows * kChannelsMax; i += kThreads) {
    const int row = i / kChannelsMax, c = i % kChannelsMax;
    s.acc[kSame][row][c] = s.acc[kExact][row][c] = 0;
    if (row >= rows || c >= d) continue;
    const size_t q_row = size_t{query.token} * in.query_heads + query.kv_head * rows + row;
    s.q[row][c] = Element(in.q, q_row * d + c, in.bfloat16);
  }
  if (threadIdx.x < kRows) {
    for (int a = 0; a < 2; ++a) s.max[a][threadIdx.x] = -INFINITY, s.sum[a][threadIdx.x] = 0;
    for (double& x : s.scores[threadIdx.x]) x = 0;
  }
  const uint32_t own = uint32_t(query.position / kTokens), first = blockIdx.y * kPagesPerBlock;
  for (uint32_t j = first; j <= own && j < first + kPagesPerBlock; ++j) {
    const OraclePage page = in.pages[query.first_page + j];
    const bool near = j == own || own - j <= uint32_t(in.lag_pages);
    const bool encoded = page.encoded != OraclePage::kNone && !(near && page.raw != OraclePage::kNone);
    const bool in_codes = encoded && in.zack == nullptr;
    const int seen = j == own ? int(query.position % kTokens) + 1 : kTokens;
    __syncthreads();
    LoadSide(in, query, page, encoded, true, s);
    __syncthreads();
    if (in_codes && warp < rows) Fold(in, warp, lane, s);
    __syncthreads();
    for (int i = threadIdx.x; i < rows * kTokens; i += kThreads) {
      const int row = i / kTokens, t = i % kTokens;
      double exact = 0;
      for (int c = 0; c < d; ++c) exact += s.q[row][c] * s.value[t][c];
      s.score[kExact][row][t] = s.score[kSame][row][t] = scale * exact;
      if (!in_codes) continue;
      int dot = 0;
      for (int c = 0; c < d; ++c) dot += int(s.folded[row][c]) * int(s.code[t][c]);
      s.score[kSame][row][t] = scale * (s.unit[row] * dot + s.base[row]);
    }
    __syncthreads();
    if (warp < rows) Softmax(in_codes, seen, warp, lane, s);
    if (in_codes && in.pairs != nullptr && threadIdx.x < kTokens) s.norm[threadIdx.x] = 1, s.norm_unit = 1;
    LoadSide(in, query, page, encoded, false, s);
    __syncthreads();
    if (in_codes && warp < rows) Weigh(warp, lane, s);
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * rows * d; i += kThreads) {
      const int a = i / (rows * d), row = i / d % rows, c = i % d;
      double add = 0;
      if (a == kSame && in_codes) {
        int dot = 0, weights = 0;
        for (int t = 0; t < kTokens; ++t) {
          dot += int(s.weight[row][t]) * int(s.code[t][c]);
          weights += s.weight[row][t];
        }
        add = s.page_weight[row] / 255 * (double(s.step[c]) * dot + double(s.minimum[c]) * weights);
      } else {
        for (int t = 0; t < seen; ++t) add += s.score[a][row][t] * s.value[t][c];
      }
      s.acc[a][row][c] = s.acc[a][row][c] * s.rescale[a][row] + add;
    }
  }
  __syncthreads();
  for (int row = 0; row < rows; ++row) {
    double* const to = scratch + ((size_t{blockIdx.x} * rows + row) * gridDim.y + blockIdx.y) * StateFields(d);
    for (int a = 0; a < 2; ++a) {
      if (threadIdx.x == 0) to[a * (d + 2)] = s.max[a][row], to[a * (d + 2) + 1] = s.sum[a][row];
      for (int c = threadIdx.x; c < d; c += kThreads) to[a * (d + 2) + 2 + c] = s.acc[a][row][c];
    }
    if (threadIdx.x < 3) to[2 * (d + 2) + threadIdx.x] = s.scores[row][threadIdx.x];
  }
}

/// A block per row.
__global__ void Merge(const double* scratch, int d, uint32_t chunks, double* result) {
  const double* const from = scratch + size_t{blockIdx.x} * chunks * StateFields(d);
  double* const to = result + size_t{blockIdx.x} * OracleFields(d);
  for (int a = 0; a < 2; ++a) {
    double max = -INFINITY, sum = 0;
    for (uint32_t i = 0; i < chunks; ++i) max = fmax(max, from[i * StateFields(d) + a * (d + 2)]);
    for (uint32_t i = 0; i < chunks; ++i) {
      const double* const state = from + i * StateFields(d) + a * (d + 2);
      sum += state[1] * exp(state[0] - max);
    }
    for (int c = threadIdx.x; c < d; c += blockDim.x) {
      double acc = 0;
      for (uint32_t i = 0; i < chunks; ++i) {
        const double* const state = from + i * StateFields(d) + a * (d + 2);
        acc += state[2 + c] * exp(state[0] - max);
      }
      to[a * (d + 1) + c] = acc / sum;
    }
    if (threadIdx.x == 0) to[a * (d + 1) + d] = max + log(sum);
  }
  if (threadIdx.x < 3) {
    double total = 0;
    for (uint32_t i = 0; i < chunks; ++i) total += from[i * StateFields(d) + 2 * (d + 2) + threadIdx.x];
    to[OracleScoresAt(d) + threadIdx.x] = total;
  }
}

}  // namespace

size_t OracleScratch(const OracleInput& in) {
  return size_t{in.query_count} * (in.query_heads / in.kv_heads) * Chunks(in) * StateFields(in.head_dim);
}

int RunOracle(const OracleInput& in, double* scratch, double* result, CUstream_st* stream) {
  const int rows = in.query_heads / in.kv_heads;
  if (rows > kRows || in.head_dim > kChannelsMax) return cudaErrorInvalidValue;
  const cudaError_t error = cudaFuncSetAttribute(Pages, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
  if (error != cudaSuccess) return error;
  Pages<<<dim3(in.query_count, Chunks(in)), kThreads, sizeof(Shared), stream>>>(in, scratch);
  Merge<<<in.query_count * rows, 128, 0, stream>>>(scratch, in.head_dim, Chunks(in), result);
  return cudaGetLastError();
}

}  // namespace kvmanager
