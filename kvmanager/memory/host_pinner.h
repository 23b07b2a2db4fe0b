// Pins a pool's host memory for the GPU in the background, with progress.
//
// Pinning costs 0.04 s per GiB of memory that is allocated, and ten times that where it first has to be, so it starts
// with the daemon and goes on while the daemon serves: copies of what is not pinned yet wait or go another way. Owns a
// thread and what that thread pinned; the memory outlives it. One span is pinned at a time, in the order given. Any
// thread may read the progress.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "kvmanager/base/mutex.h"

namespace kvmanager {

class HostPinner {
 public:
  /// How memory is pinned and given back; both are called on the pinner's thread, `unpin` also by the destructor.
  struct Calls {
    std::function<absl::Status(uint8_t* data, size_t bytes)> pin;
    std::function<void(uint8_t* data)> unpin;
  };

  /// Starts; `spans` do not overlap and are whole pages of memory.
  HostPinner(std::vector<absl::Span<uint8_t>> spans, Calls calls);
  /// Waits for the span being pinned, then unpins all.
  ~HostPinner();
  HostPinner(const HostPinner&) = delete;
  HostPinner& operator=(const HostPinner&) = delete;

  /// Spans pinned so far: those numbered below. Never falls.
  uint32_t ready_spans() const { return ready_spans_.load(std::memory_order_acquire); }
  uint64_t ready_bytes() const;
  uint64_t total_bytes() const;
  /// All are pinned, or pinning one failed: then the rest stay unpinned, and status() says why.
  bool done() const { return done_.load(std::memory_order_acquire); }
  absl::Status status() const;
  /// Where the span ends that has this byte.
  const uint8_t* EndOfSpan(const uint8_t* data) const { return std::prev(ends_.upper_bound(data))->second; }
  /// Blocks until done().
  void Wait();

 private:
  void Run();

  const std::vector<absl::Span<uint8_t>> spans_;
  const std::map<const uint8_t*, const uint8_t*> ends_;  // of spans_, by where they begin
  const Calls calls_;
  std::atomic<uint32_t> ready_spans_{0};
  std::atomic<bool> done_{false};
  std::atomic<bool> stop_{false};
  mutable Mutex mutex_;
  absl::Status status_ ABSL_GUARDED_BY(mutex_);
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace kvmanager
