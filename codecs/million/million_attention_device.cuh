// MILLION pages in the attention kernel: indices are looked up in shared memory, without bank conflicts, as operands of
// products of 8-bit integers.
//
// For 64 subspaces of 2 channels, 256 centroids each (8-bit indices), 64 tokens to a page, head_dim 128. A centroid is
// two signed bytes, the codes of million_codebooks.h. In a table (MillionPairTables) a subspace has a bank of its own;
// lanes that look up together always read different subspaces, so a look-up of 32 is one pass, whatever the indices
// are.
//
// Codes are operand B, so that a row of A may have an order of subspaces, or a set of tokens, of its own, and so may a
// column: lanes of a column differ in what they read.
//   K: C[row of A][token] = sum over channels. A's rows are heads, twice (upper and lower byte of the rounded q), each
//      in two orders: for even and for odd columns, which read the other half of the subspaces (bit `a`) first. What
//      remains of the order (bits `b` of the subspace, by column / 2) lanes put right after the look-up.
//   V: lane (g, t) reads its own two subspaces for all tokens. A's rows are heads, each four times: the t-th has P in
//      the columns of lane t alone, and zeros elsewhere. So each sum is over one lane's tokens.
// Half of K's and no part of V's results are idle, and nothing but bytes is moved between lanes' registers.
//
// The arithmetic is ReferenceAttend's (million_reference.h) but for q, which is rounded to 16 bits of its largest
// product with a step, where the CPU takes 8 and more only for outliers.
#pragma once

#include "codecs/device/attend_tables.cuh"
#include "codecs/million/million_space_device.cuh"

namespace kvmanager::device {

using million::MillionPairTables;

/// kTileRowsMax: 4 where no tile has more rows, else kTileRows. kStandsApart: pages are of rotated K and V
/// (attend_apart.cuh), and AttendParams::codec is a MillionSpace.
template <int kTileRowsMax, bool kStandsApart = false>
struct MillionPages {
  static constexpr bool kApart = kStandsApart;
  static constexpr int kHeadDim = 128;
  static constexpr int kRows = kTileRowsMax;
  static constexpr int kSets = kRows / 4;  // of four rows
  static constexpr int kPieces = 2;        // K and V
  static constexpr int kPieceBytes = 64 * 64;
  static constexpr int kTableBytes = 256 * 256;
  // P of a set, as A fragments: [row % 2][token / 8][token / 4 % 2][row / 2][token % 4]; and zeros for the lanes whose
  // row of A has none.
  static constexpr int kSetScratch = 4 * 64 + 32;
  static constexpr int kScratchBytes = kSets * kSetScratch;

  static constexpr float kMagic = 12582912.f;  // an integer n below 2^22 is the float 1.5 * 2^23 + n, bit by bit
  static constexpr int kMagicBits = 0x4b400000;
  static constexpr float kNegligible = 0x1p-100f;  // million_reference.h
  static constexpr float kQueryLevels = 127 * 256;

  /// Of row 4 * set + g / 2, in part: `sum` of this lane's probabilities and `rounded` of their rounded ones, which
  /// weigh the channels' mids; `max` is the row's. acc [half][channel of the subspace] are C fragments of V: rows
  /// 4 * set + g / 4, and + 2, of subspaces 32 * half + 8 * (g % 4) + 2t, and + 1, in steps.
  struct State {
    float acc[kSets][2][2][4];
    float max[kSets], sum[kSets], rounded[kSets];
  };

  uint32_t q[kSets][4][4];         // A fragments: [2 * half + a], rows g: lower, g + 8: upper bytes of row g / 2
  float unit[kSets], base[kSets];  // of row 4 * set + g / 2: score = unit * integer + base
  const uint8_t* table;
  uint8_t* scratch;

  static __device__ __forceinline__ int Units(const AttendParams&, const AttendItem& item) { return item.pages; }
  static __device__ __forceinline__ int PageOf(const AttendParams&, const AttendItem&, int unit) { return unit; }
  static __device__ __forceinline__ void Load(const AttendParams&, const AttendItem& item, const uint8_t* page, int,
                                              int piece, uint32_t to, Barrier barrier) {
    if (threadIdx.x % 32 != 0) return barrier.Arrive();
    barrier.ArriveExpecting(kPieceBytes);
    CopyBulk(to, page + (2 * item.kv_head + piece) * kPieceBytes, kPieceBytes, barrier);
  }
  static __device__ __forceinline__ const MillionPairTables& TablesOf(const AttendParams& p, const AttendItem& item) {
    return static_cast<const MillionPairTables*>(MillionTablesOf<kApart>(p))[item.kv_head];
  }
  static __device__ __forceinline__ uint32_t TableBytes(const AttendParams&) { return kTableBytes; }
  static __device__ __forceinline__ const void* TableOf(const AttendParams& p, const AttendItem& item) {
    return TablesOf(p, item).rows;
  }

