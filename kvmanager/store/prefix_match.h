// How far names can be found, in any memory and on the disk: in pieces that each take less than a turn of the event
// loop.
#pragma once

#include <vector>

#include "absl/status/statusor.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/store/miss_reason.h"

namespace kvmanager {

struct MatchResult {
  int hit_blocks = 0;                     // consecutive, from the first
  MissReason reason = MissReason::kNone;  // of the first block that was no hit; kNone if all were
  int in_memory = 0;                      // of the hits, from the first on: in the cache's own memory
};

/// Holds no block between two pieces: what was found may go before the last one. Made, used and destroyed on the
/// store's thread, perhaps destroyed after the store has closed.
class PrefixMatch {
 public:
  virtual ~PrefixMatch() = default;
  /// Looks for the next names; once it knows how far they are there, it tells the eviction policy that they were used.
  /// False: that was the last piece.
  virtual bool DoPiece() = 0;
  /// After the last piece. Errors: NOT_FOUND (the cache was purged); UNAVAILABLE (the store has closed).
  virtual absl::StatusOr<MatchResult> result() const = 0;
  /// The names of the hits, once, after the last piece.
  virtual std::vector<BlockName> TakeHits() = 0;
};

}  // namespace kvmanager
