// Copies of pages that nobody reads soon: out of memory that others wrote, and to memory past the caches. Pure, any
// thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace kvmanager {

constexpr size_t kStreamLine = 64;

/// Copies to memory that the caches have. Reads several places side by side: memory answers several at a time, where a
/// single one waits for the next page of memory. Each byte is read once.
inline void FetchSideBySide(const uint8_t* from, uint8_t* to, size_t bytes) {
  constexpr size_t kPlaces = 4;
  const size_t each = bytes / kPlaces / kStreamLine * kStreamLine;
  for (size_t at = 0; at < each; at += kStreamLine) {
    for (size_t i = 0; i < kPlaces; ++i) std::memcpy(to + i * each + at, from + i * each + at, kStreamLine);
  }
  std::memcpy(to + kPlaces * each, from + kPlaces * each, bytes - kPlaces * each);
}

/// Stores past the caches; `to` should lie at a multiple of 16. next: what is read afterwards, as many bytes, or
/// nullptr. Behind the last of them EndStreaming() is called.
inline void StoreStreaming(const uint8_t* from, uint8_t* to, size_t bytes, const uint8_t* next = nullptr) {
  size_t stored = 0;
#ifdef __SSE2__
  if (reinterpret_cast<uintptr_t>(to) % sizeof(__m128i) == 0) {
    for (; stored + kStreamLine <= bytes; stored += kStreamLine) {
      if (next != nullptr) _mm_prefetch(reinterpret_cast<const char*>(next + stored), _MM_HINT_T0);
      const auto* source = reinterpret_cast<const __m128i*>(from + stored);
      auto* target = reinterpret_cast<__m128i*>(to + stored);
      for (int i = 0; i < 4; ++i) _mm_stream_si128(target + i, _mm_loadu_si128(source + i));
    }
  }
#endif
  std::memcpy(to + stored, from + stored, bytes - stored);
}

/// Streamed stores are not ordered before later ones without it.
inline void EndStreaming() {
#ifdef __SSE2__
  _mm_sfence();
#endif
}

}  // namespace kvmanager
