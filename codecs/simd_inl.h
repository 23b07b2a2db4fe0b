// One vector type per instruction set, for kernel files that are compiled once for each.
//
// A file defines KVMANAGER_ISA_AVX512, KVMANAGER_ISA_AVX2 or neither, includes this first, and keeps to plain structs:
// an inline function of the standard library would be compiled with instructions that other machines lack, and the
// linker may pick that copy. Everything here has internal linkage and is always inlined.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(KVMANAGER_ISA_AVX512)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c,bmi,bmi2")
#elif defined(KVMANAGER_ISA_AVX2)
#pragma GCC target("avx2,fma,f16c,bmi,bmi2")
#endif
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wuninitialized"        // gcc 12: its own _mm512_undefined_ps()
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // likewise

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define KVMANAGER_INLINE static inline __attribute__((always_inline))
#define KVMANAGER_UNROLL _Pragma("GCC unroll 16")

namespace kvmanager {
namespace {

#if defined(KVMANAGER_ISA_AVX512)
constexpr int kLanes = 16;
#elif defined(KVMANAGER_ISA_AVX2)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float VecF __attribute__((vector_size(4 * kLanes)));
typedef int32_t VecI __attribute__((vector_size(4 * kLanes)));
typedef uint32_t VecU __attribute__((vector_size(4 * kLanes)));
typedef float LooseF __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t LooseU __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint16_t Vec16 __attribute__((vector_size(2 * kLanes)));
typedef uint16_t Loose16 __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));
typedef uint8_t Vec8 __attribute__((vector_size(kLanes)));
typedef int8_t VecS8 __attribute__((vector_size(kLanes)));
typedef uint8_t Loose8 __attribute__((vector_size(kLanes), aligned(1), may_alias));

KVMANAGER_INLINE VecF SetF(float x) { return x - VecF{}; }  // not +: -0 + 0 is +0, so that would be computed
KVMANAGER_INLINE VecU SetU(uint32_t x) { return VecU{} + x; }
KVMANAGER_INLINE VecF LoadF(const float* p) { return *reinterpret_cast<const LooseF*>(p); }
KVMANAGER_INLINE void StoreF(float* p, VecF v) { *reinterpret_cast<LooseF*>(p) = v; }
KVMANAGER_INLINE VecU LoadU(const void* p) { return *reinterpret_cast<const LooseU*>(p); }
KVMANAGER_INLINE VecF ToF(VecI v) { return __builtin_convertvector(v, VecF); }