  static __device__ __forceinline__ void Clear(State& state) {
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
      for (int i = 0; i < 16; ++i) state.acc[set][i / 8][i / 4 % 2][i % 4] = 0;
      state.max[set] = kMinusInfinity, state.sum[set] = state.rounded[set] = 0;
    }
  }

  /// A subspace is 32 * half + 16 * a + 4 * b + t.
  __device__ __forceinline__ void Begin(const AttendParams& p, const AttendItem& item, const uint8_t* in_shared,
                                        uint8_t* space) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    table = in_shared, scratch = space;
    const MillionPairTables& tables = TablesOf(p, item);
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const int row = 4 * set + g / 2;
      const QueryPairs<kHeadDim, kApart> from(p, RowOf(p, item, row));
      float2 x[16];  // q times step; [2 * half + a][b], a as even columns have it
      float largest = 0, offset = 0;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int subspace = i / 8 * 32 + (i / 4 % 2 ^ g % 2) * 16 + i % 4 * 4 + t;
        const float2 two = row < item.rows ? from[subspace] : make_float2(0, 0);
        const float2 step = reinterpret_cast<const float2*>(tables.step[0])[subspace];
        const float2 mid = reinterpret_cast<const float2*>(tables.mid[0])[subspace];
        x[i] = make_float2(two.x * step.x, two.y * step.y);
        largest = fmaxf(largest, fmaxf(fabsf(x[i].x), fabsf(x[i].y)));
        offset = fmaf(two.y, mid.y, fmaf(two.x, mid.x, offset));
      }
#pragma unroll
      for (int bit = 1; bit <= 2; bit *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, bit));
        offset += __shfl_xor_sync(kAllLanes, offset, bit);
      }
      const float inverse = largest > kNegligible ? kQueryLevels / largest : 0;
      unit[set] = largest / kQueryLevels * p.scale_log2;
      base[set] = offset * p.scale_log2;
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // four channels: two subspaces
        const float4 four = make_float4(x[2 * i].x, x[2 * i].y, x[2 * i + 1].x, x[2 * i + 1].y);
        const int n[4] = {__float2int_rn(four.x * inverse), __float2int_rn(four.y * inverse),
                          __float2int_rn(four.z * inverse), __float2int_rn(four.w * inverse)};
        uint32_t low = 0, high = 0;
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          low |= (n[c] & 0xff) << 8 * c;
          high |= (n[c] + 128 >> 8 & 0xff) << 8 * c;
        }
        q[set][i / 2][i % 2 * 2] = low, q[set][i / 2][i % 2 * 2 + 1] = high;
      }
    }
    // Lanes whose rows of A have no P read zeros.
    if (lane < 8 * kSets) {
      *reinterpret_cast<uint32_t*>(space + lane / 8 * kSetScratch + 256 + lane % 8 * 4) = 0;
    }
    __syncwarp();
  }

  template <int kPiece>
  __device__ __forceinline__ void Attend(const AttendParams&, const AttendItem&, int, const uint8_t* piece,
                                         State& state) {
    if constexpr (kPiece == 0) {
      float score[kSets][8];
      Scores(piece, score);
      Probabilities(score, state);
    } else {
      Outputs(piece, state);
    }
  }

  static __device__ __forceinline__ void Leave(const AttendParams& p, const AttendItem& item, const State& state,
                                               const WarpPlace& place) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const MillionPairTables& tables = TablesOf(p, item);
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      float sum = state.sum[set], rounded = state.rounded[set];
#pragma unroll
      for (int bit = 1; bit <= 4; bit *= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, bit);
        rounded += __shfl_xor_sync(kAllLanes, rounded, bit);
      }
      const WarpPlace::Factors mine = place.Merge(4 * set + g / 2, state.max[set], sum);
      __syncwarp();
      if (lane % 8 == 0) place.state[4 * set + g / 2] = mine.merged;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int of = 8 * (g / 4 + 2 * h);  // a lane that has the row
        const float factor = __shfl_sync(kAllLanes, mine.mine, of), old = __shfl_sync(kAllLanes, mine.theirs, of);
        const float weight = __shfl_sync(kAllLanes, rounded, of);
        float* const to = place.acc + (4 * set + g / 4 + 2 * h) * kHeadDim;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int channel = 64 * half + 16 * (g % 4) + 4 * t;
          const float4 step = *reinterpret_cast<const float4*>(tables.step[1] + channel);
          const float4 mid = *reinterpret_cast<const float4*>(tables.mid[1] + channel);
          const float(&a)[2][4] = state.acc[set][half];
          float4 v = make_float4(a[0][2 * h], a[1][2 * h], a[0][2 * h + 1], a[1][2 * h + 1]);
          v.x = fmaf(v.x, step.x, weight * mid.x) * factor, v.y = fmaf(v.y, step.y, weight * mid.y) * factor;
          v.z = fmaf(v.z, step.z, weight * mid.z) * factor, v.w = fmaf(v.w, step.w, weight * mid.w) * factor;
          float4* const at = reinterpret_cast<float4*>(to + channel);
          if (!place.empty) {
            const float4 before = *at;
            v.x = fmaf(before.x, old, v.x), v.y = fmaf(before.y, old, v.y);
            v.z = fmaf(before.z, old, v.z), v.w = fmaf(before.w, old, v.w);
          }
          *at = v;
        }
      }
    }
    __syncwarp();
  }

 private:
  /// d += a b of signed (K) or unsigned (V) bytes of A and signed ones of B: 16 rows, 32 bytes, 8 columns.
  template <bool kSigned>
  static __device__ __forceinline__ void Multiply(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                                  uint32_t b0, uint32_t b1) {
#define KVMANAGER_MMA(types)                                                                                      \
  asm("mma.sync.aligned.m16n8k32.row.col.s32." types ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])                                                            \
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1))
    if constexpr (kSigned) {
      KVMANAGER_MMA("s8.s8");
    } else {
      KVMANAGER_MMA("u8.s8");
    }
