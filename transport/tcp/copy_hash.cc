#include "transport/tcp/copy_hash.h"

#include <algorithm>

#include "kvmanager/base/checksum.h"
#include "kvmanager/base/status.h"
#include "kvmanager/base/stream_copy.h"

namespace kvmanager::tcp {
namespace {

constexpr size_t kPieceBytes = 4 << 10;  // stays in the first cache between its uses

}  // namespace

struct CopyHash::State {
  XXH3_state_t* xxh = XXH3_createState();
  alignas(kStreamLine) uint8_t piece[kPieceBytes];
  ~State() { XXH3_freeState(xxh); }
};

CopyHash::CopyHash() : state_(std::make_unique<State>()) { KV_CHECK(state_->xxh != nullptr); }
CopyHash::~CopyHash() = default;

uint64_t CopyHash::Copy(const uint8_t* from, uint8_t* to, size_t bytes) {
  XXH3_64bits_reset(state_->xxh);
  for (size_t at = 0; at < bytes; at += kPieceBytes) {
    // `from` is read once: what is hashed is what is stored, whoever writes there meanwhile.
    const size_t piece = std::min(kPieceBytes, bytes - at);
    FetchSideBySide(from + at, state_->piece, piece);
    XXH3_64bits_update(state_->xxh, state_->piece, piece);
    StoreStreaming(state_->piece, to + at, piece, bytes - at >= 2 * kPieceBytes ? from + at + kPieceBytes : nullptr);
  }
  EndStreaming();
  return XXH3_64bits_digest(state_->xxh);
}

}  // namespace kvmanager::tcp
