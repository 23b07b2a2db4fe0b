// ZACK+HACK pages in the attention kernel: HACK's records and arithmetic (hack_attention_device.cuh) with a width for
// each segment of 16 channels, in a space of their own (attend_apart.cuh).
//
// Widths are the same for all pages of a head, so a warp branches on them alike; frequent ones have code of their own.
// Half of a matrix instruction's eight columns would be padding where a tile has at most 4 rows, and all work behind a
// product would be done twice. There kHalves is 2: what stands in columns 4..7 belongs to rows 0..3 too, of other
// tokens (scores: tiles 2 and 3) or of other channels (outputs: the odd segments, whose P stands in those columns
// alone). A state then has half as many registers.
//
// Segments of 8 bits, which K may have (kWide), have sums of their own: their codes fill a byte, so that no tile is
// scaled, and q has two bytes there.
#pragma once

#include <type_traits>

#include "codecs/device/attend_apart.cuh"
#include "codecs/hack/hack_attention_device.cuh"
#include "codecs/zack_hack/zack_hack_device.h"

namespace kvmanager::device {

/// kTileRowsMax: 4 where no tile has more rows, else kTileRows. kRecordBytesMax: of any head. kWide: segments of K may
/// have 8 bits.
template <int kHeadDimension, int kTileRowsMax, int kRecordBytesMax, bool kWide>
struct MixedHackPages : StepFold<kHeadDimension, kTileRowsMax> {
  using Fold = StepFold<kHeadDimension, kTileRowsMax>;
  using Fold::bytes;
  using Fold::kHeadDim;
  using Fold::kMagic;
  using Fold::kMagicBits;
  using Fold::kNegligible;
  using Fold::kRows;
  using Fold::kSegments;
  using Fold::Tops;
  using Folding = typename Fold::Folding;
  using State = WarpState<kHeadDim>;
  using Head = zack_hack::ZackHackHead;

  static constexpr bool kApart = true, kPrepares = true;
  static constexpr int kPieces = 1, kPieceBytes = kRecordBytesMax;
  // V's steps and minima as floats take the place of K, or, where that is smaller, of what a record leaves free.
  static constexpr int kStagedBytes = Fold::kStagedBytes;
  // The folded q: words [row][j][segment]; zeros, a word for each segment; with kWide the second bytes of q.
  static constexpr int kZerosAt = kRows * kHeadDim / 4, kLowAt = kWide ? kZerosAt + kSegments : 0;
  static constexpr int kScratchBytes = (kWide ? 2 : 1) * kRows * kHeadDim + 4 * kSegments;
  static constexpr int kHalves = kTileRows / kRows;
  static constexpr int kTiles = 4 / kHalves, kOwnSegments = kSegments / kHalves;  // of a lane
  static constexpr float kHigh = HalfByteCodes::Scale(2);                         // of tiles 2 and 3
  static constexpr bool kKnowsWidths = kHalves == 2 && kHeadDim == 128;
  static constexpr uint32_t kWidthMask = kWide ? 15 : 7;     // of K's widths
  static constexpr float kScoreOrigin = kWide ? 0 : kMagic;  // what is in integer scores beside their value

  uint32_t* scratch;
  uint32_t widths[2];  // of K's segments, of V's (ZackHackHead)
  uint32_t k_tops, v_tops;
  uint32_t staged;  // where steps and minima of V's channels stand as floats, once scores are known
  // Of the unit that was prepared: of the lane's rows, score = unit * integer + base.
  float unit[2], base[2];
  // Of the unit whose scores are known: P as B fragments of tiles, for each half of the columns; what a unit weighs.
  uint32_t p_codes[kHalves][4];
  float weight[2];

