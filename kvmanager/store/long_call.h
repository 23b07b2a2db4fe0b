// Calls of the store on very many blocks, done in pieces: each takes less than a turn of the event loop, and between
// two of them others are served.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/store/arrival_lease.h"
#include "kvmanager/store/disk_load.h"
#include "kvmanager/store/step_lease.h"
#include "kvmanager/store/store_ids.h"

namespace kvmanager {

/// Made, used and destroyed on the store's thread, but for CompareOne; perhaps destroyed after the store has closed.
class LongCall {
 public:
  enum class Next : uint8_t {
    kPiece,    // DoPiece again
    kCompare,  // CompareOne on any one thread until that is false, then DoPiece
    kDone,
  };
  virtual ~LongCall() = default;
  /// Does the next piece, and says what comes next.
  virtual Next DoPiece() = 0;
  /// Compares one page of found blocks with its checksum, which takes as long as reading it. False: none is left.
  virtual bool CompareOne() = 0;
  /// All of it at once.
  void DoAll() {
    for (Next next; (next = DoPiece()) != Next::kDone;) {
      while (next == Next::kCompare && CompareOne()) {
      }
    }
  }
};

/// A sequence that takes the blocks found by its prefix. Nothing of it is visible before Commit; without, it goes.
class SequenceBeginning : public LongCall {
 public:
  /// Once, after kDone. Errors: RESOURCE_EXHAUSTED (sequences); UNAVAILABLE (the store has closed).
  virtual absl::StatusOr<CreateResult> Commit() = 0;
};

/// Names for the first blocks of a sequence. All names are looked at before the first block is named; what other calls
/// do between two pieces may still end it, and then the blocks before that one keep their names.
class Publication : public LongCall {
 public:
  /// After kDone. Errors: PageStore::Publish's.
  virtual absl::StatusOr<PublishResult> result() const = 0;
};

/// What the entries of an attention read, listed. What it needs of sequences that go in between is an error.
class Listing : public LongCall {
 public:
  /// Once, after kDone. Errors: PageStore::Attend's; UNAVAILABLE (the store has closed).
  virtual absl::StatusOr<std::unique_ptr<AttendLease>> Commit() = 0;
};

/// The store's calls that are done in pieces.
class LongCalls {
 public:
  virtual ~LongCalls() = default;
  /// PageStore::Create, for caches whose memory has no lower tier that pages come from (else: PageStore::Fetch).
  virtual absl::StatusOr<std::unique_ptr<SequenceBeginning>> Begin(CacheId cache, std::vector<BlockName> prefix,
                                                                   uint64_t prompt_tokens) = 0;
  /// Whether blocks of a cache may come from a lower tier, by PageStore::Fetch.
  virtual bool Fetches(CacheId cache) const = 0;
  /// Brings blocks that only the disk has into host memory, for whatever call looks for them next: `names`, the first
  /// of which is block `first` of its sequence, and which it takes (DiskLoad::TakeNames). nullptr, and the names stay
  /// where they are: there is no disk, or no such cache.
  virtual std::unique_ptr<DiskLoad> BeginLoad(CacheId cache, std::vector<BlockName>* names, uint32_t first,
                                              LoadUrgency urgency) = 0;
  std::unique_ptr<DiskLoad> BeginLoad(CacheId cache, std::vector<BlockName>* names, uint32_t first) {
    return BeginLoad(cache, names, first, LoadUrgency::kAwaited);
  }
  /// Now and then, once a second: the disk may take blocks again that wait for it, and retentions may have ended.
  virtual void LookAgain() = 0;
  /// PageStore::Publish.
  virtual absl::StatusOr<std::unique_ptr<Publication>> BeginPublish(SequenceId sequence,
                                                                    std::vector<BlockName> names) = 0;
  /// PageStore::Attend, of one layer in host memory.
  virtual absl::StatusOr<std::unique_ptr<Listing>> BeginAttend(CacheId cache, int layer,
                                                               absl::Span<const AttendEntry> entries) = 0;
  /// `fn` is called when a sequence leaves more blocks, by Drop or Crop, or a lease more pages, than are given back at
  /// once; when an AppendLease goes that had begun to commit; when a hand-off that is sent goes on or leaves much; and
  /// when blocks wait for the disk.
  virtual void OnLeftovers(std::function<void()> fn) = 0;
  /// Gives back some more of these, commits, sends or begins to write some more: 0.1 ms of each. False: that was all.
  virtual bool ReleaseSome() = 0;
};

}  // namespace kvmanager
