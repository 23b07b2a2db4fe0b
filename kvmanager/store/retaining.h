// Blocks that a client wants kept longer, or less long, than the eviction policy would keep them: in pieces that each
// take less than a turn of the event loop.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

namespace kvmanager {

struct RetainResult {
  uint64_t blocks = 0;  // of the names: that are in a memory or on the disk
  uint64_t bytes = 0;   // of these, each copy counted
};

/// Holds no block between two pieces. Made, used and destroyed on the store's thread, perhaps destroyed after the store
/// has closed.
class Retaining {
 public:
  virtual ~Retaining() = default;
  /// Retains the next blocks. False: that was the last piece.
  virtual bool DoPiece() = 0;
  /// After the last piece. Errors: NOT_FOUND (the cache was purged; some may have been retained); UNAVAILABLE (the
  /// store has closed).
  virtual absl::StatusOr<RetainResult> result() const = 0;
};

}  // namespace kvmanager