KVMANAGER_INLINE VecF MaxF(VecF a, VecF b) {
#if defined(KVMANAGER_ISA_AVX512)
  return _mm512_max_ps(a, b);
#elif defined(KVMANAGER_ISA_AVX2)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

KVMANAGER_INLINE VecF MinF(VecF a, VecF b) {
#if defined(KVMANAGER_ISA_AVX512)
  return _mm512_min_ps(a, b);
#elif defined(KVMANAGER_ISA_AVX2)
  return _mm256_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

/// a * b + c, fused where the instruction set fuses: for sums of two products, where the compiler could fuse either.
KVMANAGER_INLINE VecF MulAdd(VecF a, VecF b, VecF c) {
#if defined(KVMANAGER_ISA_AVX512)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(KVMANAGER_ISA_AVX2)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

KVMANAGER_INLINE VecF AbsF(VecF a) { return (VecF)((VecU)a & SetU(0x7fffffff)); }

/// Nearest integer, ties to even; |x| < 2^22.
KVMANAGER_INLINE VecI RoundToInt(VecF x) {
#if defined(KVMANAGER_ISA_AVX512)
  return (VecI)_mm512_cvtps_epi32(x);
#elif defined(KVMANAGER_ISA_AVX2)
  return (VecI)_mm256_cvtps_epi32(x);
#elif defined(__SSE2__)
  return (VecI)_mm_cvtps_epi32(x);
#else
  const VecF magic = SetF(0x1.8p23f);
  return (VecI)(x + magic) - (VecI)magic;
#endif
}

KVMANAGER_INLINE VecF LoadHalf(const uint16_t* p) {
#if defined(KVMANAGER_ISA_AVX512)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(KVMANAGER_ISA_AVX2)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  const VecU h = __builtin_convertvector(*reinterpret_cast<const Loose16*>(p), VecU);
  VecU bits = (VecU)((VecF)((h & 0x7fff) << 13) * 0x1p112f);
  bits |= (VecU)(bits >= 0x47800000) & 0x7f800000;  // infinity and NaN
  return (VecF)(bits | (h & 0x8000) << 16);
#endif
}

KVMANAGER_INLINE VecF LoadBFloat16(const uint16_t* p) {
  return (VecF)(__builtin_convertvector(*reinterpret_cast<const Loose16*>(p), VecU) << 16);
}

template <bool kBFloat16>
KVMANAGER_INLINE VecF Load16(const uint16_t* p) {
  return kBFloat16 ? LoadBFloat16(p) : LoadHalf(p);
}

KVMANAGER_INLINE VecF LoadU8(const uint8_t* p) {
#if defined(KVMANAGER_ISA_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(KVMANAGER_ISA_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return ToF(__builtin_convertvector(*reinterpret_cast<const Loose8*>(p), VecI));
#endif
}

KVMANAGER_INLINE VecF LoadS8(const uint8_t* p) {
#if defined(KVMANAGER_ISA_AVX512)
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(KVMANAGER_ISA_AVX2)
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
  return ToF(__builtin_convertvector((VecS8) * reinterpret_cast<const Loose8*>(p), VecI));
#endif
}

/// The low byte of each lane.
KVMANAGER_INLINE void StoreBytes(void* p, VecI v) {
#if defined(KVMANAGER_ISA_AVX512)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8((__m512i)v));
#else
  *reinterpret_cast<Loose8*>(p) = __builtin_convertvector(v, Vec8);
#endif
}

/// a and b's lanes interleaved and added, twice as narrow: the step of a transposed reduction. The sum of a lane's
/// values associates alike whatever its place, so a row's score does not depend on the rows beside it.
template <int kStep>
KVMANAGER_INLINE VecF Interleaved(VecF a, VecF b) {
#if defined(KVMANAGER_ISA_AVX512)
  if constexpr (kStep == 0) return _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
  if constexpr (kStep == 1) {
    return (__m512)_mm512_unpacklo_pd((__m512d)a, (__m512d)b) + (__m512)_mm512_unpackhi_pd((__m512d)a, (__m512d)b);
  }
  if constexpr (kStep == 2) return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
  return _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xdd);
#elif defined(KVMANAGER_ISA_AVX2)
  if constexpr (kStep == 0) return _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
  if constexpr (kStep == 1) {
    return (__m256)_mm256_unpacklo_pd((__m256d)a, (__m256d)b) + (__m256)_mm256_unpackhi_pd((__m256d)a, (__m256d)b);
  }
  return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31);
#else
  if constexpr (kStep == 0) return VecF{a[0], b[0], a[1], b[1]} + VecF{a[2], b[2], a[3], b[3]};
  return VecF{a[0], a[1], b[0], b[1]} + VecF{a[2], a[3], b[2], b[3]};
#endif
}

/// Lane i of the result is the sum of v[i]'s lanes.
KVMANAGER_INLINE VecF SumEach(VecF (&v)[kLanes]) {
  KVMANAGER_UNROLL
  for (int i = 0; i < kLanes / 2; ++i) v[i] = Interleaved<0>(v[2 * i], v[2 * i + 1]);
  KVMANAGER_UNROLL
  for (int i = 0; i < kLanes / 4; ++i) v[i] = Interleaved<1>(v[2 * i], v[2 * i + 1]);
  if constexpr (kLanes >= 8) {
    KVMANAGER_UNROLL
    for (int i = 0; i < kLanes / 8; ++i) v[i] = Interleaved<2>(v[2 * i], v[2 * i + 1]);
  }
  if constexpr (kLanes >= 16) v[0] = Interleaved<3>(v[0], v[1]);
  return v[0];
}

KVMANAGER_INLINE float ReduceMax(VecF v) {
#if defined(KVMANAGER_ISA_AVX512)
  return _mm512_reduce_max_ps(v);
#else
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

KVMANAGER_INLINE float ReduceMin(VecF v) { return -ReduceMax(-v); }

KVMANAGER_INLINE float ReduceAdd(VecF v) {
#if defined(KVMANAGER_ISA_AVX512)
  return _mm512_reduce_add_ps(v);
#else
  float s = v[0];
  for (int i = 1; i < kLanes; ++i) s += v[i];
  return s;
#endif
}

/// exp(x) for x <= 0, relative error below 3e-7; 0 (or, with AVX-512, a denormal) below -87, and 0 at -infinity.
KVMANAGER_INLINE VecF ExpNegative(VecF x) {
#if defined(KVMANAGER_ISA_AVX512)
  // 2^(n + r), |r| <= 1/2; a minimax polynomial of degree 5 with 2^0 = 1 (relative error 9.2e-8, and 1.4e-8 |x| of
  // log2(e) in one part).
  const VecF bounded = MaxF(x, SetF(-110.0f)), log2e = SetF(1.44269504088896341f);
  const VecF n = _mm512_roundscale_ps(bounded * log2e, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const VecF r = _mm512_fmsub_ps(bounded, log2e, n);
  VecF p = SetF(1.326472731e-3f);
  p = MulAdd(p, r, SetF(9.671512991e-3f));
  p = MulAdd(p, r, SetF(5.550733581e-2f));
  p = MulAdd(p, r, SetF(2.402224243e-1f));
  p = MulAdd(p, r, SetF(6.931470037e-1f));
  p = MulAdd(p, r, SetF(1.0f));
  return _mm512_scalef_ps(p, n);
#else
  // Cephes' expf: x = n ln 2 + r, |r| <= ln 2 / 2, a polynomial of degree 7 in r.
  const VecF low = SetF(-87.0f), magic = SetF(0x1.8p23f);
  const VecF bounded = MaxF(x, low);
  const VecF shifted = bounded * 1.44269504088896341f + magic;
  const VecF n = shifted - magic;
  VecF r = bounded - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  VecF p = SetF(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  const VecF scaled = (VecF)((VecI)p + (((VecI)shifted - (VecI)magic) << 23));
  return x < low ? VecF{} : scaled;
#endif
}

KVMANAGER_INLINE float ExpNegativeScalar(float x) { return ExpNegative(SetF(x))[0]; }

// ---- four rows at once ----------------------------------------------------------------------------------------------

typedef float Vec4 __attribute__((vector_size(16)));

/// The first kR of four values; the others are 0.
template <int kR>
KVMANAGER_INLINE Vec4 LoadRows(const float* p) {
  Vec4 v{};
  if constexpr (kR == 4) {
    __builtin_memcpy(&v, p, sizeof(v));
  } else {
    KVMANAGER_UNROLL
    for (int r = 0; r < kR; ++r) v[r] = p[r];
  }
  return v;
}

template <int kR>
KVMANAGER_INLINE void StoreRows(float* p, Vec4 v) {
  if constexpr (kR == 4) {
    __builtin_memcpy(p, &v, sizeof(v));
  } else {
    KVMANAGER_UNROLL
    for (int r = 0; r < kR; ++r) p[r] = v[r];
  }
}

/// v in the first four lanes; the others are unspecified.
KVMANAGER_INLINE VecF WidenRows(Vec4 v) {
#if defined(KVMANAGER_ISA_AVX512)
  return _mm512_broadcast_f32x4(v);
#elif defined(KVMANAGER_ISA_AVX2)
  return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(&v));
#else
  return v;
#endif
}

KVMANAGER_INLINE Vec4 NarrowRows(VecF v) {
#if defined(KVMANAGER_ISA_AVX512)
  return _mm512_castps512_ps128(v);
#elif defined(KVMANAGER_ISA_AVX2)
  return _mm256_castps256_ps128(v);
#else
  return v;
#endif
}

/// Element r is v[r]'s lanes reduced, in an order that is the same for every r.
KVMANAGER_INLINE Vec4 ReduceAddRows(const VecF (&v)[4]) {
#if defined(KVMANAGER_ISA_AVX512)
  const VecF sum = Interleaved<1>(Interleaved<0>(v[0], v[1]), Interleaved<0>(v[2], v[3]));
  const __m256 half = _mm512_castps512_ps256(sum) + _mm512_extractf32x8_ps(sum, 1);
  return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
#else
  return Vec4{ReduceAdd(v[0]), ReduceAdd(v[1]), ReduceAdd(v[2]), ReduceAdd(v[3])};
#endif
}

KVMANAGER_INLINE Vec4 ReduceMaxRows(const VecF (&v)[4]) {
#if defined(KVMANAGER_ISA_AVX512)
  const __m512d a = (__m512d)MaxF(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
  const __m512d b = (__m512d)MaxF(_mm512_unpacklo_ps(v[2], v[3]), _mm512_unpackhi_ps(v[2], v[3]));
  const VecF max = MaxF((VecF)_mm512_unpacklo_pd(a, b), (VecF)_mm512_unpackhi_pd(a, b));
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(max), _mm512_extractf32x8_ps(max, 1));
  return _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
  return Vec4{ReduceMax(v[0]), ReduceMax(v[1]), ReduceMax(v[2]), ReduceMax(v[3])};
#endif
}

/// The low byte of each lane of four vectors, one after another; lanes fit signed bytes, or unsigned ones.
template <bool kSigned>
KVMANAGER_INLINE void StoreBytes4(void* p, VecI a, VecI b, VecI c, VecI d) {
#if defined(KVMANAGER_ISA_AVX512)
  const __m512i ab = _mm512_packs_epi32((__m512i)a, (__m512i)b), cd = _mm512_packs_epi32((__m512i)c, (__m512i)d);
  const __m512i bytes = kSigned ? _mm512_packs_epi16(ab, cd) : _mm512_packus_epi16(ab, cd);
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi32(order, bytes));
#else
  uint8_t* at = static_cast<uint8_t*>(p);
  StoreBytes(at, a);
  StoreBytes(at + kLanes, b);
  StoreBytes(at + 2 * kLanes, c);
  StoreBytes(at + 3 * kLanes, d);
#endif
}

/// {0, 1, 2, ...}
KVMANAGER_INLINE VecI Iota() {
  VecI v{};
  KVMANAGER_UNROLL
  for (int i = 0; i < kLanes; ++i) v[i] = i;
  return v;
}

/// acc + the dot product of each lane's four unsigned bytes of u and four signed bytes of s; exact for all values.
KVMANAGER_INLINE VecI Dot4(VecI acc, VecU u, VecU s) {
#if defined(KVMANAGER_ISA_AVX512)
  return (VecI)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)u, (__m512i)s);
#elif defined(KVMANAGER_ISA_AVX2)
  const __m256i a = (__m256i)u, b = (__m256i)s, low = _mm256_set1_epi16(255);
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, low), _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
  return acc + (VecI)even + (VecI)odd;
