#include "transport/tcp/copy_hash.h"

#include <algorithm>
#include <cstring>

#include "kvmanager/base/checksum.h"
#include "kvmanager/base/status.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace kvmanager::tcp {
namespace {

constexpr size_t kPieceBytes = 8 << 10;  // stays in the first cache between its two uses

void CopyPiece(const uint8_t* from, uint8_t* to, size_t bytes) {
#ifdef __SSE2__
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    size_t i = 0;
    for (; i + 64 <= bytes; i += 64) {
      const auto* source = reinterpret_cast<const __m128i*>(from + i);
      auto* target = reinterpret_cast<__m128i*>(to + i);
      const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
      const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
      _mm_stream_si128(target, a);
      _mm_stream_si128(target + 1, b);
      _mm_stream_si128(target + 2, c);
      _mm_stream_si128(target + 3, d);
    }
    from += i;
    to += i;
    bytes -= i;
  }
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace

struct CopyHash::State {
  XXH3_state_t* xxh = XXH3_createState();
  ~State() { XXH3_freeState(xxh); }
};

CopyHash::CopyHash() : state_(std::make_unique<State>()) { KV_CHECK(state_->xxh != nullptr); }
CopyHash::~CopyHash() = default;

uint64_t CopyHash::Copy(const uint8_t* from, uint8_t* to, size_t bytes) {
  XXH3_64bits_reset(state_->xxh);
  for (size_t at = 0; at < bytes; at += kPieceBytes) {
    const size_t piece = std::min(kPieceBytes, bytes - at);
    XXH3_64bits_update(state_->xxh, from + at, piece);
    CopyPiece(from + at, to + at, piece);
  }
#ifdef __SSE2__
  _mm_sfence();  // streamed stores are not ordered before later ones
#endif
  return XXH3_64bits_digest(state_->xxh);
}

}  // namespace kvmanager::tcp
