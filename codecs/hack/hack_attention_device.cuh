// HACK pages in the attention kernel: products of 8-bit integers on the codes themselves (hack_reference.h has the
// arithmetic and its roundings, hack_format.h the bytes).
//
// For k_axis=channel, 8-bit metadata, 64 tokens to a page and a partition, and one width per side. A unit is one head's
// record of a page, by one bulk copy. Codes are operand A: S^T = K q^T contracts channels, O^T = V^T P^T contracts
// tokens, so each unpacked code serves all rows of the tile, and the layout's words are what a fragment holds:
//   K: a row of A is a token, four channels to a register   tile i of a plane's word [j][r]: token 16 i + r
//   V: a row of A is a channel, four tokens to a register   tile i of a word [j][r]: tokens 16 i + 4 j ...
// A lane reads words r = 2g and 2g + 1 together: they are rows g and g + 8.
#pragma once

#include "codecs/device/attend_device.cuh"
#include "codecs/hack/hack_fold_device.cuh"

namespace kvmanager::device {

/// Codes of a segment and strip. Unpack: z[tile][r] holds four codes times Scale(tile).
template <int kBits>
struct Codes;

/// For 1 to 4 bits: a tile's codes stand in the low (tiles 0, 1) or high (tiles 2, 3) half of a byte.
struct HalfByteCodes {
  static __device__ __forceinline__ constexpr float Scale(int tile) { return tile < 2 ? 1.f : 1 / 16.f; }
  /// x has tiles 0 and 2 in place, y tiles 1 and 3.
  static __device__ __forceinline__ void Split(uint32_t x, uint32_t y, uint32_t mask, int r, uint32_t (&z)[4][2]) {
    z[0][r] = x & mask, z[2][r] = x & mask << 4, z[1][r] = y & mask, z[3][r] = y & mask << 4;
  }
  /// Bits 0, 1, 4 and 5 of each byte of x, the others of y.
  static __device__ __forceinline__ uint32_t Join(uint32_t x, uint32_t y) {
    uint32_t joined;  // in one instruction: the compiler would move shifts across it, and need two
    asm("lop3.b32 %0, %1, %2, %3, 0xe4;" : "=r"(joined) : "r"(x), "r"(y), "r"(0x33333333u));
    return joined;
  }
};
template <>
struct Codes<1> : HalfByteCodes {
  static __device__ __forceinline__ void Unpack(const uint8_t* segment, int g, int t, uint32_t (&z)[4][2]) {
    const uint2 plane = *reinterpret_cast<const uint2*>(segment + 64 * (t / 2) + 8 * g);
    const uint32_t x[2] = {plane.x >> (2 * (t % 2)), plane.y >> (2 * (t % 2))};
#pragma unroll
    for (int r = 0; r < 2; ++r) Split(x[r], x[r] >> 1, 0x01010101u, r, z);
  }
  static __device__ __forceinline__ constexpr float KeyScale(int tile) { return Scale(tile); }
  static __device__ __forceinline__ void UnpackKeys(const uint8_t* segment, int g, int t, uint32_t (&z)[4][2]) {
    Unpack(segment, g, t, z);
  }
};
template <>
struct Codes<2> : HalfByteCodes {
  static __device__ __forceinline__ void Unpack(const uint8_t* segment, int g, int t, uint32_t (&z)[4][2]) {
    const uint2 plane = *reinterpret_cast<const uint2*>(segment + 64 * t + 8 * g);
    const uint32_t x[2] = {plane.x, plane.y};
#pragma unroll
    for (int r = 0; r < 2; ++r) Split(x[r], x[r] >> 2, 0x03030303u, r, z);
  }
  // Each tile where it stands: a product that keeps tiles apart needs no shift.
  static __device__ __forceinline__ constexpr float KeyScale(int tile) { return 1.f / (1 << 2 * tile); }
  static __device__ __forceinline__ void UnpackKeys(const uint8_t* segment, int g, int t, uint32_t (&z)[4][2]) {
    const uint2 plane = *reinterpret_cast<const uint2*>(segment + 64 * t + 8 * g);
    const uint32_t x[2] = {plane.x, plane.y};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int tile = 0; tile < 4; ++tile) z[tile][r] = x[r] & 0x03030303u << 2 * tile;
    }
  }
};
template <>
struct Codes<3> : HalfByteCodes {
  static __device__ __forceinline__ void Unpack(const uint8_t* segment, int g, int t, uint32_t (&z)[4][2]) {
    const uint2 low = *reinterpret_cast<const uint2*>(segment + 64 * t + 8 * g);
    const uint2 high = *reinterpret_cast<const uint2*>(segment + 256 + 64 * (t / 2) + 8 * g);
    const uint32_t x[2] = {low.x, low.y}, h[2] = {high.x, high.y};
    const int shift = 2 - 2 * (t % 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t y = h[r] << shift;  // bit 2 of tiles 0, 1, 2, 3 at bits 2, 3, 6, 7
      Split(Join(x[r], y), Join(x[r] >> 2, y >> 1), 0x07070707u, r, z);
    }
  }
  static __device__ __forceinline__ constexpr float KeyScale(int tile) { return Scale(tile); }
  static __device__ __forceinline__ void UnpackKeys(const uint8_t* segment, int g, int t, uint32_t (&z)[4][2]) {
    Unpack(segment, g, t, z);
  }
};
template <>
struct Codes<4> : HalfByteCodes {
  static __device__ __forceinline__ void Unpack(const uint8_t* segment, int g, int t, uint32_t (&z)[4][2]) {
    const uint2 low = *reinterpret_cast<const uint2*>(segment + 64 * t + 8 * g);
    const uint2 high = *reinterpret_cast<const uint2*>(segment + 256 + 64 * t + 8 * g);
    const uint32_t x[2] = {low.x, low.y}, h[2] = {high.x, high.y};
#pragma unroll
    for (int r = 0; r < 2; ++r) Split(Join(x[r], h[r] << 2), Join(x[r] >> 2, h[r]), 0x0f0f0f0fu, r, z);
  }
  static __device__ __forceinline__ constexpr float KeyScale(int tile) { return Scale(tile); }
  static __device__ __forceinline__ void UnpackKeys(const uint8_t* segment, int g, int t, uint32_t (&z)[4][2]) {
    Unpack(segment, g, t, z);
  }
};
template <>
struct Codes<8> {
  static __device__ __forceinline__ constexpr float Scale(int) { return 1; }
  static __device__ __forceinline__ void Unpack(const uint8_t* segment, int g, int t, uint32_t (&z)[4][2]) {
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      const uint2 x = *reinterpret_cast<const uint2*>(segment + 256 * t + 64 * tile + 8 * g);
      z[tile][0] = x.x, z[tile][1] = x.y;
    }
  }
  static __device__ __forceinline__ constexpr float KeyScale(int) { return 1; }
  static __device__ __forceinline__ void UnpackKeys(const uint8_t* segment, int g, int t, uint32_t (&z)[4][2]) {
    Unpack(segment, g, t, z);
  }
};

