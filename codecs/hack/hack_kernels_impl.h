// The body of hack_kernels.cc, included once per instruction set inside namespace kvmanager::hack, hence no include
// guard. Vectors of 16 lanes in GCC's vector extension: the compiler lowers them to what the enclosing #pragma GCC
// target allows. A lane does the scalar operations of hack_reference.cc in the same order, so that all instruction sets
// agree bit by bit.

namespace KV_KERNEL_ISA {

constexpr int kLanes = KV_KERNEL_LANES;  // divides kSegmentChannels: the lanes of a vector share a width
constexpr int kPlaneWords = 64;          // of a segment and strip at 2 bits; half as many at 1 bit
constexpr int kVectorBytes = 4 * kLanes;
typedef float F __attribute__((vector_size(4 * kLanes)));
typedef int32_t I __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U __attribute__((vector_size(4 * kLanes)));
typedef uint16_t H __attribute__((vector_size(2 * kLanes)));
typedef uint8_t B __attribute__((vector_size(kLanes)));

template <typename V>
KV_KERNEL_INLINE V Load(const void* from) {
  V v;
  std::memcpy(&v, from, sizeof(V));
  return v;
}
template <typename V>
KV_KERNEL_INLINE void Store(void* to, V v) {
  std::memcpy(to, &v, sizeof(V));
}
KV_KERNEL_INLINE F Set(float f) { return F{} + f; }
KV_KERNEL_INLINE I LaneNumbers() {
  I lanes = {};
  for (int i = 0; i < kLanes; ++i) lanes[i] = i;
  return lanes;
}
KV_KERNEL_INLINE F Abs(F f) { return (F)((U)f & 0x7fffffffu); }
/// -1 in lanes that are not finite or beyond `bound`.
KV_KERNEL_INLINE I Beyond(F f, float bound) { return ~(I)(Abs(f) <= Set(bound)); }
KV_KERNEL_INLINE bool Any(I mask) {
#if KV_KERNEL_AVX512
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif KV_KERNEL_F16C
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= mask[i];
  return any != 0;
#endif
}
KV_KERNEL_INLINE float MaxLane(F f) {
  for (int half = kLanes / 2; half > 0; half /= 2) {
    const F other = __builtin_shuffle(f, LaneNumbers() ^ half);
    f = f > other ? f : other;
  }
  return f[0];
}
/// Round to nearest even of |f| < 2^22: the addition rounds.
KV_KERNEL_INLINE F Round(F f) {
  const F magic = Set(0x1.8p23f);
  return (f + magic) - magic;
}

KV_KERNEL_INLINE F FromHalf(H h) {
#if KV_KERNEL_AVX512
  return (F)_mm512_cvtph_ps((__m256i)h);
#elif KV_KERNEL_F16C
  return (F)_mm256_cvtph_ps((__m128i)h);
#else
  const U bits = __builtin_convertvector(h, U);
  const F magnitude = (F)((bits & 0x7fffu) << 13) * 0x1p112f;  // exact, subnormals included
  return (F)((U)magnitude | (bits & 0x8000u) << 16);
#endif
}

KV_KERNEL_INLINE H ToHalf(F f) {
#if KV_KERNEL_AVX512
  return (H)_mm512_cvtps_ph((__m512)f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif KV_KERNEL_F16C
  return (H)_mm256_cvtps_ph((__m256)f, _MM_FROUND_TO_NEAREST_INT);
#else
  H h;
  for (int i = 0; i < kLanes; ++i) h[i] = FloatToHalf(f[i]);
  return h;
#endif
}

KV_KERNEL_INLINE F LoadRaw(const uint8_t* from, DType dtype) {
  const H bits = Load<H>(from);
  return dtype == DType::kFloat16 ? FromHalf(bits) : (F)(__builtin_convertvector(bits, U) << 16);
}

KV_KERNEL_INLINE void StoreRaw(uint8_t* to, DType dtype, F f) {
  const float largest = dtype == DType::kFloat16 ? 65504.0f : 0x1.fep127f;
  f = f < Set(largest) ? f : Set(largest);
  f = f > Set(-largest) ? f : Set(-largest);
  if (dtype == DType::kFloat16) return Store(to, ToHalf(f));
  const U bits = (U)f;
  Store(to, __builtin_convertvector((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16, H));
}

/// Sums and differences of lanes kHalf apart, then 2 kHalf, ... of n vectors.
template <int kHalf, int n>
KV_KERNEL_INLINE void ButterflyLanes(F (&v)[n]) {
  if constexpr (kHalf < kLanes) {
    const I from = LaneNumbers() ^ kHalf;
    const U minus = (U)((LaneNumbers() & kHalf) != 0) & 0x80000000u;
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) v[i] = __builtin_shuffle(v[i], from) + (F)((U)v[i] ^ minus);
    ButterflyLanes<2 * kHalf>(v);
  }
}

/// Likewise of vectors kHalf apart.
template <int kHalf, int n>
KV_KERNEL_INLINE void ButterflyVectors(F (&v)[n]) {
  if constexpr (kHalf < n) {
#pragma GCC unroll 16
    for (int i = 0; i < n; ++i) {
      if (i & kHalf) continue;
      const F a = v[i], b = v[i + kHalf];
      v[i] = a + b;
      v[i + kHalf] = a - b;
    }
    ButterflyVectors<2 * kHalf>(v);
  }
}

/// Transforms `n` vectors, without the norm.
template <int n>
static void HadamardVectors(float* row) {
  F v[n];
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) v[i] = Load<F>(row + i * kLanes);
  ButterflyLanes<1>(v);
  ButterflyVectors<1>(v);
#pragma GCC unroll 16
  for (int i = 0; i < n; ++i) Store(row + i * kLanes, v[i]);
}

static void HadamardRow(float* row, int n) {
  // In pieces that fit the registers, then across them.
  constexpr int kPiece = 8;
  int done = kPiece * kLanes;
  if (n >= done) {
    for (int i = 0; i < n; i += done) HadamardVectors<kPiece>(row + i);
  } else {
    done = n;
    if (n == 4 * kLanes) HadamardVectors<4>(row);
    if (n == 2 * kLanes) HadamardVectors<2>(row);
    if (n == kLanes) HadamardVectors<1>(row);
  }
  for (int half = done; half < n; half *= 2) {
    for (int first = 0; first < n; first += 2 * half) {
      for (int i = first; i < first + half; i += kLanes) {
        const F a = Load<F>(row + i), b = Load<F>(row + i + half);
        Store(row + i, a + b);
        Store(row + i + half, a - b);
      }
    }
  }
  const F norm = Set(float(1.0 / __builtin_sqrt(double(n))));
  for (int i = 0; i < n; i += kLanes) Store(row + i, Load<F>(row + i) * norm);
}

/// Fills ws.x, and ws.norms where they are stored. false: a value is not finite.
static bool Convert(const Side& side, const uint8_t* raw, Workspace& ws) {
  I bad = {};
  for (int t = 0; t < side.tokens; ++t) {
    const uint8_t* from = raw + size_t(t) * side.channels * 2;
    float* row = side.along_tokens ? ws.x + size_t(t) * side.channels : ws.rotated;
    for (int c = 0; c < side.channels; c += kLanes) {
      const F f = LoadRaw(from + 2 * c, side.dtype) + 0.0f;
      bad |= Beyond(f, FLT_MAX);
      Store(row + c, f);
    }
    if (side.rotate) {
      HadamardRow(row, side.channels);
      for (int c = 0; c < side.channels; c += kLanes) bad |= Beyond(Load<F>(row + c), FLT_MAX);
    }
    if (side.norms) {
      F largest = {};
      for (int c = 0; c < side.channels; c += kLanes) {
        const F magnitude = Abs(Load<F>(row + c));
        largest = magnitude > largest ? magnitude : largest;
      }
      ws.norms[t] = MaxLane(largest);
    }
    if (!side.along_tokens) {
      for (int c = 0; c < side.channels; ++c) ws.x[size_t(c) * side.tokens + t] = row[c];
    }
  }
  return !Any(bad);
}

/// Stores the norms, and divides the rows of ws.x by them. false: the largest does not fit fp16.
static bool FactorNorms(const Side& side, uint8_t* record, Workspace& ws) {
  F largest = {};
  for (int t = 0; t < side.tokens; t += kLanes) {
    const F norm = Load<F>(ws.norms + t);
    largest = norm > largest ? norm : largest;
  }
  const uint16_t top_bits = RoundUpToHalf(MaxLane(largest));
  const float top = HalfToFloat(top_bits);
  if (!(top <= 65504.0f)) return false;
  std::memcpy(record + side.layout->norm_top, &top_bits, 2);
  for (int t = 0; t < side.tokens; t += kLanes) {
    F u8 = {};
    if (top > 0) {
      const F exact = Load<F>(ws.norms + t) * 255.0f / top, nearest = Round(exact);
      u8 = nearest < exact ? nearest + 1.0f : nearest;
      u8 = u8 > Set(1) ? u8 : Set(1);
      u8 = u8 < Set(255) ? u8 : Set(255);
    }
    Store(record + side.layout->norms + t, __builtin_convertvector(__builtin_convertvector(u8, I), B));
    const F norm = top * u8 / 255.0f;
    Store(ws.norms + t, norm > Set(kNegligible) ? 1.0f / norm : Set(0));
  }
  for (int t = 0; t < side.tokens; ++t) {
    float* row = ws.x + size_t(t) * side.channels;
    const F inverse = Set(ws.norms[t]);
    for (int c = 0; c < side.channels; c += kLanes) Store(row + c, Load<F>(row + c) * inverse + 0.0f);
  }
  return true;
}

/// Least and largest element of every partition and entry (the mean too, where the width is 0).
static void FindBounds(const Side& side, Workspace& ws) {
  const int entries = side.entries(), partition = side.layout->partition;
  for (int p = 0; p < side.layout->partitions; ++p) {
    for (int e = 0; e < entries; e += kLanes) {
      const float* x = ws.x + size_t(p) * partition * entries + e;
      F lo[2], hi[2];
      for (int k = 0; k < 2; ++k) lo[k] = hi[k] = Load<F>(x + size_t(k) * entries);
      for (int i = 2; i < partition; i += 2) {
        for (int k = 0; k < 2; ++k) {
          const F v = Load<F>(x + size_t(i + k) * entries);
          lo[k] = v < lo[k] ? v : lo[k];
          hi[k] = v > hi[k] ? v : hi[k];
        }
      }
      const size_t m = size_t(p) * entries + e;
      Store(ws.lo + m, lo[1] < lo[0] ? lo[1] : lo[0]);
      Store(ws.hi + m, hi[1] > hi[0] ? hi[1] : hi[0]);
      if (side.width(p, e) == 0) {
        F sum = {};
        for (int i = 0; i < partition; ++i) sum += Load<F>(x + size_t(i) * entries);
        Store(ws.mean + m, sum / float(partition));
      }
    }
  }
}

/// fp16 minimum and step of the bounds `lo`, `hi` (lo: the mean, where the width is 0); lanes that do not fit are set
/// in `bad`.
KV_KERNEL_INLINE void RoundBounds(int width, F lo, F hi, H* minimum_bits, F* minimum, F* step, I* bad) {
  *minimum_bits = ToHalf(lo);
  *minimum = FromHalf(*minimum_bits);
  *bad |= Beyond(*minimum, 65504.0f);
  *step = F{};
  if (width == 0) return;
  F wanted = hi - *minimum;
  if (width > 1) wanted = wanted / float((1 << width) - 1);
  const F rounded = FromHalf(ToHalf(wanted));
  *bad |= Beyond(rounded, 65504.0f);
  *step = rounded > Set(0) ? rounded : Set(0);
}

/// 8-bit step and minimum as fractions of the tops, and what they stand for.
KV_KERNEL_INLINE void RoundToTops(int width, const float tops[2], F* u8, F* s8, F* step, F* minimum) {
  *u8 = *s8 = F{};
  if (tops[0] > 0) *u8 = Round(*step * 255.0f / tops[0]);
  *u8 = width == 0 ? F{} : *u8 > Set(1) ? *u8 : Set(1);
  if (tops[1] > 0) *s8 = Round(*minimum * 127.0f / tops[1]);
  *step = tops[0] * *u8 / 255.0f;
  *minimum = tops[1] * *s8 / 127.0f;
}

/// Partitions [first, end) share a pair of tops: rounds the bounds in ws to metadata. false: something does not fit
/// fp16.
static bool MakeMeta(const Side& side, int first, int end, Workspace& ws, float tops[2]) {
  const int entries = side.entries();
  I bad = {};
  F top_step = {}, top_minimum = {};
  for (int p = first; p < end; ++p) {
    for (int e = 0; e < entries; e += kLanes) {
      const size_t m = size_t(p) * entries + e;
      const int width = side.width(p, e);
      H minimum_bits;
      F step, minimum;
      RoundBounds(width, Load<F>((width == 0 ? ws.mean : ws.lo) + m), Load<F>(ws.hi + m), &minimum_bits, &minimum,
                  &step, &bad);
      Store(ws.step + m, step);
      Store(ws.minimum + m, minimum);
      if (!side.meta8) {
        Store(ws.stored_step + m, ToHalf(step));
        Store(ws.stored_minimum + m, minimum_bits);
      }
      const F magnitude = Abs(minimum);
      top_step = step > top_step ? step : top_step;
      top_minimum = magnitude > top_minimum ? magnitude : top_minimum;
    }
  }
  if (Any(bad)) return false;
  tops[0] = MaxLane(top_step), tops[1] = MaxLane(top_minimum);
  if (!side.meta8) return true;
  for (int p = first; p < end; ++p) {
    for (int e = 0; e < entries; e += kLanes) {
      const size_t m = size_t(p) * entries + e;
      F u8, s8, step = Load<F>(ws.step + m), minimum = Load<F>(ws.minimum + m);
      RoundToTops(side.width(p, e), tops, &u8, &s8, &step, &minimum);
      Store(ws.stored_step + m, __builtin_convertvector(__builtin_convertvector(u8, I), H));
      Store(ws.stored_minimum + m, __builtin_convertvector(__builtin_convertvector(s8, I), H));
      Store(ws.step + m, step);
      Store(ws.minimum + m, minimum);
    }
  }
  return true;
}

KV_KERNEL_INLINE F Inverse(F step) { return step > Set(0) ? 1.0f / step : Set(0); }
KV_KERNEL_INLINE F Level(F x, F inverse, F minimum, F levels) {
  F level = (x - minimum) * inverse;
  level = level > Set(0) ? level : Set(0);
  return levels < level ? levels : level;
}

/// Vectors of entries that are fitted together: as many chains of additions as the registers hold.
constexpr int kFitVectors = kLanes == 16 ? 4 : 2;
/// Elements between two looks at whether any lane may still beat its best.
constexpr int kFitBlock = 16;

/// Where a vector of entries is.
struct FitPlace {
  size_t m;  // in metadata
  const float* x;
  int width;
};

/// Squared errors of n vectors of entries with the fp16 metadata in ws, rounded to the tops; where less than ws.best,
/// the bounds of try k are kept. A sum of squares never falls, so that a try ends where no lane can win any more.
/// one_bit: every width is 1, whose code is whether the level is above 1/2; code * step + minimum is then one of two.
template <int n, bool one_bit>
static void KeepBetter(const Side& side, const FitPlace* places, int k, const float tops[2], Workspace& ws) {
  const int entries = side.entries(), partition = side.layout->partition;
  F step[n], minimum[n], inverse[n], levels[n], upper[n], best[n], error[n] = {};
  const float* x[n];
  for (int v = 0; v < n; ++v) {
    const size_t m = places[v].m;
    x[v] = places[v].x;
    step[v] = Load<F>(ws.step + m), minimum[v] = Load<F>(ws.minimum + m), best[v] = Load<F>(ws.best + m);
    if (side.meta8) {
      F u8, s8;
      RoundToTops(places[v].width, tops, &u8, &s8, &step[v], &minimum[v]);
    }
    inverse[v] = Inverse(step[v]);
    levels[v] = Set(float((1 << places[v].width) - 1));
    upper[v] = step[v] + minimum[v];
  }
  for (int begin = 0; begin < partition; begin += kFitBlock) {
    for (int i = begin; i < begin + kFitBlock; ++i) {
      for (int v = 0; v < n; ++v) {
        const F value = Load<F>(x[v] + size_t(i) * entries);
        F off;
        if constexpr (one_bit) {
          const F above = value - minimum[v];
          off = above * inverse[v] > Set(0.5f) ? value - upper[v] : above;
        } else {
          off = Round(Level(value, inverse[v], minimum[v], levels[v])) * step[v] + minimum[v] - value;
        }
        error[v] += off * off;
      }
    }
    I open = {};
    for (int v = 0; v < n; ++v) open |= (I)(error[v] < best[v]);
    if (!Any(open)) return;
  }
  for (int v = 0; v < n; ++v) {
    const size_t m = places[v].m;
    const I better = error[v] < best[v];
    const F mid = Load<F>(ws.mid + m), half = Load<F>(ws.half + m);
    Store(ws.best + m, better ? error[v] : best[v]);
    Store(ws.lo + m, better ? mid + half * kRangeGrid.below[k] : Load<F>(ws.lo + m));
    Store(ws.hi + m, better ? mid + half * kRangeGrid.above[k] : Load<F>(ws.hi + m));
  }
}

/// Shrinks and shifts the least-squares ranges of partitions [first, end) to the least squared error on the grid. Every
/// try moves all ranges, so that the tops are of all; errors are of those that are fitted.
static void FitRanges(const Side& side, int first, int end, Workspace& ws) {
  const int entries = side.entries();
  FitPlace places[Workspace::kMetaMax / kLanes];
  int count = 0;
  bool one_bit = true;
  for (int p = first; p < end; ++p) {
    for (int e = 0; e < entries; e += kLanes) {
      const size_t m = size_t(p) * entries + e;
      const F lo = Load<F>(ws.lo + m), hi = Load<F>(ws.hi + m);
      Store(ws.mid + m, (lo + hi) / 2.0f);
      Store(ws.half + m, (hi - lo) / 2.0f);
      if (!side.least_squares(p, e)) continue;
      Store(ws.best + m, Set(std::numeric_limits<float>::infinity()));
      places[count++] = {m, ws.x + size_t(p) * side.layout->partition * entries + e, side.width(p, e)};
      one_bit &= side.width(p, e) == 1;
    }
  }
  for (int k = 0; k < RangeGrid::kTries; ++k) {
    I bad = {};
    F top_step = {}, top_minimum = {};
    for (int p = first; p < end; ++p) {
      for (int e = 0; e < entries; e += kLanes) {
        const size_t m = size_t(p) * entries + e;
        const int width = side.width(p, e);
        const F mid = Load<F>(ws.mid + m), half = Load<F>(ws.half + m);
        const F lo = width == 0 ? Load<F>(ws.mean + m) : mid + half * kRangeGrid.below[k];
        H minimum_bits;
        F step, minimum;
        RoundBounds(width, lo, mid + half * kRangeGrid.above[k], &minimum_bits, &minimum, &step, &bad);
        Store(ws.step + m, step);
        Store(ws.minimum + m, minimum);
        const F magnitude = Abs(minimum);
        top_step = step > top_step ? step : top_step;
        top_minimum = magnitude > top_minimum ? magnitude : top_minimum;
      }
    }
    if (Any(bad)) continue;
    const float tops[2] = {MaxLane(top_step), MaxLane(top_minimum)};
    int i = 0;
    for (; i + kFitVectors <= count; i += kFitVectors) {
      one_bit ? KeepBetter<kFitVectors, true>(side, places + i, k, tops, ws)
              : KeepBetter<kFitVectors, false>(side, places + i, k, tops, ws);
    }
    for (; i < count; ++i) {
      one_bit ? KeepBetter<1, true>(side, places + i, k, tops, ws)
              : KeepBetter<1, false>(side, places + i, k, tops, ws);
    }
  }
}

/// 24 random bits per lane as [0, 1) (hack_reference.h, RoundingNoise).
KV_KERNEL_INLINE F Noise(U h) {
  h ^= h >> 16;
  h *= 0x85ebca6bu;
  h ^= h >> 13;
  h *= 0xc2b2ae35u;
  h ^= h >> 16;
  return __builtin_convertvector((I)(h >> 8), F) * 0x1p-24f;
}

/// Codes of element `i`, entries from `e` on, as 32-bit lanes.
template <bool stochastic>
KV_KERNEL_INLINE I Code(const Side& side, const Workspace& ws, int i, int e, F x, F inverse, F minimum, F levels) {
  const F level = Level(x, inverse, minimum, levels);
  if constexpr (!stochastic) return (I)(level + 0x1p23f) & 0xff;
  constexpr uint32_t kGolden = 0x9e3779b9u;
  const U seed = side.along_tokens ? ws.seeds[i] + ((U)LaneNumbers() + uint32_t(e)) * kGolden
                                   : Load<U>(ws.seeds + e) + uint32_t(i) * kGolden;
  const I code = __builtin_convertvector(level + Noise(seed), I);
  const I most = __builtin_convertvector(levels, I);
  return code < most ? code : most;
}

/// Fills ws.codes, and the sums where they are stored.
template <bool stochastic>
static void Quantize(const Side& side, Workspace& ws, uint8_t* record) {
  const int entries = side.entries(), partition = side.layout->partition;
  for (int p = 0; p < side.layout->partitions; ++p) {
    for (int e = 0; e < entries; e += kLanes) {
      const size_t m = size_t(p) * entries + e;
      const F minimum = Load<F>(ws.minimum + m), inverse = Inverse(Load<F>(ws.step + m));
      const F levels = Set(float((1 << side.width(p, e)) - 1));
      const float* x = ws.x + size_t(p) * partition * entries + e;
      if (side.along_tokens) {
        uint8_t* codes = ws.codes +
                         (size_t(e / kSegmentChannels) * side.tokens + size_t(p) * partition) * kSegmentChannels +
                         e % kSegmentChannels;
        for (int i = 0; i < partition; ++i) {
          const F v = Load<F>(x + size_t(i) * entries);
          const I code = Code<stochastic>(side, ws, p * partition + i, e, v, inverse, minimum, levels);
          Store(codes + i * kSegmentChannels, __builtin_convertvector(code, B));
        }
        continue;
      }
      I sum = {};
      for (int i = 0; i < partition; i += kSegmentChannels) {
        uint8_t block[kSegmentChannels * kLanes];  // [channel][token]
        for (int c = 0; c < kSegmentChannels; ++c) {
          const F v = Load<F>(x + size_t(i + c) * entries);
          const I code = Code<stochastic>(side, ws, p * partition + i + c, e, v, inverse, minimum, levels);
          sum += code;
          Store(block + c * kLanes, __builtin_convertvector(code, B));
        }
        uint8_t* codes = ws.codes + size_t(p * partition + i) * side.tokens + size_t(e) * kSegmentChannels;
        for (int t = 0; t < kLanes; ++t) {
          for (int c = 0; c < kSegmentChannels; ++c) codes[t * kSegmentChannels + c] = block[c * kLanes + t];
        }
      }
      if (side.layout->sums) Store(record + side.layout->sums + 2 * m, __builtin_convertvector(sum, H));
    }
  }
}

/// Bytes [16 rows][16 channels] -> words [j][r] of hack_format.h: K's lanes are 4 channels of row r, V's are rows
/// 4j..4j+3 of channel r.
KV_KERNEL_INLINE void Spread(const uint8_t* rows, bool is_v, uint32_t* words) {
  for (int j = 0; j < 4; ++j) {
    if (!is_v) {
      for (int r = 0; r < 16; ++r) std::memcpy(words + 16 * j + r, rows + 16 * r + 4 * j, 4);
      continue;
    }
    for (int r = 0; r < 16; r += kLanes) {
      U word = {};
      for (int lane = 0; lane < 4; ++lane) {
        word |= __builtin_convertvector(Load<B>(rows + (4 * j + lane) * 16 + r), U) << (8 * lane);
      }
      Store(words + 16 * j + r, word);
    }
  }
}

/// The inverse of Spread.
KV_KERNEL_INLINE void Gather(const uint32_t* words, bool is_v, uint8_t* rows) {
  for (int j = 0; j < 4; ++j) {
    if (!is_v) {
      for (int r = 0; r < 16; ++r) std::memcpy(rows + 16 * r + 4 * j, words + 16 * j + r, 4);
      continue;
    }
    for (int r = 0; r < 16; r += kLanes) {
      const U word = Load<U>(words + 16 * j + r);
      for (int lane = 0; lane < 4; ++lane) {
        Store(rows + (4 * j + lane) * 16 + r, __builtin_convertvector(word >> (8 * lane) & 0xffu, B));
      }
    }
  }
}

/// Where tile i of a 1-bit plane starts in a byte.
constexpr int OneBitShift(int i) { return (i & 1) + 4 * (i >> 1); }

/// Packs one segment of one strip. codes: [64 tokens][16 channels].
static void PackSegment(const uint8_t* codes, int width, bool is_v, uint8_t* out) {
  alignas(64) uint8_t rows[256];
  alignas(64) uint32_t words[kPlaneWords];
  if (width == 8) {
    for (int i = 0; i < 4; ++i) {
      for (int k = 0; k < 256; k += kVectorBytes) {
        Store(rows + k, Load<U>(codes + 256 * i + k) ^ (is_v ? 0x80808080u : 0u));
      }
      Spread(rows, is_v, words);
      for (int j = 0; j < 4; ++j) std::memcpy(out + 256 * j + 64 * i, words + 16 * j, 64);
    }
    return;
  }
  int low = 0;
  for (; width - low >= 2; low += 2, out += 256) {
    for (int k = 0; k < 256; k += kVectorBytes) {
      U bits = {};
      for (int i = 0; i < 4; ++i) bits |= (Load<U>(codes + 256 * i + k) >> low & 0x03030303u) << (2 * i);
      Store(rows + k, bits);
    }
    Spread(rows, is_v, words);
    std::memcpy(out, words, 256);
  }
  if (width == low) return;
  for (int k = 0; k < 256; k += kVectorBytes) {
    U bits = {};
    for (int i = 0; i < 4; ++i) bits |= (Load<U>(codes + 256 * i + k) >> low & 0x01010101u) << OneBitShift(i);
    Store(rows + k, bits);
  }
  Spread(rows, is_v, words);
  for (int h = 0; h < 2; ++h) {
    for (int r = 0; r < 16; r += kLanes) {
      Store(out + 64 * h + 4 * r, Load<U>(words + 32 * h + r) | Load<U>(words + 32 * h + 16 + r) << 2);
    }
  }
}

/// The inverse of PackSegment.
static void UnpackSegment(const uint8_t* in, int width, bool is_v, uint8_t* codes) {
  alignas(64) uint8_t rows[256];
  alignas(64) uint32_t words[kPlaneWords];
  if (width == 8) {
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < 4; ++j) std::memcpy(words + 16 * j, in + 256 * j + 64 * i, 64);
      Gather(words, is_v, rows);
      for (int k = 0; k < 256; k += kVectorBytes) {
        Store(codes + 256 * i + k, Load<U>(rows + k) ^ (is_v ? 0x80808080u : 0u));
      }
    }
    return;
  }
  std::memset(codes, 0, kStripTokens * kSegmentChannels);
  int low = 0;
  for (; width - low >= 2; low += 2, in += 256) {
    std::memcpy(words, in, 256);
    Gather(words, is_v, rows);
    for (int k = 0; k < 256; k += kVectorBytes) {
      const U bits = Load<U>(rows + k);
      for (int i = 0; i < 4; ++i) {
        uint8_t* at = codes + 256 * i + k;
        Store(at, Load<U>(at) | (bits >> (2 * i) & 0x03030303u) << low);
      }
    }
  }
  if (width == low) return;
  for (int h = 0; h < 2; ++h) {
    for (int r = 0; r < 16; r += kLanes) {
      const U word = Load<U>(in + 64 * h + 4 * r);
      Store(words + 32 * h + r, word & 0x33333333u);
      Store(words + 32 * h + 16 + r, word >> 2 & 0x33333333u);
    }
  }
  Gather(words, is_v, rows);
  for (int k = 0; k < 256; k += kVectorBytes) {
    const U bits = Load<U>(rows + k);
    for (int i = 0; i < 4; ++i) {
      uint8_t* at = codes + 256 * i + k;
      Store(at, Load<U>(at) | (bits >> OneBitShift(i) & 0x01010101u) << low);
    }
  }
}

