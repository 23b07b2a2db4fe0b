// Loads blocks out of the daemon's memory, which this process maps, a call's blocks at a time: while a GPU copies some,
// the daemon is asked for the next.
//
//     daemon's memory --copy--> GPU --compare with checksums--> release
//
// Calls are answered, copied and released in their order. Who drives it: BlockLoad decides what is asked, copied and
// waited for; BlockLoadWork does it.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"

namespace kvmanager::client {

/// What a load consists of. Calls come from the thread that runs it.
class BlockLoadWork {
 public:
  virtual ~BlockLoadWork() = default;
  /// Asks the daemon for `count` blocks, of which the first is the load's block `at`.
  virtual Pending<absl::StatusOr<MappedBlocks>> Map(uint32_t at, uint32_t count) = 0;
  /// Begins to copy what was mapped: the call's `place` is below Options::calls, and no other's that is under way.
  virtual absl::Status Copy(const MappedBlocks& mapped, uint32_t at, uint32_t place) = 0;
  /// Whether the oldest copy of which that was not said is done.
  virtual absl::StatusOr<bool> Copied() = 0;
  /// Then: the first of its blocks that is not what was stored.
  virtual std::optional<uint32_t> Corrupt(const MappedBlocks& mapped, uint32_t place) const = 0;
  /// Sleeps a moment, where nothing can be done.
  virtual void Rest() = 0;
  /// Until nothing is under way that Copy() began, also where it failed in the middle.
  virtual void Drain() = 0;
};

class BlockLoad {
 public:
  struct Options {
    uint32_t count = 0;         // blocks
    uint32_t calls = 1;         // whose blocks are copied at once
    uint32_t first_blocks = 1;  // of the first call, so that its copies begin soon; others ask for twice as many each
    uint32_t call_blocks = 1;   // of a call, at most
  };

  BlockLoad(const Options& options, BlockLoadWork* work) : options_(options), work_(*work) {}

  /// Until all are there, or no more are. After an error nothing is under way, and what was copied counts for nothing.
  absl::Status Run();
  /// From the first on, that are there.
  uint32_t blocks() const { return blocks_; }
  /// Why no more: kNone: all are, or the next may not be mapped.
  Miss reason() const { return reason_; }

 private:
  struct Asked {
    uint32_t at, count;
    Pending<absl::StatusOr<MappedBlocks>> call;
  };
  struct Copying {
    MappedBlocks mapped;
    uint32_t place;
  };
  struct Released {
    uint32_t blocks;
    MappedBlocks mapped;  // held until that is answered
    Pending<absl::Status> call;
  };

  absl::Status RunOn();
  void Ask();
  absl::Status TakeMapped();
  absl::Status TakeCopied();
  absl::Status TakeReleased();

  const Options options_;
  BlockLoadWork& work_;
  bool ended_ = false;  // the daemon gives no more, or they would be of no use
  uint32_t next_ = 0;   // blocks that were asked for
  uint32_t size_ = 0;   // of the call before
  uint32_t copies_ = 0, blocks_ = 0;
  Miss reason_ = Miss::kNone;
  std::deque<Asked> asked_;
  std::deque<Copying> copying_;
  std::deque<Released> released_;
};

}  // namespace kvmanager::client