enum class IntegerProduct { kUnsignedSigned, kUnsignedUnsigned, kSignedUnsigned };
/// d = a b + c, contracting 32 bytes: rows of a in two registers of its first, and two of its second 16 bytes.
template <IntegerProduct kKind>
__device__ __forceinline__ void MultiplyBytes(int (&d)[4], const uint32_t (&first)[2], const uint32_t (&second)[2],
                                              uint32_t b0, uint32_t b1, const int (&c)[4]) {
#define KVMANAGER_MMA(types)                                                                                          \
  asm("mma.sync.aligned.m16n8k32.row.col.s32." types ".s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};" \
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])                                                                \
      : "r"(first[0]), "r"(first[1]), "r"(second[0]), "r"(second[1]), "r"(b0), "r"(b1), "r"(c[0]), "r"(c[1]),         \
        "r"(c[2]), "r"(c[3]))
  if constexpr (kKind == IntegerProduct::kUnsignedSigned) {
    KVMANAGER_MMA("u8.s8");
  } else if constexpr (kKind == IntegerProduct::kUnsignedUnsigned) {
    KVMANAGER_MMA("u8.u8");
  } else {
    KVMANAGER_MMA("s8.u8");
  }
#undef KVMANAGER_MMA
}

/// kTileRowsMax: 4 where no tile has more rows, else kTileRows.
template <int kHeadDimension, int kKBits, int kVBits, int kTileRowsMax>
struct HackPages : StepFold<kHeadDimension, kTileRowsMax> {
  using Fold = StepFold<kHeadDimension, kTileRowsMax>;
  using Fold::bytes;
  using Fold::kMagic;
  using Fold::kMagicBits;
  using Fold::kNegligible;
  using Fold::Tops;
  using Folding = typename Fold::Folding;