static void StoreMeta(const Side& side, const Workspace& ws, uint8_t* record) {
  const SideLayout& layout = *side.layout;
  const size_t n = size_t(layout.partitions) * layout.meta_entries;
  if (!side.meta8) {
    std::memcpy(record + layout.steps, ws.stored_step, 2 * n);
    std::memcpy(record + layout.minima, ws.stored_minimum, 2 * n);
    return;
  }
  for (size_t m = 0; m < n; m += kLanes) {
    Store(record + layout.steps + m, __builtin_convertvector(Load<H>(ws.stored_step + m), B));
    Store(record + layout.minima + m, __builtin_convertvector(Load<H>(ws.stored_minimum + m), B));
  }
}

static bool EncodeSide(const Side& side, const uint8_t* raw, uint8_t* record, Workspace& ws) {
  const SideLayout& layout = *side.layout;
  if (!Convert(side, raw, ws)) return false;
  if (side.norms && !FactorNorms(side, record, ws)) return false;
  FindBounds(side, ws);
  bool fit = false;
  for (int s = 0; s < layout.segments; ++s) fit |= layout.segment_least_squares[s];
  const int group = side.along_tokens ? 1 : layout.partitions;
  for (int first = 0; first < layout.partitions; first += group) {
    float tops[2];
    if (fit) FitRanges(side, first, first + group, ws);
    if (!MakeMeta(side, first, first + group, ws, tops)) return false;
    if (side.meta8) {
      const uint16_t bits[2] = {FloatToHalf(tops[0]), FloatToHalf(tops[1])};
      std::memcpy(record + layout.tops + 4 * (first / group), bits, 4);
    }
  }
  StoreMeta(side, ws, record);
  side.stochastic ? Quantize<true>(side, ws, record) : Quantize<false>(side, ws, record);
  for (int strip = 0; strip < side.tokens / kStripTokens; ++strip) {
    uint8_t* out = record + layout.codes + size_t(strip) * layout.strip_bytes;
    for (int s = 0; s < layout.segments; ++s) {
      const uint8_t* codes = ws.codes + (size_t(s) * side.tokens + strip * kStripTokens) * kSegmentChannels;
      PackSegment(codes, layout.segment_bits[s], side.is_v, out + layout.segment_offset[s]);
    }
  }
  return true;
}

