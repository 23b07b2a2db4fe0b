// Stores blocks of an engine's caches some at a time: while an engine's GPU encodes some, others are written to the
// daemon.
//
//     engine's blocks --copy, encode--> range of an arena --call--> daemon
//                       a staging
//
// A part is some blocks that one call writes. It takes a staging until it is encoded and a range until it is written;
// where the two are the same memory, it keeps both until then. Parts are encoded and written in their order.
//
// Who drives it: BlockStore decides what is begun, written and waited for; BlockStoreWork does it.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/client.h"
#include "kvmanager/base/mutex.h"

namespace kvmanager::client {

/// Some blocks of a store, from its block `at` on.
struct BlockPart {
  uint32_t at = 0, count = 0;
  uint32_t staging = 0, range = 0;
  uint64_t number = 0;  // of the parts of a store, from 0 on
  uint64_t bytes = 0;   // of the range, once it was begun
};

/// What a store consists of. Calls come from the thread that runs the store.
class BlockStoreWork {
 public:
  virtual ~BlockStoreWork() = default;
  /// Asks the daemon which of the store's blocks it has.
  virtual void Ask() = 0;
  /// Then: how many, from the first of the sequence on.
  virtual absl::StatusOr<uint32_t> Present() = 0;
  /// How many of `count` blocks from `at` on have room in a staging and a range: 1..count.
  virtual uint32_t Fits(uint32_t at, uint32_t count) const = 0;
  /// Begins to encode; gives the part its bytes.
  virtual absl::Status Begin(BlockPart* part) = 0;
  /// Whether the part is encoded, so that nothing reads the engine's blocks of it.
  virtual absl::StatusOr<bool> Encoded(const BlockPart& part) = 0;
  /// Then: whether it has pages that the codec could not encode. Such a part is not written.
  virtual bool Declined(const BlockPart& part) const = 0;
  /// Then: begins to write it to the daemon.
  virtual Pending<absl::StatusOr<WriteBlocksResult>> Write(const BlockPart& part) = 0;
  /// Sleeps a moment, where nothing can be done.
  virtual void Rest() = 0;
  /// Until nothing is under way that Begin() began, also where it failed in the middle.
  virtual void Drain() = 0;
};

/// What others say to a store while it runs. Written by any thread.
struct BlockStoreSignals {
  std::atomic<uint32_t> urgent{0};   // work that does not wait for the store's end
  std::atomic<uint32_t> waiting{0};  // jobs that wait for this one
};

class BlockStore {
 public:
  struct Options {
    uint32_t first = 0, count = 0;                  // the store's blocks: their places in the sequence
    uint32_t stagings = 1, ranges = 1, blocks = 1;  // a staging has room for so many blocks
    bool tied = false;                              // staging and range of one number go together
    bool ahead = false;                             // the first part is begun before the daemon says what it has
    uint32_t writes = 1;                            // calls under way at once
    uint32_t first_blocks = 1;  // of the first part and of the last: little comes before, and behind, its call
  };
  enum class State : uint8_t {
    kDone,      // all blocks were written or are not needed, or the store was stopped
    kUrgent,    // Run() is to be called again
    kDeclined,  // the same, but blocks from next() on are the caller's to store
  };
  struct Counts {
    uint32_t found = 0;                 // not written: the daemon had them
    uint32_t written = 0, present = 0;  // of those it was given
    uint32_t full = 0;                  // it had no room for
    uint64_t written_bytes = 0;
  };

  BlockStore(const Options& options, BlockStoreWork* work) : options_(options), work_(*work) {
    for (uint32_t i = 0; i < options.stagings; ++i) stagings_.push_back(options.stagings - 1 - i);
    for (uint32_t i = 0; i < options.ranges; ++i) ranges_.push_back(options.ranges - 1 - i);
    size_ = options.first_blocks;
  }

  /// Until it is done, or something urgent waits. After an error, as after kDone and kDeclined, nothing is under way.
  /// Errors: the work's, and the daemon's but for RESOURCE_EXHAUSTED, which is counted.
  absl::StatusOr<State> Run(const BlockStoreSignals& signals);
  /// Begins no more; what was begun is written. Any thread; returns when nothing is being begun.
  void Stop();
  /// 1: nothing reads the engine's blocks any more, nor will; else 0. Noticed while it runs. Any thread.
  const std::atomic<uint32_t>& read() const { return read_; }
  /// Blocks before this one were begun, or are not needed. The thread that runs it.
  uint32_t next() const { return next_; }
  const Counts& counts() const { return counts_; }
  const std::string& full() const { return full_; }  // why the daemon had no room; empty: it had
  /// Nobody runs it any more: its calls are cancelled, and it waits for nothing.
  void Cancel() { writing_.clear(); }

 private:
  struct Writing {
    BlockPart part;
    Pending<absl::StatusOr<WriteBlocksResult>> call;
  };

  absl::StatusOr<State> RunOn(const BlockStoreSignals& signals);
  /// Waits for what is under way; its results count for nothing.
  void Abandon();
  absl::Status LookUp(uint32_t waiting);
  /// Whether it began the next part.
  absl::StatusOr<bool> BeginNext(uint32_t waiting);
  uint32_t NextBlocks(uint32_t waiting);
  /// Whether the oldest part that is being encoded was encoded; then it is being written, or was declined.
  absl::StatusOr<bool> WriteNext();
  /// Takes the oldest call's result.
  absl::Status TakeWritten();
  bool AllBegun() const { return next_ == options_.count || stopped_.load(std::memory_order_relaxed); }
  void NoteRead();

  const Options options_;
  BlockStoreWork& work_;
  Mutex mutex_;  // held while a part is begun
  std::atomic<bool> stopped_{false};
  std::atomic<uint32_t> read_{0};
  bool looked_up_ = false, declined_ = false;
  uint32_t next_ = 0, size_, present_ = 0;  // blocks of the store; present_: that the daemon had
  uint64_t parts_ = 0;
  std::vector<uint32_t> stagings_, ranges_;  // that are free; what was given back last is taken first
  std::deque<BlockPart> encoding_;
  std::deque<Writing> writing_;
  Counts counts_;
  std::string full_;
};

}  // namespace kvmanager::client