  static __device__ __forceinline__ const Head* HeadOf(const AttendParams& params, int kv_head) {
    return reinterpret_cast<const Head*>(static_cast<const MappedSpace*>(params.codec) + 1) + kv_head;
  }
  static __device__ __forceinline__ int Units(const AttendParams&, const AttendItem& item) { return item.pages; }
  static __device__ __forceinline__ int PageOf(const AttendParams&, const AttendItem&, int unit) { return unit; }
  static __device__ __forceinline__ void Load(const AttendParams& params, const AttendItem& item, const uint8_t* page,
                                              int, int, uint32_t to, Barrier barrier) {
    if (threadIdx.x % 32 != 0) return barrier.Arrive();
    const uint2 place = __ldg(reinterpret_cast<const uint2*>(HeadOf(params, item.kv_head)));  // offset, bytes
    barrier.ArriveExpecting(place.y);
    CopyBulk(to, page + place.x, place.y, barrier);
  }

  __device__ __forceinline__ void Begin(const AttendParams& params, const AttendItem& item, uint8_t* space) {
    const int lane = threadIdx.x % 32;
    scratch = reinterpret_cast<uint32_t*>(space);
    bytes.Init(scratch);
    if (lane < kSegments) scratch[kZerosAt + lane] = 0;
    const uint4 head = __ldg(reinterpret_cast<const uint4*>(HeadOf(params, item.kv_head)));
    // So the compiler knows that lanes agree.
    widths[0] = __reduce_or_sync(kAllLanes, head.z), widths[1] = __reduce_or_sync(kAllLanes, head.w);
    k_tops = 128 * zack_hack::SumOfWidths(widths[0]);
    v_tops = VCodes() + 128 * zack_hack::SumOfWidths(widths[1]);
    staged = VCodes() >= kStagedBytes ? 0 : kPieceBytes - kStagedBytes;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      float4 four = make_float4(0, 0, 0, 0);
      if (r < item.rows && Fold::HasChannels(lane)) {
        four = __ldcg(reinterpret_cast<const float4*>(MappedRow<kHeadDim>(params, 0, RowOf(params, item, r))) + lane);
      }
      this->q[r][0] = four.x, this->q[r][1] = four.y, this->q[r][2] = four.z, this->q[r][3] = four.w;
    }
  }

  __device__ __forceinline__ void Prepare(const AttendParams& params, const uint8_t* record) {
    Folding fold;
    Steps(record, fold);
    this->template CodeProducts<kLowAt>(params, record + k_tops, fold, scratch, unit, base);
    __syncwarp();
  }
  __device__ __forceinline__ void Scores(const AttendParams& params, uint8_t* record, State& state) {
    float scores[kTiles][4];
    IntegerScores(record, scores);
    this->StageMeta(record + v_tops + 16, record + v_tops + 16 + kHeadDim, record + staged);
    __syncwarp();
    Probabilities(params, record, scores, state);
  }
  __device__ __forceinline__ void Outputs(const AttendParams& params, const uint8_t* record, const uint8_t* next,
                                          State& state) {
    const OutputScale scale = ScaleOf(params, record);
    Folding fold;
    Steps(next, fold);
    AddOutputs(record, scale, state);
    this->template CodeProducts<kLowAt>(params, next + k_tops, fold, scratch, unit, base);
    FenceForCopies();  // of what was staged
    __syncwarp();
  }