  static constexpr int kHeadDim = kHeadDimension;
  static constexpr int kRows = kTileRowsMax;
  static constexpr int kSegments = kHeadDim / 16;
  static constexpr int kPieces = 1;
  static constexpr int kTokens = 64;

  // Offsets in a head's record (hack_format.h).
  static constexpr int kKTops = kSegments * 128 * kKBits;
  static constexpr int kKSteps = AlignTo(kKTops + 4, 16);
  static constexpr int kKMinima = AlignTo(kKSteps + kHeadDim, 16);
  static constexpr int kVCodes = AlignTo(kKMinima + kHeadDim, 16);
  static constexpr int kVTops = kVCodes + kSegments * 128 * kVBits;
  static constexpr int kVSteps = AlignTo(kVTops + 6, 16);
  static constexpr int kVMinima = AlignTo(kVSteps + kHeadDim, 16);
  static constexpr int kVNorms = AlignTo(kVMinima + kHeadDim, 16);
  static constexpr int kPieceBytes = AlignTo(kVNorms + kTokens, 64);
  static constexpr int kBytesWithoutNorms = AlignTo(kVMinima + kHeadDim, 64);

  static constexpr int kScratchBytes = kRows * kHeadDim;  // the folded q: words [row][j][segment]

  // With more rows a tile's q would take the place of a warp's records.
  static constexpr bool kPrepares = true, kMayRotate = true, kSharesQueries = kRows == 4;
  static constexpr bool kLaunchedIntoEnd = true;

  uint32_t* scratch;
  // Of the unit that was prepared: q times K's steps as B fragments; of rows 2t and 2t + 1, score = unit * integer +
  // base.
  uint32_t folded[kSegments];
  float unit[2], base[2];
  // Of the unit whose scores are known: P as B fragments of tiles, and what a unit of it weighs.
  uint32_t p_codes[4];
  float weight[2];

  static __device__ __forceinline__ int Units(const AttendParams&, const AttendItem& item) { return item.pages; }

  static __device__ __forceinline__ int PageOf(const AttendParams&, const AttendItem&, int unit) { return unit; }
  static __device__ __forceinline__ void Load(const AttendParams& params, const AttendItem& item, const uint8_t* page,
                                              int, int, uint32_t to, Barrier barrier) {
    if (threadIdx.x % 32 != 0) return barrier.Arrive();
    const uint32_t bytes = params.v_norms ? kPieceBytes : kBytesWithoutNorms;
    barrier.ArriveExpecting(bytes);
    CopyBulk(to, page + item.kv_head * bytes, bytes, barrier);
  }

  __device__ __forceinline__ void Begin(const AttendParams& params, const AttendItem& item, uint8_t* space) {
    scratch = reinterpret_cast<uint32_t*>(space);
    bytes.Init(scratch);
    TakeQueries(params, item);
    if (params.rotates) Fold::RotateRows(this->q);
  }
  /// With kSharesQueries.
  __device__ __forceinline__ void Begin(const AttendParams& params, const AttendItem& item, uint8_t* space,
                                        RotatedQueries<kHeadDim, kRows>& queries, uint32_t tile) {
    scratch = reinterpret_cast<uint32_t*>(space);
    bytes.Init(scratch);
    if (!params.rotates) return TakeQueries(params, item);
    queries.Take(tile, this->q);
  }

  __device__ __forceinline__ void Prepare(const AttendParams& params, const uint8_t* record) {
    Folding fold;
    this->MultiplySteps(record + kKTops, record + kKSteps, record + kKMinima, fold);
    this->CodeProducts(params, record + kKTops, fold, scratch, unit, base);
    TakeCodes();
  }
  __device__ __forceinline__ void Scores(const AttendParams& params, uint8_t* record, WarpState<kHeadDim>& state) {
    float scores[4][4];
    IntegerScores(record, scores);
    Stage(params, record);
    Probabilities(record, scores, state);
  }
  __device__ __forceinline__ void Outputs(const AttendParams& params, const uint8_t* record, const uint8_t* next,
                                          WarpState<kHeadDim>& state) {
    const OutputScale scale = ScaleOf(params, record);
    Folding fold;
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
      if (s == 0) this->MultiplySteps(next + kKTops, next + kKSteps, next + kKMinima, fold);
      if (s == kSegments / 2) this->CodeProducts(params, next + kKTops, fold, scratch, unit, base);
      AddSegment(record, s, scale, state);
    }
    TakeCodes();
    FenceForCopies();  // of what was staged
  }

  template <bool kAdd>
  static __device__ __forceinline__ void Store(const WarpState<kHeadDim>& state, float* to) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if (2 * t >= kRows) return;
