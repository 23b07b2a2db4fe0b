// Tracks completion of work on a GPU stream, and runs callbacks.
//
// Each piece of work is numbered as it is enqueued, and the stream stores the number behind it; nothing wakes the loop,
// so it looks at the number from time to time while there is work (PollList). Callbacks run in the order of
// posting.
//
// The first error is the last: of enqueuing, or of the GPU while its work is waited for. From then on nothing is
// enqueued. What was may have begun, so nobody is told of the rest before the stream touches nothing any more.
//
// Owned by whoever posts; goes when nothing is on its way (Drain). The loop's thread.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kvmanager/base/poll_list.h"
#include "kvmanager/memory/device.h"

namespace kvmanager {

/// A stream that stores numbers, which grow, behind its work. One thread.
class NumberedStream {
 public:
  /// Of the lowest priority, behind attention; `device` outlives it. Errors: RESOURCE_EXHAUSTED, UNAVAILABLE.
  static absl::StatusOr<std::unique_ptr<NumberedStream>> Create(const Device* device);
  /// Nothing is on its way.
  virtual ~NumberedStream() = default;

  /// Makes the stream's GPU the calling thread's, calls `enqueue`, and has `number` stored behind that. After an error
  /// some of it may have been enqueued. Errors: UNAVAILABLE, and those of `enqueue`.
  virtual absl::Status Enqueue(absl::FunctionRef<absl::Status(CUstream_st*)> enqueue, uint64_t number) = 0;
  /// The last number that was stored; 0 at first.
  virtual uint64_t passed() const = 0;
  /// As Device's.
  virtual absl::StatusOr<bool> IsIdle() const = 0;
};

class StreamProgress {
 public:
  /// failure: what a failed GPU means, for the log: "GPU 0 is read no more". polls: outlives it.
  StreamProgress(std::unique_ptr<NumberedStream> stream, PollList* polls, std::string failure)
      : stream_(std::move(stream)), polls_(polls), failure_(std::move(failure)) {}
  StreamProgress(const StreamProgress&) = delete;
  StreamProgress& operator=(const StreamProgress&) = delete;

  /// Enqueues, unless it has failed. `done` is called once, from a poll: the stream has passed it (true), or may not
  /// have and never will (false). It may post more.
  void Post(absl::FunctionRef<absl::Status(CUstream_st*)> enqueue, absl::AnyInvocable<void(bool passed)> done);
  bool failed() const { return failed_; }
  /// Waits, blocking, until the GPU touches nothing for this any more; nobody is told. false: it still does after
  /// `deadline_ms`.
  bool Drain(int64_t deadline_ms);

 private:
  struct Waiting {
    uint64_t number = 0;  // what the stream stores behind it; 0: it was not enqueued
    absl::AnyInvocable<void(bool)> done;
  };

  void Fail(const absl::Status& why);
  /// The stream touches nothing any more, now or ever: it is idle, or the GPU is lost.
  bool Quiet() const;
  bool Poll();  // true: nothing is on its way

  const std::unique_ptr<NumberedStream> stream_;
  PollList* const polls_;
  const std::string failure_;
  std::deque<Waiting> waiting_;
  uint64_t last_ = 0;    // enqueued
  bool failed_ = false;  // nothing is enqueued any more
  bool polling_ = false;
};

}  // namespace kvmanager
