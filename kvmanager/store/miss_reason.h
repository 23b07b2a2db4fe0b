// Why a prefix match ended: a value, shared by the store's answers and its metrics.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvmanager {

/// Why a prefix match ended where it did. kIncomplete: a page is still to be encoded (block_transfers.h).
enum class MissReason : uint8_t { kNone = 0, kNotFound, kTokenMismatch, kChecksum, kIncomplete };
inline constexpr size_t kMissReasons = 5;

/// "none", "not_found", "token_mismatch", "checksum", "incomplete".
const char* MissReasonName(MissReason reason);

}  // namespace kvmanager
