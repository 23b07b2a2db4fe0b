// What a store says of its sequences, and the lease on one whose pages come from another memory.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "kvmanager/store/cache_directory.h"
#include "kvmanager/store/store_ids.h"

namespace kvmanager {

struct CreateResult {
  SequenceId sequence = 0;
  MatchResult match;
};

struct PublishResult {
  int published = 0;  // newly named by this call
  int shared = 0;     // replaced by an equal block published earlier
  int deferred = 0;   // equal to one published earlier, but still inside this sequence's lag: shared by a later publish
};

struct SequenceInfo {
  SequenceId sequence = 0;
  CacheId cache = 0;
  uint64_t tokens = 0;                 // appended to every layer
  std::vector<uint64_t> layer_tokens;  // by layer
  int hit_blocks = 0;                  // that came by prefix hits or a hand-off
  int published_blocks = 0;
  uint64_t bytes = 0;     // of its pages, shared ones in full
  bool arriving = false;  // by a hand-off, of which pages are still to come
};

/// A sequence whose pages are on their way from another memory. Destroying it without Commit gives the sequence back;
/// nothing of it is visible before.
class ArrivalLease {
 public:
  virtual ~ArrivalLease() = default;
  virtual bool ready() const = 0;
  /// Calls `fn` once on the store's thread: at once if ready, else when it becomes so.
  virtual void OnReady(absl::AnyInvocable<void()> fn) = 0;
  /// Ready, but for room: nothing was copied, and what it would copy stays pinned. TryAgain looks once more, and it is
  /// ready then or later; Commit gives it up.
  virtual bool awaits_room() const = 0;
  virtual void TryAgain() = 0;
  /// The memory that it goes to, as CacheConfig::device.
  virtual int device() const = 0;
  /// After it is ready, at most once. Errors: RESOURCE_EXHAUSTED (of the memory that it was to go to); DATA_LOSS (pages
  /// did not arrive, or are none that a page may be).
  virtual absl::StatusOr<CreateResult> Commit() = 0;
};

}  // namespace kvmanager