#undef KVMANAGER_MMA
  }
  /// low | high << 16, on the pipe that has least to do.
  static __device__ __forceinline__ uint32_t Join(uint32_t low, uint32_t high) {
    uint32_t x;
    asm("mad.lo.u32 %0, %1, 65536, %2;" : "=r"(x) : "r"(high), "r"(low));
    return x;
  }
  /// The codes of the index in byte `byte` of `word`. place: of the lane's bank in a row, below 256; half: of the bank.
  __device__ __forceinline__ uint32_t LookUp(uint32_t word, int byte, uint32_t place, int side, int half) const {
    const uint32_t at = __byte_perm(word, place, 0x5504 | byte << 4);
    return *reinterpret_cast<const uint16_t*>(table + at + 128 * side + 2 * half);
  }

  // Token 8 g + 4 x + u is column g of product (x, u). Lane (g, t) reads, one after another, subspaces with a ^ g % 2
  // and b ^ g / 2; b is put in order, a is in A's rows.
  __device__ __forceinline__ void Scores(const uint8_t* piece, float (&score)[kSets][8]) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t join = g & 2 ? 0x1054 : 0x5410;
    const bool swap = (g & 4) != 0;
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      int c[kSets][4][4] = {};
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        const int half = step / 2;
        uint32_t indices[4], place[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const int subspace = ((step % 2 ^ g % 2) * 4 + (b ^ g / 2)) * 4 + t;  // of the half
          place[b] = 4 * subspace;
          indices[b] = *reinterpret_cast<const uint32_t*>(piece + subspace * 64 + 8 * g + half * 2048 + 4 * x);
        }
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          uint32_t codes[4];
#pragma unroll
          for (int b = 0; b < 4; ++b) codes[b] = LookUp(indices[b], u, place[b], 0, half);
          const uint32_t y0 = __byte_perm(codes[0], codes[1], join), y1 = __byte_perm(codes[2], codes[3], join);
          const uint32_t b0 = swap ? y1 : y0, b1 = swap ? y0 : y1;
#pragma unroll
          for (int set = 0; set < kSets; ++set) {
            const uint32_t(&a)[4] = q[set][step];
            Multiply<true>(c[set][u], a[0], a[1], a[2], a[3], b0, b1);
          }
        }
      }
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
#pragma unroll
        for (int u = 0; u < 4; ++u) {
          // Of columns 2t and 2t + 1 that whose order the row has.
          const int(&sums)[4] = c[set][u];
          const int low = g & 1 ? sums[1] : sums[0], high = g & 1 ? sums[3] : sums[2];
          score[set][4 * x + u] = fmaf(static_cast<float>(high * 256 + low), unit[set], base[set]);
        }
      }
    }
  }

  /// score: of row 4 * set + g / 2 and tokens 8 (2t + g % 2) and the seven that follow.
  __device__ __forceinline__ void Probabilities(const float (&score)[kSets][8], State& state) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const float(&x)[8] = score[set];
      float top = fmaxf(fmaxf(fmaxf(x[0], x[1]), fmaxf(x[2], x[3])), fmaxf(fmaxf(x[4], x[5]), fmaxf(x[6], x[7])));
