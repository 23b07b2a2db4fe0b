#include "attention/machine_limits_kernels.h"

#if defined(__x86_64__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // gcc 12: its own _mm512_undefined_ps()
#include <immintrin.h>
#endif

namespace kvmanager {
namespace {

#if defined(__x86_64__)
__attribute__((target("avx512f"))) uint64_t StreamRead512(const uint8_t* data, size_t bytes) {
  __m512i sum[8];
  for (__m512i& s : sum) s = _mm512_setzero_si512();
  for (size_t i = 0; i < bytes; i += 512) {
    _mm_prefetch(reinterpret_cast<const char*>(data + i + 4096), _MM_HINT_T0);
    for (int j = 0; j < 8; ++j) sum[j] = _mm512_add_epi64(sum[j], _mm512_loadu_si512(data + i + 64 * j));
  }
  for (int j = 1; j < 8; ++j) sum[0] = _mm512_add_epi64(sum[0], sum[j]);
  return _mm512_reduce_add_epi64(sum[0]);
}

__attribute__((target("avx512f"))) uint64_t MultiplyAdds512(uint64_t rounds, float* sink) {
  __m512 x[16];
  for (int j = 0; j < 16; ++j) x[j] = _mm512_set1_ps(*sink + float(j));
  const __m512 a = _mm512_set1_ps(0.5f), b = _mm512_set1_ps(*sink);
  for (uint64_t i = 0; i < rounds; ++i) {
    for (int j = 0; j < 16; ++j) x[j] = _mm512_fmadd_ps(x[j], a, b);
  }
  for (int j = 1; j < 16; ++j) x[0] = _mm512_add_ps(x[0], x[j]);
  *sink = _mm512_reduce_add_ps(x[0]);
  return rounds * 16 * 16;
}

__attribute__((target("avx512f,avx512bw,avx512vnni"))) uint64_t ByteMultiplyAdds512(uint64_t rounds, float* sink) {
  __m512i x[16];
  for (int j = 0; j < 16; ++j) x[j] = _mm512_set1_epi32(int(*sink) + j);
  const __m512i a = _mm512_set1_epi8(char(3 + int(*sink))), b = _mm512_set1_epi8(char(1 + int(*sink)));
  for (uint64_t i = 0; i < rounds; ++i) {
    for (int j = 0; j < 16; ++j) x[j] = _mm512_dpbusd_epi32(x[j], a, b);
  }
  for (int j = 1; j < 16; ++j) x[0] = _mm512_xor_si512(x[0], x[j]);
  *sink = float(_mm512_reduce_add_epi32(x[0]) & 1);
  return rounds * 16 * 64;
}

// Four registers hold a table; a code's top bit chooses between the halves.
__attribute__((target("avx512f,avx512bw,avx512vbmi"))) uint64_t LookUps512(uint64_t rounds, float* sink) {
  __m512i x[8];
  for (int j = 0; j < 8; ++j) x[j] = _mm512_set1_epi8(char(17 * j + int(*sink)));
  const __m512i low = _mm512_set1_epi8(char(*sink)), high = _mm512_set1_epi8(char(*sink + 1));
  const __m512i low2 = _mm512_set1_epi8(char(*sink + 2)), high2 = _mm512_set1_epi8(char(*sink + 3));
  for (uint64_t i = 0; i < rounds; ++i) {
    for (int j = 0; j < 8; ++j) {
      const __m512i below = _mm512_permutex2var_epi8(low, x[j], high);
      const __m512i above = _mm512_permutex2var_epi8(low2, x[j], high2);
      x[j] = _mm512_mask_blend_epi8(_mm512_movepi8_mask(x[j]), below, above);
    }
  }
  for (int j = 1; j < 8; ++j) x[0] = _mm512_xor_si512(x[0], x[j]);
  *sink = float(_mm512_reduce_add_epi32(x[0]) & 1);
  return rounds * 8 * 64;
}

__attribute__((target("avx2,fma"))) uint64_t MultiplyAdds256(uint64_t rounds, float* sink) {
  __m256 x[12];
  for (int j = 0; j < 12; ++j) x[j] = _mm256_set1_ps(*sink + float(j));
  const __m256 a = _mm256_set1_ps(0.5f), b = _mm256_set1_ps(*sink);
  for (uint64_t i = 0; i < rounds; ++i) {
    for (int j = 0; j < 12; ++j) x[j] = _mm256_fmadd_ps(x[j], a, b);
  }
  for (int j = 1; j < 12; ++j) x[0] = _mm256_add_ps(x[0], x[j]);
  *sink = x[0][0];
  return rounds * 12 * 8;
}
#endif

}  // namespace

uint64_t StreamRead(const uint8_t* data, size_t bytes) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return StreamRead512(data, bytes);
#endif
  uint64_t sum[8] = {};
  const uint64_t* words = reinterpret_cast<const uint64_t*>(data);
  for (size_t i = 0; i < bytes / 8; i += 8) {
    for (int j = 0; j < 8; ++j) sum[j] += words[i + j];
  }
  uint64_t total = 0;
  for (uint64_t s : sum) total += s;
  return total;
}

uint64_t MultiplyAdds(uint64_t rounds, float* sink) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return MultiplyAdds512(rounds, sink);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return MultiplyAdds256(rounds, sink);
#endif
  float x[16] = {};
  for (uint64_t i = 0; i < rounds; ++i) {
    for (float& v : x) v = v * 0.5f + *sink;
  }
  for (float v : x) *sink += v;
  return rounds * 16;
}

uint64_t ByteMultiplyAdds(uint64_t rounds, float* sink) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw")) {
    return ByteMultiplyAdds512(rounds, sink);
  }
#endif
  int32_t x[16] = {};
  const int8_t a = int8_t(*sink) + 3;
  for (uint64_t i = 0; i < rounds; ++i) {
    for (int32_t& v : x) v = v * a + 1;
  }
  for (int32_t v : x) *sink += float(v & 1);
  return rounds * 16;
}

uint64_t LookUps(uint64_t rounds, float* sink) {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512vbmi")) return LookUps512(rounds, sink);
#endif
  uint8_t table[256], x[16];
  for (int i = 0; i < 256; ++i) table[i] = uint8_t(i * 7 + int(*sink));
  for (int j = 0; j < 16; ++j) x[j] = uint8_t(j);
  for (uint64_t i = 0; i < rounds; ++i) {
    for (uint8_t& v : x) v = table[v];
  }
  for (uint8_t v : x) *sink += float(v & 1);
  return rounds * 16;
}

}  // namespace kvmanager
