// Vectors of one instruction set, and rows of fp16 or bf16 as vectors of fp32. Included by hack_kernels_impl.h, once
// per instruction set inside its namespace, hence no include guard.

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
#if defined(__clang__)
// GCC's __builtin_shuffle, whose lanes need not be constants: tools/fuzz compiles with clang.
KV_KERNEL_INLINE F __builtin_shuffle(F f, I from) {
  F to = {};
  for (int i = 0; i < kLanes; ++i) to[i] = f[from[i] % kLanes];
  return to;
}
#endif
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
