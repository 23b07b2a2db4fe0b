// From rows to metadata and codes: bounds of partitions, their rounding, the least-squares fit. Included by
// hack_kernels_impl.h, once per instruction set inside its namespace, hence no include guard.

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
