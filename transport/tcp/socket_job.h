// Moves the bytes of one data connection's frame between a socket and their place in memory, on a worker: the kernel
// copies in the calling thread, and one thread does not fill a fast link. Never waits for a socket. Made, filled,
// started and abandoned on the transport's thread; a worker has it from Start until `moved` is called.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/types/span.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/worker_pool.h"

namespace kvmanager::tcp {

class SocketJob {
 public:
  enum class Way { kRead, kWrite };
  static constexpr int kEnd = -1;                  // an error: the peer closed the connection
  static constexpr size_t kStepBytes = 256 << 10;  // of one call of the kernel: hashed while they are in the cache
  static constexpr size_t kStepPieces = 64;

  /// fd: a stream socket's, which stays open until `moved` or Abandon.
  SocketJob(Way way, int fd) : way_(way), fd_(fd) {}

  /// What is to be moved, in order; not while it is being moved. What was there before is forgotten.
  void Clear();
  void Add(const void* data, size_t bytes) { pieces_.push_back({const_cast<void*>(data), bytes}); }
  /// Lets the next Start write pieces from `first` on by up to `writes` calls that make the kernel send them straight
  /// from where they lie, if a call has at least piece_bytes_min for each piece. What went so stays as it is until the
  /// kernel says that it is through with it. For a socket that has SO_ZEROCOPY.
  void AllowZeroCopy(size_t first, size_t writes, size_t piece_bytes_min) {
    lasting_ = first;
    zero_copies_allowed_ = writes;
    piece_bytes_min_ = piece_bytes_min;
  }

  /// Moves what the socket has, or takes, now: at most bytes_max, 1 or more. moved: called once on a worker; if the
  /// job is abandoned at most once, and perhaps after that.
  static void Start(const std::shared_ptr<SocketJob>& job, WorkerPool& workers, uint64_t bytes_max,
                    absl::AnyInvocable<void()> moved);
  /// Returns once nobody touches the socket or the pieces any more.
  void Abandon();

  // Since the last Start, once `moved` was called.
  uint64_t bytes() const { return bytes_; }
  /// 0, an errno, or kEnd. Bytes may have been moved before it.
  int error() const { return error_; }
  /// Bytes of each write that the kernel sends from where they lie, in order.
  absl::Span<const uint32_t> zero_copied() const { return zero_copied_; }
  /// That it had no room to send so, and that were written plainly.
  uint64_t zero_copy_refused_bytes() const { return zero_copy_refused_bytes_; }
  // Since Clear.
  /// Pieces that were moved whole.
  size_t whole() const { return next_; }
  bool complete() const { return next_ == pieces_.size(); }
  /// XXH3-64 of piece `at`, below whole(), as it was read.
  uint64_t checksum(size_t at) const { return checksums_[at]; }

 private:
  void Work();
  /// One call of the kernel. False: no more for now.
  bool Step();

  const Way way_;
  const int fd_;
  std::vector<iovec> pieces_;
  std::vector<uint64_t> checksums_;
  size_t next_ = 0;    // of pieces_
  size_t offset_ = 0;  // bytes of it that were moved
  uint64_t bytes_max_ = 0, bytes_ = 0;
  int error_ = 0;
  size_t lasting_ = 0;  // the first piece that may be sent from where it lies
  size_t zero_copies_allowed_ = 0, piece_bytes_min_ = 0;
  std::vector<uint32_t> zero_copied_;
  uint64_t zero_copy_refused_bytes_ = 0;
  absl::AnyInvocable<void()> moved_;
  Mutex mutex_;
  std::condition_variable idle_;
  bool working_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<bool> abandoned_{false};  // set under the mutex
};

}  // namespace kvmanager::tcp