  template <bool kAdd>
  static __device__ __forceinline__ void Store(const State& state, float* to) {
    const int lane = threadIdx.x % 32, g = lane / 4, row = 2 * (lane % 4) % kRows;
#pragma unroll
    for (int s = 0; s < kOwnSegments; ++s) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float2* const at =
            reinterpret_cast<float2*>(to + (row + h) * kHeadDim + 16 * (kHalves * s + (Upper() ? 1 : 0)) + 2 * g);
        float2 two = make_float2(state.acc[s][h], state.acc[s][2 + h]);
        if (kAdd) two.x += at->x, two.y += at->y;
        *at = two;
      }
    }
  }
  // In the plain order lanes of columns 4..7 have no rows here; in its own they have the same rows as columns 0..3.
  static __device__ __forceinline__ void Open(State& state, const AttendParams&) {
    if constexpr (kHalves == 1) return;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      state.max[h] = __shfl_sync(kAllLanes, state.max[h], lane & ~2);
      if (Upper()) state.sum[h] = 0;
    }
  }
  static __device__ __forceinline__ void Close(State& state, const AttendParams&) {
    if constexpr (kHalves == 1) return;
#pragma unroll
    for (int h = 0; h < 2; ++h) state.sum[h] += __shfl_xor_sync(kAllLanes, state.sum[h], 2);
  }

  static __device__ __forceinline__ void ClearUnused(State& state) {
#pragma unroll
    for (int s = kOwnSegments; s < kSegments; ++s) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state.acc[s][i] = 0;
    }
  }

 private:
  /// Whether this lane's columns are of the second half.
  static __device__ __forceinline__ bool Upper() { return kHalves == 2 && (threadIdx.x & 2) != 0; }
  __device__ __forceinline__ uint32_t VCodes() const { return k_tops + 16 + 2 * kHeadDim; }

  __device__ __forceinline__ void Steps(const uint8_t* record, Folding& fold) const {
    const uint8_t* const tops = record + k_tops;
    this->MultiplySteps(tops, tops + 16, tops + 16 + kHeadDim, fold);
  }

  static __device__ __forceinline__ void Clear(uint32_t (&z)[4][2]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) z[i][0] = z[i][1] = 0;
  }
  template <int kWidth>
  static __device__ __forceinline__ void UnpackWidth(const uint8_t* codes, uint32_t (&z)[4][2]) {
    const int lane = threadIdx.x % 32;
    if constexpr (kWidth > 0) {
      Codes<kWidth>::Unpack(codes, lane / 4, lane % 4, z);
    } else {
      Clear(z);
    }
  }
  static __device__ __forceinline__ void Unpack(uint32_t width, const uint8_t* codes, uint32_t (&z)[4][2]) {
    if (width & 4) {
      UnpackWidth<4>(codes, z);
    } else if (width & 2) {
      width & 1 ? UnpackWidth<3>(codes, z) : UnpackWidth<2>(codes, z);
    } else if (width & 1) {
      UnpackWidth<1>(codes, z);
    } else {
      Clear(z);
    }
  }
  /// Of widths that are known: of segment s, and of those before it together.
  template <uint32_t kWidths>
  static constexpr int kWidthOf(int s) {
    return kWidths >> 4 * s & 7;
  }
  template <uint32_t kWidths>
  static constexpr int kBefore(int s) {
    return zack_hack::SumOfWidths(kWidths & ((1u << 4 * s) - 1));
  }
  /// body(integral constants 0 .. kCount - 1)
  template <int kCount, class Body, int kAt = 0>
  static __device__ __forceinline__ void Unroll(Body body) {
    if constexpr (kAt < kCount) {
      body(std::integral_constant<int, kAt>());
      Unroll<kCount, Body, kAt + 1>(body);
    }
  }

  /// Scores in units, + kScoreOrigin, times 1 / kHigh for tiles 2 and 3: tile i's rows g and g + 8 are tokens 16 i + 2g
  /// and + 1. Lanes of the upper half have tiles 2 and 3, the others 0 and 1: the other half of q is zero.
  __device__ __forceinline__ void IntegerScores(const uint8_t* record, float (&scores)[kTiles][4]) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint2* const words = reinterpret_cast<const uint2*>(scratch + (g % kRows * 4 + t) * kSegments);
    const uint2* const zeros = reinterpret_cast<const uint2*>(scratch + kZerosAt);
    const uint2* const low_q = kHalves == 2 && g >= kRows ? zeros : words;
    const uint2* const high_q = kHalves == 2 && g < kRows ? zeros : words;
    int c[kTiles][4];
    // Segments 2 s and 2 s + 1.
    const auto multiply = [&](int s, bool begins, const uint32_t(&first)[4][2], const uint32_t(&second)[4][2]) {
      const uint2 low = low_q[s], high = kHalves == 2 ? high_q[s] : low;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (begins && i < kTiles) c[i][0] = c[i][1] = c[i][2] = c[i][3] = kMagicBits;
        const uint2 q = i < 2 ? low : high;
        MultiplyBytes<IntegerProduct::kUnsignedSigned>(c[i % kTiles], first[i], second[i], q.x, q.y, c[i % kTiles]);
      }
    };
    const auto known = [&](auto of) {
      constexpr uint32_t kWidths = decltype(of)::value;
      Unroll<kSegments / 2>([&](auto s) {
        constexpr int kLow = kWidthOf<kWidths>(2 * s), kSecond = kWidthOf<kWidths>(2 * s + 1);
        if constexpr (kLow != 0 || kSecond != 0) {
          uint32_t first[4][2], second[4][2];
          UnpackWidth<kLow>(record + 128 * kBefore<kWidths>(2 * s), first);
          UnpackWidth<kSecond>(record + 128 * kBefore<kWidths>(2 * s + 1), second);
          multiply(s, s == 0, first, second);
        }
      });
    };
    const auto any = [&]() {
      const uint8_t* codes = record;
#pragma unroll
      for (int s = 0; s < kSegments / 2; ++s) {
        const uint32_t pair = widths[0] >> 8 * s;
        if (s > 0 && (pair & 0x77) == 0) {
          if constexpr (kWide) codes += 128 * ((pair & kWidthMask) + (pair >> 4 & kWidthMask));
          continue;
        }
        uint32_t first[4][2], second[4][2];
        Unpack(pair & 7, codes, first);
        codes += 128 * (pair & kWidthMask);
        Unpack(pair >> 4 & 7, codes, second);
        codes += 128 * (pair >> 4 & kWidthMask);
        multiply(s, s == 0, first, second);
      }
    };
    if constexpr (kKnowsWidths) {
#define KVMANAGER_CASE(of)                                   \
  case of:                                                   \
    known(std::integral_constant<uint32_t, uint32_t{of}>()); \
    break;
      switch (widths[0]) {
        KVMANAGER_ZACK_HACK_KEYS(KVMANAGER_CASE)
        default:
          any();
      }
    } else {
      any();
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) scores[i][j] = kWide ? AsFloat(c[i][j]) - kMagic : AsFloat(c[i][j]);
    }
    if constexpr (kWide) {
      if ((widths[0] & 0x88888888u) != 0) AddWideScores(record, scores);
    }
    __syncwarp();  // q may be overwritten now
  }

  /// Adds those of segments of 8 bits. Each of their sums is below 2^22, even of all channels: kHeadDim * 255 * 127.
  __device__ __forceinline__ void AddWideScores(const uint8_t* record, float (&scores)[kTiles][4]) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const uint32_t* const first_bytes = scratch + (g % kRows * 4 + t) * kSegments;
    const uint32_t none[2] = {0, 0};
    int high[kTiles][4], low[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) high[i][j] = low[i][j] = kMagicBits;
    }