static bool Encode(const HackFormat& format, const uint8_t* raw, uint32_t layer, uint64_t first_token, uint8_t* page,
                   uint8_t* workspace) {
  Workspace& ws = *reinterpret_cast<Workspace*>(workspace);
  std::memset(page, 0, format.page_bytes);
  for (int h = 0; h < format.layout.kv_heads; ++h) {
    for (int s = 0; s < 2; ++s) {
      const Side side = MakeSide(format, h, s);
      if (side.stochastic) MakeSeeds(layer, h, s, first_token, side.tokens, ws.seeds);
      if (!EncodeSide(side, raw + format.layout.raw_offset(s, h, 0), page + format.heads[h].offset, ws)) {
        std::memset(page, 0, format.page_bytes);
        return false;
      }
    }
  }
  return true;
}

/// Steps or minima [kLanes entries from m on], as attention reads them.
KV_KERNEL_INLINE F LoadMeta(const Side& side, const uint8_t* record, bool step, size_t m) {
  const SideLayout& layout = *side.layout;
  const uint8_t* at = record + (step ? layout.steps : layout.minima);
  if (!side.meta8) return FromHalf(Load<H>(at + 2 * m));
  uint16_t bits;
  std::memcpy(&bits, record + layout.tops + (side.along_tokens ? 4 * (m / layout.meta_entries) : 0) + (step ? 0 : 2),
              2);
  const U stored = __builtin_convertvector(Load<B>(at + m), U);
  if (step) return HalfToFloat(bits) * __builtin_convertvector((I)stored, F) / 255.0f;
  return HalfToFloat(bits) * __builtin_convertvector((I)(stored << 24) >> 24, F) / 127.0f;
}