#pragma unroll
    for (int s = 0; s < kSegments; ++s) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        *reinterpret_cast<float2*>(to + (2 * t + h) * kHeadDim + 16 * s + 2 * g) =
            make_float2(state.acc[s][h], state.acc[s][2 + h]);
      }
    }
  }
  // Rows g and g + 8 are the segment's channels 2g and 2g + 1; in the plain order they are g and g + 8. Where pages are
  // rotated, acc is times the normalised Walsh-Hadamard matrix, too.
  static __device__ __forceinline__ void Open(WarpState<kHeadDim>& state, const AttendParams& params) {
    Reorder<true>(state, params.rotates);
  }
  static __device__ __forceinline__ void Close(WarpState<kHeadDim>& state, const AttendParams& params) {
    Reorder<false>(state, params.rotates);
  }

 private:
  __device__ __forceinline__ void TakeQueries(const AttendParams& params, const AttendItem& item) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      uint2 four = make_uint2(0, 0);
      if (r < item.rows && Fold::HasChannels(lane)) {
        four = reinterpret_cast<const uint2*>(static_cast<const uint16_t*>(params.q) +
                                              RowOf(params, item, r) * kHeadDim)[lane];
      }
      const float2 a = ToFloats(four.x, params.bfloat16), b = ToFloats(four.y, params.bfloat16);
      this->q[r][0] = a.x, this->q[r][1] = a.y, this->q[r][2] = b.x, this->q[r][3] = b.y;
    }
  }

  /// The bits of a channel's number within its segment go round by one: in the plain order the row of a fragment, r, is
  /// the highest, and g the others; in this form's own order r is the lowest. r changes places with the bits of g, one
  /// after the other, and is each of them once: there a butterfly needs no other lane.
  template <bool kOpens>
  static __device__ __forceinline__ void Reorder(WarpState<kHeadDim>& state, bool rotates) {
    constexpr int kHalves = kTileRows / kRows, kOwn = kSegments / kHalves;
    const auto combine = [](float& a, float& b) {
      const float low = a, high = b;
      a = low + high, b = low - high;
    };
    const auto combine_rows = [&]() {
#pragma unroll
      for (int s = 0; s < kOwn; ++s) {
        combine(state.acc[s][0], state.acc[s][2]), combine(state.acc[s][1], state.acc[s][3]);
      }
    };
    if (rotates) {
#pragma unroll
      for (int half = 1; half < kSegments; half *= 2) {
#pragma unroll
        for (int s = 0; s < kSegments; ++s) {
          if ((s & half) != 0) continue;
#pragma unroll
          for (int i = 0; i < 4; ++i) combine(state.acc[s][i], state.acc[s + half][i]);
        }
      }
    }
    if constexpr (kHalves == 2) {  // lanes of columns 4..7, which are no rows, take half of the segments
      const bool upper = (threadIdx.x & 2) != 0;
#pragma unroll
      for (int s = 0; s < kOwn; ++s) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float other = __shfl_xor_sync(kAllLanes, state.acc[kOwn + s][i], 2);
          if (upper) state.acc[s][i] = other;
        }
      }
    }
    if (rotates) combine_rows();
#pragma unroll 1
    for (int k = 0; k < 3; ++k) {
      const int bit = kOpens ? 16 >> k : 4 << k;
      const bool upper = (threadIdx.x & bit) != 0;
#pragma unroll
      for (int s = 0; s < kOwn; ++s) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float &low = state.acc[s][h], &high = state.acc[s][2 + h];
          const float keep = upper ? high : low, other = __shfl_xor_sync(kAllLanes, upper ? low : high, bit);
          low = upper ? other : keep, high = upper ? keep : other;
        }
      }
      if (rotates) combine_rows();
    }
    const float norm = rotates ? Fold::kRotationNorm : 1.f;