#pragma unroll
      for (int bit = 1; bit <= 4; bit *= 2) top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, bit));
      const float next = fmaxf(state.max[set], top), factor = Exp2(state.max[set] - next);
      state.max[set] = next;
      // A page's probabilities in units of its largest / 255.
      constexpr float kLog2Of255 = 7.99435344f;
      const float weight = Exp2(top - next) * (1 / 255.f), origin = top - kLog2Of255;
      float sum = 0;
      uint32_t rounded[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float e = Exp2(x[i] - origin);
        sum += e;
        rounded[i] = AsBits(e + 8388608.f);
      }
      uint2 bytes;
      bytes.x = LowBytes(rounded[0], rounded[1], rounded[2], rounded[3]);
      bytes.y = LowBytes(rounded[4], rounded[5], rounded[6], rounded[7]);
      uint8_t* const to = scratch + set * kSetScratch + g / 2 % 2 * 128 + t * 32 + g % 2 * 16 + g / 4 * 4;
      *reinterpret_cast<uint32_t*>(to) = bytes.x, *reinterpret_cast<uint32_t*>(to + 8) = bytes.y;
      const float total = static_cast<float>(__dp4a(bytes.x, 0x01010101u, __dp4a(bytes.y, 0x01010101u, 0u)));
      state.sum[set] = fmaf(sum, weight, state.sum[set] * factor);
      state.rounded[set] = fmaf(total, weight, state.rounded[set] * factor);
#pragma unroll
      for (int h = 0; h < 2; ++h) weights[set][h] = __shfl_sync(kAllLanes, weight, 8 * (g / 4 + 2 * h));
      if (__any_sync(kAllLanes, factor != 1.f)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float f = __shfl_sync(kAllLanes, factor, 8 * (g / 4 + 2 * h));
#pragma unroll
          for (int i = 0; i < 8; ++i) state.acc[set][i / 4][i / 2 % 2][i % 2 + 2 * h] *= f;
        }
      }
    }
  }
  static __device__ __forceinline__ uint32_t LowBytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    return __byte_perm(__byte_perm(a, b, 0x0040), __byte_perm(c, d, 0x0040), 0x5410);
  }

  // Lane (g, t) takes 16 tokens at a time, other ones for each t: chunks in an order that keeps quarters of a warp in
  // different banks.
  __device__ __forceinline__ void Outputs(const uint8_t* piece, State& state) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int c[kSets][2][2][4];
#pragma unroll
    for (int i = 0; i < kSets * 16; ++i) c[i / 16][i / 8 % 2][i / 4 % 2][i % 4] = kMagicBits;
    const int subspace = g + 8 * t;  // of the half
    const uint32_t place = 4 * subspace;
    const bool has = g % 4 == t;  // P in its rows
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int chunk = (i + t) % 4;
      uint4 indices[2], p[kSets][2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        indices[half] = *reinterpret_cast<const uint4*>(piece + subspace * 64 + chunk * 16 + half * 2048);
      }
      const uint8_t* const from = scratch + (has ? g / 4 * 128 + chunk * 32 : 256);
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
#pragma unroll
        for (int z = 0; z < 2; ++z) p[set][z] = *reinterpret_cast<const uint4*>(from + set * kSetScratch + 16 * z);
      }
#pragma unroll
      for (int z = 0; z < 2; ++z) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint32_t b[2][2];  // [register][channel]
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const uint32_t word = Word(indices[half], 2 * z + r);
            uint32_t codes[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) codes[j] = LookUp(word, j, place, 1, half);
            const uint32_t y0 = Join(codes[0], codes[1]), y1 = Join(codes[2], codes[3]);
            b[r][0] = __byte_perm(y0, y1, 0x6420), b[r][1] = __byte_perm(y0, y1, 0x7531);
          }
#pragma unroll
          for (int set = 0; set < kSets; ++set) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
              const uint4& a = p[set][z];
              Multiply<false>(c[set][half][k], a.x, a.y, a.z, a.w, b[0][k], b[1][k]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        float& acc = state.acc[set][i / 8][i / 4 % 2][i % 4];
        acc = fmaf(AsFloat(c[set][i / 8][i / 4 % 2][i % 4]) - kMagic, weights[set][i % 4 / 2], acc);
      }
    }
  }
  static __device__ __forceinline__ uint32_t Word(const uint4& v, int i) {
    return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
  }

  float weights[kSets][2];  // of the page's P in rows 4 * set + g / 4, and + 2
};

}  // namespace kvmanager::device
