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

constexpr size_t kPieceBytes = 16 << 10;  // stays in the first cache between its two uses
constexpr size_t kStreams = 4;            // places of a piece that are copied side by side

#ifdef __SSE2__
void StreamLine(const uint8_t* from, uint8_t* to) {
  const auto* source = reinterpret_cast<const __m128i*>(from);
  auto* target = reinterpret_cast<__m128i*>(to);
  const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
  const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
  _mm_stream_si128(target, a);
  _mm_stream_si128(target + 1, b);
  _mm_stream_si128(target + 2, c);
  _mm_stream_si128(target + 3, d);
}
#endif

void CopyPiece(const uint8_t* from, uint8_t* to, size_t bytes) {
  size_t copied = 0;
#ifdef __SSE2__
  constexpr size_t kLine = 64;
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    // Memory answers several places at a time, where a single one waits for the next page of memory.
    const size_t stream = bytes / kStreams / kLine * kLine;
    for (size_t at = 0; at < stream; at += kLine) {
      for (size_t i = 0; i < kStreams; ++i) StreamLine(from + i * stream + at, to + i * stream + at);
    }
    copied = kStreams * stream;
  }
#endif
  std::memcpy(to + copied, from + copied, bytes - copied);
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
    CopyPiece(from + at, to + at, piece);
    XXH3_64bits_update(state_->xxh, from + at, piece);
  }
#ifdef __SSE2__
  _mm_sfence();  // streamed stores are not ordered before later ones
#endif
  return XXH3_64bits_digest(state_->xxh);
}

}  // namespace kvmanager::tcp