#pragma unroll 1
    for (int s = 0; s < kSegments; ++s) {
      const uint32_t width = widths[0] >> 4 * s & kWidthMask;
      if (width == 8) {
        uint32_t z[4][2];
        Codes<8>::Unpack(record, g, t, z);
        const uint32_t a = first_bytes[s], b = first_bytes[kLowAt + s];
        if constexpr (kHalves == 2) {  // tiles 2 and 3 are what the upper columns' q multiplies
          const bool upper = g >= kRows;
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            MultiplyBytes<IntegerProduct::kUnsignedSigned>(high[i], z[i], z[2 + i], upper ? 0 : a, upper ? a : 0,
                                                           high[i]);
            MultiplyBytes<IntegerProduct::kUnsignedSigned>(low[i], z[i], z[2 + i], upper ? 0 : b, upper ? b : 0,
                                                           low[i]);
          }
        } else {
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            MultiplyBytes<IntegerProduct::kUnsignedSigned>(high[i], z[i], none, a, 0, high[i]);
            MultiplyBytes<IntegerProduct::kUnsignedSigned>(low[i], z[i], none, b, 0, low[i]);
          }
        }
      }
      record += 128 * width;
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const float times = kHalves == 2 ? (Upper() ? 1 / kHigh : 1.f) : 1 / HalfByteCodes::Scale(i);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float wide = fmaf(AsFloat(low[i][j]) - kMagic, 1 / Fold::kLowLevels, AsFloat(high[i][j]) - kMagic);
        scores[i][j] = fmaf(wide, times, scores[i][j]);
      }
    }
  }

  /// The largest of the lane's rows, over all lanes that have them.
  static __device__ __forceinline__ float MaxOfRows(float x) {
    if constexpr (kHalves == 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
    return MaxOfColumn(x);
  }
  /// Maxima become the largest of rows, where that is more.
  static __device__ __forceinline__ void Raise(const float (&tops)[2], State& state) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float next = fmaxf(state.max[h], MaxOfRows(tops[h])), factor = Exp2(state.max[h] - next);
      state.max[h] = next, state.sum[h] *= factor;
#pragma unroll
      for (int s = 0; s < kOwnSegments; ++s) state.acc[s][h] *= factor, state.acc[s][2 + h] *= factor;
    }
  }
  /// Softmax: P times V's norms in codes, against the largest of the page.
  __device__ __forceinline__ void Probabilities(const AttendParams& params, const uint8_t* record,
                                                float (&p)[kTiles][4], State& state) {
    // Of tile i of this lane.
    const auto scale_of = [](int i) { return kHalves == 2 ? (Upper() ? kHigh : 1.f) : HalfByteCodes::Scale(i); };
    // Norms of this lane's tokens.
    const uint8_t* const norms_at =
        record + v_tops + 16 + 2 * kHeadDim + (Upper() ? 32 : 0) + 2 * (threadIdx.x % 32 / 4);
    float norms[kTiles][2];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const uint32_t stored = *reinterpret_cast<const uint16_t*>(norms_at + 16 * i);
      const uint32_t two = params.v_norms ? stored : 0x0101;
      norms[i][0] = bytes.Unsigned(two, 0), norms[i][1] = bytes.Unsigned(two, 1);
    }
    float tops[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // An integer: tiles that are scaled up have multiples of their factor.
      float top = fmaxf(fmaxf(p[0][h], p[0][2 + h]), fmaxf(p[1][h], p[1][2 + h]));
      top = (top - kScoreOrigin) * scale_of(0);
      if constexpr (kHalves == 1) {
        const float other =
            fmaxf(fmaxf(p[2 % kTiles][h], p[2 % kTiles][2 + h]), fmaxf(p[3 % kTiles][h], p[3 % kTiles][2 + h]));
        top = fmaxf(top, (other - kScoreOrigin) * kHigh);
      }
      tops[h] = fmaf(top, unit[h], base[h]);
    }
    if (__any_sync(kAllLanes, tops[0] > state.max[0] + Fold::kSlack || tops[1] > state.max[1] + Fold::kSlack)) {
      Raise(tops, state);
    }
    float largest[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float origin = base[h] - state.max[h];
      float sum;
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        const float step = unit[h] * scale_of(i);
        p[i][h] = Exp2(fmaf(p[i][h] - kScoreOrigin, step, origin));
        p[i][2 + h] = Exp2(fmaf(p[i][2 + h] - kScoreOrigin, step, origin));
        sum = i == 0 ? p[i][h] + p[i][2 + h] : sum + (p[i][h] + p[i][2 + h]);
        p[i][h] *= norms[i][0], p[i][2 + h] *= norms[i][1];
        const float both = fmaxf(p[i][h], p[i][2 + h]);
        largest[h] = i == 0 ? both : fmaxf(largest[h], both);
      }
      state.sum[h] += sum;
      weight[h] = fmaxf(MaxOfRows(largest[h]) * (1 / 255.f), kNegligible);
    }
    const float inverse[2] = {Fold::Inverse(weight[0]), Fold::Inverse(weight[1])};
    uint32_t words[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      uint32_t code[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) code[j] = AsBits(fmaf(p[i][j], inverse[j % 2], kMagic));
      words[i] = Transpose8x8(LowBytes(code[0], code[2], code[1], code[3]));
    }
    if constexpr (kHalves == 2) {
      const bool upper = threadIdx.x % 32 >= 16;  // a B fragment's columns are lane / 4
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t other = __shfl_xor_sync(kAllLanes, words[i], 16);
        p_codes[0][i] = upper ? 0 : words[i], p_codes[0][2 + i] = upper ? 0 : other;
        p_codes[1][i] = upper ? other : 0, p_codes[1][2 + i] = upper ? words[i] : 0;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) p_codes[0][i] = words[i % kTiles];
    }
  }

  /// What an integer sum of P's codes and V's counts, and the minima, by row.
  struct OutputScale {
    float scale[2], offset[2], minimum[2];
  };
  __device__ __forceinline__ OutputScale ScaleOf(const AttendParams& params, const uint8_t* record) const {
    int total[4] = {0, 0, 0, 0};
    // The sums of P's codes, in every row of a fragment.
    const uint32_t ones[2] = {0x01010101u, 0x01010101u};
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        MultiplyBytes<IntegerProduct::kUnsignedUnsigned>(total, ones, ones, p_codes[half][i], p_codes[half][i + 1],
                                                         total);
      }
    }
    const float2 tops = Tops(record + v_tops);
    // The weight is rounded to 18 bits, so that its product with kOrigin, which has 6, is exact, and sums, which are
    // integers, lose nothing. Rounded, not cut: what many pages lose must not add up where their outputs cancel.
    constexpr float kOrigin = kMagic * (1 + kHigh);
    const float norm_unit = params.v_norms ? Tops(record + v_tops + 4).x * (1 / 255.f) : 1.f;
    const float step_unit = norm_unit * tops.x * (1 / 255.f), minimum_unit = norm_unit * tops.y * (1 / 127.f);
    OutputScale out;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      out.scale[h] = AsFloat((AsBits(weight[h] * step_unit) + 0x20) & 0xffffffc0u);
      out.offset[h] = -kOrigin * out.scale[h];
      out.minimum[h] = weight[h] * minimum_unit * static_cast<float>(total[h]);
    }
    return out;
  }

  /// Sums of products of V's codes of two segments and P's: with two halves a lane has one of them, else both.
  static constexpr int kOwn = 2 / kHalves;
  struct PairSums {
    int low[kOwn][4], high[kOwn][4];  // of tiles 0 and 1, 2 and 3

    __device__ __forceinline__ void Begin(int own) {
#pragma unroll
      for (int i = 0; i < 4; ++i) low[own][i] = high[own][i] = kMagicBits;
    }
    __device__ __forceinline__ void Add(int own, const uint32_t (&z)[4][2], const uint32_t (&p)[4]) {
      MultiplyBytes<IntegerProduct::kUnsignedUnsigned>(low[own], z[0], z[1], p[0], p[1], low[own]);
      MultiplyBytes<IntegerProduct::kUnsignedUnsigned>(high[own], z[2], z[3], p[2], p[3], high[own]);
    }
  };
  /// Steps and minima of the lane's channels 2 g and 2 g + 1, of its own segments of pair p.
  struct PairMeta {
    float4 own[kOwn];
  };
  __device__ __forceinline__ PairMeta MetaOf(const uint8_t* meta, int p) const {
    PairMeta out;
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      out.own[own] = *reinterpret_cast<const float4*>(meta + Fold::kStagedSegment * (2 * p + own));
    }
    return out;
  }
  /// What the minima of segments 2 p and 2 p + 1 give.
  __device__ __forceinline__ void AddMinima(const PairMeta& meta, int p, const OutputScale& out, State& state) const {
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      float(&acc)[4] = state.acc[kOwn * p + own];
      const float least[2] = {meta.own[own].z, meta.own[own].w};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) acc[2 * r + h] = fmaf(least[r], out.minimum[h], acc[2 * r + h]);
      }
    }
  }
  __device__ __forceinline__ void AddSums(const PairMeta& meta, int p, const PairSums& sums, const OutputScale& out,
                                          State& state) const {
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      float(&acc)[4] = state.acc[kOwn * p + own];
      const float step[2] = {meta.own[own].x, meta.own[own].y};
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float sum = fmaf(AsFloat(sums.high[own][2 * r + h]), kHigh, AsFloat(sums.low[own][2 * r + h]));
          acc[2 * r + h] = fmaf(step[r], fmaf(sum, out.scale[h], out.offset[h]), acc[2 * r + h]);
        }
      }
    }
  }
  __device__ __forceinline__ void AddOutputs(const uint8_t* record, const OutputScale& out, State& state) const {
    // Of the lane's own segment of a pair, and its channels 2 g and 2 g + 1.
    const uint8_t* const meta_at =
        record + staged + (Upper() ? Fold::kStagedSegment : 0) + Fold::StagedAt(threadIdx.x % 32 / 4);
    const auto known = [&](auto of) {
      constexpr uint32_t kWidths = decltype(of)::value;
      const uint8_t* const codes = record + VCodes();
      Unroll<kSegments / 2>([&](auto p) {
        constexpr int kFirst = kWidthOf<kWidths>(2 * p), kSecond = kWidthOf<kWidths>(2 * p + 1);
        const PairMeta meta = MetaOf(meta_at, p);
        AddMinima(meta, p, out, state);
        if constexpr (kFirst != 0 || kSecond != 0) {
          PairSums sums;
          uint32_t z[4][2];
          sums.Begin(0);
          if constexpr (kFirst != 0) {
            UnpackWidth<kFirst>(codes + 128 * kBefore<kWidths>(2 * p), z);
            sums.Add(0, z, p_codes[0]);
          }
          if constexpr (kSecond != 0) {
            UnpackWidth<kSecond>(codes + 128 * kBefore<kWidths>(2 * p + 1), z);
            sums.Add(0, z, p_codes[kHalves - 1]);
          }
          AddSums(meta, p, sums, out, state);
        }
      });
    };
    const auto any = [&]() {
      const uint8_t* codes = record + VCodes();
#pragma unroll
      for (int p = 0; p < kSegments / 2; ++p) {
        const uint32_t pair = widths[1] >> 8 * p;
        const PairMeta meta = MetaOf(meta_at, p);
        AddMinima(meta, p, out, state);
        if ((pair & 0x77) == 0) continue;
        PairSums sums;
        uint32_t z[4][2];
        Unpack(pair & 7, codes, z);
        codes += 128 * (pair & 7);
        sums.Begin(0);
        sums.Add(0, z, p_codes[0]);
        if (kHalves == 1) sums.Begin(kOwn - 1);
        if (kHalves == 1 || (pair & 0x70) != 0) {
          Unpack(pair >> 4 & 7, codes, z);
          codes += 128 * (pair >> 4 & 7);
          sums.Add(kOwn - 1, z, p_codes[kHalves - 1]);
        }
        AddSums(meta, p, sums, out, state);
      }
    };
    if constexpr (kKnowsWidths) {
      switch (widths[1]) {
        KVMANAGER_ZACK_HACK_VALUES(KVMANAGER_CASE)
#undef KVMANAGER_CASE
        default:
          any();
      }
    } else {
      any();
    }
  }
};

}  // namespace kvmanager::device