static void DecodeSide(const Side& side, const uint8_t* record, uint8_t* raw) {
  const SideLayout& layout = *side.layout;
  alignas(64) uint8_t codes[kSegmentsMax * kStripTokens * kSegmentChannels];
  alignas(64) float steps[PageLayout::kHeadDimMax], minima[PageLayout::kHeadDimMax], row[PageLayout::kHeadDimMax];
  const float norm_top = side.norms ? LoadHalf(record + layout.norm_top) : 0;
  alignas(64) float token_steps[8][kStripTokens], token_minima[8][kStripTokens];  // partitions of at least 32 channels
  for (int strip = 0; strip < side.tokens / kStripTokens; ++strip) {
    const uint8_t* in = record + layout.codes + size_t(strip) * layout.strip_bytes;
    for (int s = 0; s < layout.segments; ++s) {
      UnpackSegment(in + layout.segment_offset[s], layout.segment_bits[s], side.is_v,
                    codes + s * kStripTokens * kSegmentChannels);
    }
    if (!side.along_tokens) {
      for (int p = 0; p < layout.partitions; ++p) {
        for (int t = 0; t < kStripTokens; t += kLanes) {
          const size_t m = size_t(p) * side.tokens + strip * kStripTokens + t;
          Store(token_steps[p] + t, LoadMeta(side, record, true, m));
          Store(token_minima[p] + t, LoadMeta(side, record, false, m));
        }
      }
    }
    for (int t = 0; t < kStripTokens; ++t) {
      const int token = strip * kStripTokens + t;
      if (side.along_tokens && (t == 0 || token % layout.partition == 0)) {
        for (int c = 0; c < side.channels; c += kLanes) {
          const size_t m = size_t(token / layout.partition) * side.channels + c;
          Store(steps + c, LoadMeta(side, record, true, m));
          Store(minima + c, LoadMeta(side, record, false, m));
        }
      }
      uint8_t* out = raw + size_t(token) * side.channels * 2;
      const float norm = side.norms ? norm_top * float(record[layout.norms + token]) / 255.0f : 1;
      for (int c = 0; c < side.channels; c += kLanes) {
        const B stored =
            Load<B>(codes + (c / kSegmentChannels * kStripTokens + t) * kSegmentChannels + c % kSegmentChannels);
        const F code = __builtin_convertvector(__builtin_convertvector(stored, I), F);
        const int p = c / layout.partition;
        F value = side.along_tokens ? code * Load<F>(steps + c) + Load<F>(minima + c)
                                    : code * token_steps[p][t] + token_minima[p][t];
        if (side.norms) value *= norm;
        if (side.rotate) {
          Store(row + c, value);
        } else {
          StoreRaw(out + 2 * c, side.dtype, value);
        }
      }
      if (side.rotate) {
        HadamardRow(row, side.channels);
        for (int c = 0; c < side.channels; c += kLanes) StoreRaw(out + 2 * c, side.dtype, Load<F>(row + c));
      }
    }
  }
}

static void Decode(const HackFormat& format, const uint8_t* page, uint8_t* raw) {
  for (int h = 0; h < format.layout.kv_heads; ++h) {
    for (int s = 0; s < 2; ++s) {
      DecodeSide(MakeSide(format, h, s), page + format.heads[h].offset, raw + format.layout.raw_offset(s, h, 0));
    }
  }
}

}  // namespace KV_KERNEL_ISA
