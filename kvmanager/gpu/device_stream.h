// A connection's stream on a GPU of the daemon, and what becomes of it when the connection ends.
//
// A stream waits for words that another process writes, or never will. So:
//  1. Streams are made once and used again, at most kStreamsMax of them: a stream that waits holds up those that share
//     its way into the GPU (kConnectionsMax ways). What a connection may have submitted is bounded too
//     (kSubmissionsMax): CUDA blocks who launches beyond a thousand operations that wait.
//  2. A stream that is closed gets the words that it waits for abandoned until all its work has passed. Then it lets go
//     of what its work uses (Keep), and may be opened again. `done` is abandoned behind that, for a client that lives.
//     Nothing here blocks: a timer of the event loop looks at counters that the streams write.
//  3. Pinned words are unpinned only while no stream has work: CUDA would wait for all streams, and hold up every
//     other call meanwhile. At most kRetiredMax of them wait for such a moment.
//
// The loop's thread alone.
#pragma once

#include <kj/async.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kvmanager/base/event_loop.h"
#include "kvmanager/gpu/gpu_metrics.h"
#include "kvmanager/memory/device.h"
#include "kvmanager/memory/pinned_region.h"
#include "kvmanager/memory/region.h"
#include "kvmanager/memory/shared_semaphores.h"

namespace kvmanager {

class DeviceStreams;

/// What one connection runs on a GPU. Owned by its capability and by calls that use it; its DeviceStreams outlives it.
class DeviceStream {
 public:
  /// Submissions of one stream that have not passed; each of at most kOperationsMax launches, copies and words.
  static constexpr uint64_t kSubmissionsMax = 96;
  static constexpr int kOperationsMax = 9;

  ~DeviceStream();  // closes it
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  int ordinal() const { return device().info().ordinal; }  // of the GPU
  const Device& device() const;
  uint32_t id() const { return id_; }
  SharedSemaphores& words() { return *words_; }
  /// For who reads them after this closed; it gives them to DeviceStreams::Retire then.
  std::shared_ptr<SharedSemaphores> shared_words() const { return words_; }
  bool closed() const { return words_ == nullptr; }

  // Work goes into stream() between Begin and End, and nowhere else.
  CUstream_st* stream() const;
  /// What comes later waits for the engine's `ready` to reach `value`; 0: for nothing. Errors, and then there is
  /// nothing to End: INVALID_ARGUMENT, RESOURCE_EXHAUSTED (kSubmissionsMax), FAILED_PRECONDITION (closed).
  absl::Status Begin(uint64_t ready);
  /// Between them: what comes later waits for the engine's `released` to reach `value`.
  absl::Status WaitReleased(uint64_t value);
  /// Returns what the word `done` will be, at least, behind all work so far. It is called after an error of the work in
  /// between, too. Errors: UNAVAILABLE when the GPU has failed.
  absl::StatusOr<uint64_t> End();
  /// Ends that were called, and those whose work has passed.
  uint64_t submitted() const;
  uint64_t passed() const;

  /// Lives until all work submitted so far has passed.
  void Keep(std::shared_ptr<const void> object);
  /// No more work: what the stream holds goes once it has drained. Idempotent.
  void Close();

  /// For plans that the daemon runs in this stream (ReleaseEpochs): zero at first, and no client can write it. A holder
  /// of it is removed before the stream is closed, or kept by it.
  ReleaseCounter* plans() const;
  /// [SharedSemaphores::kNonFiniteWords], for sequences that this stream appends to: no client can write it.
  uint64_t* non_finite() const;

 private:
  friend class DeviceStreams;
  struct Slot;
  struct Kept {
    uint64_t submitted = 0;
    std::shared_ptr<const void> object;
  };
  DeviceStream(DeviceStreams* streams, uint32_t id, uint32_t user, Slot* slot, std::shared_ptr<SharedSemaphores> words)
      : streams_(streams), id_(id), user_(user), slot_(slot), words_(std::move(words)) {}

  DeviceStreams* const streams_;
  const uint32_t id_, user_;
  Slot* const slot_;
  std::shared_ptr<SharedSemaphores> words_;  // nullptr: closed
  uint64_t done_ = 0;
  uint64_t released_wanted_ = 0;  // by WaitReleased, at most
  std::deque<Kept> kept_;         // by submission
};

/// The streams of one GPU.
class DeviceStreams {
 public:
  static constexpr uint32_t kStreamsMax = 16;      // open and draining
  static constexpr uint32_t kUserStreamsMax = 12;  // open ones of one user, so that another finds room
  static constexpr size_t kRetiredMax = 64;
  static_assert(kStreamsMax + 8 < kConnectionsMax, "beside the device's own and the store's");

  /// Both outlive this. Errors: of pinning a page.
  static absl::StatusOr<std::unique_ptr<DeviceStreams>> Create(const Device* device, DeviceMetrics* metrics);
  /// Drained, or else nothing of what still runs is freed.
  ~DeviceStreams();
  DeviceStreams(const DeviceStreams&) = delete;
  DeviceStreams& operator=(const DeviceStreams&) = delete;

  /// Timers run on `loop` from now on; nullptr: there are none.
  void SetLoop(EventLoop* loop);

  /// user: whoever asks for it. Errors: RESOURCE_EXHAUSTED.
  absl::StatusOr<std::shared_ptr<DeviceStream>> Open(uint32_t user);
  /// Blocks until all streams, which are closed, have drained and nothing is left of them. False: not within
  /// `deadline_ms`.
  bool Drain(int64_t deadline_ms);
  /// Destroys `object`, which frees or unpins memory, when no stream has work: CUDA waits for all of them then.
  void Retire(std::shared_ptr<const void> object);
  /// No stream has work.
  bool Quiet();

 private:
  friend class DeviceStream;
  using Slot = DeviceStream::Slot;
  struct Draining;

  DeviceStreams(const Device* device, DeviceMetrics* metrics);
  void TakeOver(DeviceStream* stream);  // that closes
  bool Passed(const Slot& slot, uint64_t submitted);
  /// Frees what can be freed. True: something is left.
  bool Collect();
  void Watch();
  kj::Promise<void> CollectLater();
  void ShowCounts();

  const Device* const device_;
  DeviceMetrics* const metrics_;
  EventLoop* loop_ = nullptr;
  uint32_t next_id_ = 1;
  std::unique_ptr<PinnedRegion> counters_;  // of each slot submissions that passed, plans, and a non-finite table
  std::vector<std::unique_ptr<Slot>> slots_;
  std::vector<Slot*> free_;  // a stack
  std::vector<DeviceStream*> open_;
  std::vector<Draining> draining_;
  std::vector<std::shared_ptr<const void>> retired_;
  int64_t pause_ms_ = 0;
  bool watching_ = false;
  bool failed_ = false;  // the GPU: nothing runs on it any more
  kj::Promise<void> later_ = nullptr;
};

}  // namespace kvmanager