#pragma unroll
    for (int s = 0; s < kOwn; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        state.acc[s][i] *= norm;
        if constexpr (kHalves == 2) state.acc[kOwn + s][i] = __shfl_xor_sync(kAllLanes, state.acc[s][i], 2);
      }
    }
  }
  __device__ __forceinline__ void TakeCodes() {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    __syncwarp();
    const uint4* const words = reinterpret_cast<const uint4*>(scratch + (g % kRows * 4 + t) * kSegments);
#pragma unroll
    for (int i = 0; i < kSegments / 4; ++i) {
      const uint4 four = words[i];
      folded[4 * i] = four.x, folded[4 * i + 1] = four.y, folded[4 * i + 2] = four.z, folded[4 * i + 3] = four.w;
    }
  }

  /// Integer scores as floats + kMagic, of tile i times 1 / KeyScale(i): rows g and g + 8 are tokens 16 i + 2g and + 1.
  __device__ __forceinline__ void IntegerScores(const uint8_t* record, float (&scores)[4][4]) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int c[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) c[i][j] = kMagicBits;
    }
#pragma unroll
    for (int s = 0; s < kSegments; s += 2) {
      uint32_t first[4][2], second[4][2];
      Codes<kKBits>::UnpackKeys(record + s * 128 * kKBits, g, t, first);
      Codes<kKBits>::UnpackKeys(record + (s + 1) * 128 * kKBits, g, t, second);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        MultiplyBytes<IntegerProduct::kUnsignedSigned>(c[i], first[i], second[i], folded[s], folded[s + 1], c[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[i][j] = AsFloat(c[i][j]);
    }
  }

  // Where K's codes stood, once scores are known: V's metadata, and tokens' norms, as floats.
  static constexpr int kStagedNorms = Fold::kStagedBytes;
  static_assert(kStagedNorms + 4 * kTokens <= kVCodes);
  __device__ __forceinline__ void Stage(const AttendParams& params, uint8_t* record) const {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // K's codes were read
    this->StageMeta(record + kVSteps, record + kVMinima, record);
    // Without norms it is what was there before the record.
    const uint32_t two = *reinterpret_cast<const uint16_t*>(record + kVNorms + 2 * lane);
    const uint32_t norms = params.v_norms ? two : 0x0101;
    *reinterpret_cast<float2*>(record + kStagedNorms + 8 * lane) =
        make_float2(bytes.Unsigned(norms, 0), bytes.Unsigned(norms, 1));
    __syncwarp();
  }

  /// The largest of this lane's scores of row 2t + h.
  __device__ __forceinline__ float TopOfLane(const float (&p)[4][4], int h) const {
    float top;
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
      // Integers: tiles that are scaled up have multiples of their factor.
      float here = fmaxf(p[i][h], p[i][2 + h]), next = fmaxf(p[i + 1][h], p[i + 1][2 + h]);
      if constexpr (kKBits != 2) {
        here = (fmaxf(here, next) - kMagic) * Codes<kKBits>::KeyScale(i);
      } else {
        here = fmaxf((here - kMagic) * Codes<kKBits>::KeyScale(i), (next - kMagic) * Codes<kKBits>::KeyScale(i + 1));
      }
      top = i == 0 ? here : fmaxf(top, here);
    }
    return fmaf(top, unit[h], base[h]);
  }
  /// Softmax: P times V's norms in codes, against the largest of the page.
  __device__ __forceinline__ void Probabilities(const uint8_t* record, float (&p)[4][4], WarpState<kHeadDim>& state) {
    const float2* const norms = reinterpret_cast<const float2*>(record + kStagedNorms) + threadIdx.x % 32 / 4;
    const float tops[2] = {TopOfLane(p, 0), TopOfLane(p, 1)};
    if (__any_sync(kAllLanes, tops[0] > state.max[0] + Fold::kSlack || tops[1] > state.max[1] + Fold::kSlack)) {
      state.Raise(tops);
    }
    float largest[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float origin = base[h] - state.max[h];
      float sum;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 norm = norms[8 * i];
        const float step = unit[h] * Codes<kKBits>::KeyScale(i);
        p[i][h] = Exp2(fmaf(p[i][h] - kMagic, step, origin));
        p[i][2 + h] = Exp2(fmaf(p[i][2 + h] - kMagic, step, origin));
        sum = i == 0 ? p[i][h] + p[i][2 + h] : sum + (p[i][h] + p[i][2 + h]);
        p[i][h] *= norm.x, p[i][2 + h] *= norm.y;
        const float both = fmaxf(p[i][h], p[i][2 + h]);
        largest[h] = i == 0 ? both : fmaxf(largest[h], both);
      }
      state.sum[h] += sum;
      weight[h] = fmaxf(MaxOfColumn(largest[h]) * (1 / 255.f), kNegligible);
    }
    const float inverse[2] = {Fold::Inverse(weight[0]), Fold::Inverse(weight[1])};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t code[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) code[j] = AsBits(fmaf(p[i][j], inverse[j % 2], kMagic));
      p_codes[i] = Transpose8x8(LowBytes(code[0], code[2], code[1], code[3]));
    }
  }

  /// What an integer sum of P's codes and V's counts, and the minima, by row.
  struct OutputScale {
    float scale[2], offset[2], minimum[2];
  };
  static constexpr float kHigh = Codes<kVBits>::Scale(2);

  __device__ __forceinline__ OutputScale ScaleOf(const AttendParams& params, const uint8_t* record) const {
    const int zero[4] = {0, 0, 0, 0};
    // The sums of P's codes, in every row of a fragment.
    const uint32_t ones[2] = {0x01010101u, 0x01010101u};
    int total[4];
    MultiplyBytes<IntegerProduct::kUnsignedUnsigned>(total, ones, ones, p_codes[0], p_codes[1], zero);
    MultiplyBytes<IntegerProduct::kUnsignedUnsigned>(total, ones, ones, p_codes[2], p_codes[3], total);
    const float2 tops = Tops(record + kVTops);
    // The weight is rounded to 18 bits, so that its product with kOrigin, which has 6, is exact, and sums, which are
    // integers, lose nothing. Rounded, not cut: what many pages lose must not add up where their outputs cancel.
    constexpr float kOrigin = kMagic * (1 + kHigh);
    const float norm_unit = params.v_norms ? Fold::Tops(record + kVTops + 4).x * (1 / 255.f) : 1.f;
    const float step_unit = norm_unit * tops.x * (1 / 255.f), minimum_unit = norm_unit * tops.y * (1 / 127.f);
    OutputScale out;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      out.scale[h] = AsFloat((AsBits(weight[h] * step_unit) + 0x20) & 0xffffffc0u);
      out.offset[h] = -kOrigin * out.scale[h];
      if (kVBits == 8)
        out.offset[h] = fmaf(128.f * out.scale[h], static_cast<float>(total[h]), out.offset[h]);  // codes - 128
      out.minimum[h] = weight[h] * minimum_unit * static_cast<float>(total[h]);
    }
    return out;
  }

  __device__ __forceinline__ void AddSegment(const uint8_t* record, int s, const OutputScale& out,
                                             WarpState<kHeadDim>& state) const {
    constexpr IntegerProduct kKind = kVBits == 8 ? IntegerProduct::kSignedUnsigned : IntegerProduct::kUnsignedUnsigned;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int magic[4] = {kMagicBits, kMagicBits, kMagicBits, kMagicBits};
    uint32_t z[4][2];
    Codes<kVBits>::Unpack(record + kVCodes + s * 128 * kVBits, g, t, z);
    int a[4], b[4];
    MultiplyBytes<kKind>(a, z[0], z[1], p_codes[0], p_codes[1], magic);
    MultiplyBytes<kKind>(b, z[2], z[3], p_codes[2], p_codes[3], magic);
    const float4 meta = *reinterpret_cast<const float4*>(record + Fold::kStagedSegment * s + Fold::StagedAt(g));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float step = r == 0 ? meta.x : meta.y, least = r == 0 ? meta.z : meta.w;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float& acc = state.acc[s][2 * r + h];
        const float v = fmaf(fmaf(AsFloat(b[2 * r + h]), kHigh, AsFloat(a[2 * r + h])), out.scale[h], out.offset[h]);
        acc = fmaf(step, v, fmaf(least, out.minimum[h], acc));
      }
    }
  }
};

}  // namespace kvmanager::device
