// Why blocks are found by their names, or are not: in pieces that each take less than a turn of the event loop.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/eviction/eviction_policy.h"
#include "kvmanager/store/gone_blocks.h"
#include "kvmanager/store/store_ids.h"

namespace kvmanager {

/// Where a block is. kArriving: on its way to memory, from a lower tier or the disk.
enum class BlockPlace : uint8_t { kNowhere = 0, kMemory, kArriving, kDisk };

struct BlockExplanation {
  BlockPlace place = BlockPlace::kNowhere;
  int tier = 0;                             // of its place: a GPU's ordinal, CacheConfig::kHost or kDiskTier
  CacheId cache = 0;                        // of its place
  bool other_tokens = false;                // what has its key there has other tokens: no hit
  uint8_t priority = Retention::kOfPolicy;  // how it is retained there
  uint64_t ends_ms = 0;                     // from now: when that ends; 0: it does not
  // Of one that is nowhere:
  std::optional<GoneBlock> gone;  // how it went; nothing: it was not stored, as far as the store remembers
  CacheId same_tokens = 0;        // a cache that has its tokens in memory under another name; 0: none has
};

/// A cache that BlockExplanation::same_tokens names, as it was then.
struct OtherCache {
  CacheId cache = 0;
  std::string tenant_label;
  int device = 0;
  std::vector<const char*> differs;  // DifferingFields from the cache that was asked about; none: what precedes differs
};

struct Explained {
  std::vector<BlockExplanation> blocks;  // [names]
  std::vector<OtherCache> others;        // those that differ in the least first
  // How far the store remembers what went (GoneBlocks).
  size_t remembered = 0, remembered_max = 0;
  double remembered_seconds = 0;
};

/// Holds no block between two pieces. Made, used and destroyed on the store's thread, perhaps destroyed after the store
/// has closed.
class Explanation {
 public:
  virtual ~Explanation() = default;
  /// Looks at some more. False: that was the last piece.
  virtual bool DoPiece() = 0;
  /// Once, after the last piece. Errors: UNAVAILABLE (the store has closed).
  virtual absl::StatusOr<Explained> Take() = 0;
};

}  // namespace kvmanager
