// Why a prefix match ended: a value, shared by the store's answers and its metrics.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvmanager {

/// Why a prefix match ended where it did.
enum class MissReason : uint8_t { kNone = 0, kNotFound, kTokenMismatch, kChecksum };
inline constexpr size_t kMissReasons = 4;

/// "none", "not_found", "token_mismatch", "checksum".
const char* MissReasonName(MissReason reason);

}  // namespace kvmanager