#elif defined(__SSE2__)
  const __m128i a = (__m128i)u, b = (__m128i)s, low = _mm_set1_epi16(255);
  const __m128i even = _mm_madd_epi16(_mm_and_si128(a, low), _mm_srai_epi16(_mm_slli_epi16(b, 8), 8));
  const __m128i odd = _mm_madd_epi16(_mm_srli_epi16(a, 8), _mm_srai_epi16(b, 8));
  return acc + (VecI)even + (VecI)odd;
#else
  KVMANAGER_UNROLL
  for (int b = 0; b < 4; ++b) acc += (VecI)(u >> (8 * b) & 255) * ((VecI)(s << (24 - 8 * b)) >> 24);
  return acc;
#endif
}

/// Dot4 where one side's bytes are at most 15 in magnitude: two neighbouring products then fit 16 bits, which AVX2's
/// saturating vpmaddubsw keeps exactly (2 * 255 * 15 < 2^15).
KVMANAGER_INLINE VecI Dot4Small(VecI acc, VecU u, VecU s) {
#if defined(KVMANAGER_ISA_AVX2) && !defined(KVMANAGER_ISA_AVX512)
  return acc + (VecI)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)u, (__m256i)s), _mm256_set1_epi16(1));
#else
  return Dot4(acc, u, s);
#endif
}

#if defined(KVMANAGER_ISA_AVX512)
/// Set bits of a mask. By way of a general register: gcc 12 counts 32 bits of a mask that it has spilled as 16.
KVMANAGER_INLINE int CountBits(__mmask16 mask) { return __builtin_popcount(_cvtmask16_u32(mask)); }
#endif

/// Bits of a where mask is set, else of b.
KVMANAGER_INLINE VecU SelectBits(VecU mask, VecU a, VecU b) {
#if defined(KVMANAGER_ISA_AVX512)
  return (VecU)_mm512_ternarylogic_epi32((__m512i)mask, (__m512i)a, (__m512i)b, 0xca);
#else
  return (a & mask) | (b & ~mask);
#endif
}

KVMANAGER_INLINE void PrefetchLines(const void* p, int lines) {
  const char* at = static_cast<const char*>(p);
  for (int i = 0; i < lines; ++i) __builtin_prefetch(at + 64 * i, 0, 3);
}

}  // namespace
}  // namespace kvmanager
