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

constexpr size_t kPieceBytes = 4 << 10;  // stays in the first cache between its uses
constexpr size_t kStreams = 4;           // places of a piece that are read side by side

constexpr size_t kLine = 64;

// Memory answers several places at a time, where a single one waits for the next page of memory.
void FetchPiece(const uint8_t* from, uint8_t* to, size_t bytes) {
  const size_t stream = bytes / kStreams / kLine * kLine;
  for (size_t at = 0; at < stream; at += kLine) {
    for (size_t i = 0; i < kStreams; ++i) std::memcpy(to + i * stream + at, from + i * stream + at, kLine);
  }
  std::memcpy(to + kStreams * stream, from + kStreams * stream, bytes - kStreams * stream);
}

// next: what is read after it, as many bytes; nullptr: nothing.
void StorePiece(const uint8_t* from, uint8_t* to, size_t bytes, const uint8_t* next) {
  size_t stored = 0;
#ifdef __SSE2__
  if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
    for (; stored + kLine <= bytes; stored += kLine) {
      if (next != nullptr) _mm_prefetch(reinterpret_cast<const char*>(next + stored), _MM_HINT_T0);
      const auto* source = reinterpret_cast<const __m128i*>(from + stored);
      auto* target = reinterpret_cast<__m128i*>(to + stored);
      for (int i = 0; i < 4; ++i) _mm_stream_si128(target + i, _mm_load_si128(source + i));
    }
  }
#endif
  std::memcpy(to + stored, from + stored, bytes - stored);
}

}  // namespace

struct CopyHash::State {
  XXH3_state_t* xxh = XXH3_createState();
  alignas(kLine) uint8_t piece[kPieceBytes];
  ~State() { XXH3_freeState(xxh); }
};

CopyHash::CopyHash() : state_(std::make_unique<State>()) { KV_CHECK(state_->xxh != nullptr); }
CopyHash::~CopyHash() = default;

uint64_t CopyHash::Copy(const uint8_t* from, uint8_t* to, size_t bytes) {
  XXH3_64bits_reset(state_->xxh);
  for (size_t at = 0; at < bytes; at += kPieceBytes) {
    // `from` is read once: what is hashed is what is stored, whoever writes there meanwhile.
    const size_t piece = std::min(kPieceBytes, bytes - at);
    FetchPiece(from + at, state_->piece, piece);
    XXH3_64bits_update(state_->xxh, state_->piece, piece);
    StorePiece(state_->piece, to + at, piece, bytes - at >= 2 * kPieceBytes ? from + at + kPieceBytes : nullptr);
  }
#ifdef __SSE2__
  _mm_sfence();  // streamed stores are not ordered before later ones
#endif
  return XXH3_64bits_digest(state_->xxh);
}

}  // namespace kvmanager::tcp
