// Rows on their way into codes: to fp32, transformed, divided by their norms. Included by hack_kernels_impl.h, once per
// instruction set inside its namespace, hence no include guard.

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
