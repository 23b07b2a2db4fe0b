// The daemon's side of the process in which UCX runs: sends it requests, takes its answers, and starts and ends it.
//
// Any thread queues packets and allocates staging memory. A thread of its own starts the process, writes and reads the
// process's socket, and ends the process. What the process sends is not trusted: an unexpected packet ends it.
//
// Invariants:
// 1. A range of staging memory belongs to one read or one piece: from before its READ is sent until its DONE, or until
//    the process that could write to it has ended.
// 2. `done` of every read is called once, except of those under way when Stop is called.
// 3. Sources and reads belong to one start of the process; later starts do not know them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "kvmanager/base/child_process.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/range_allocator.h"
#include "kvmanager/memory/region.h"
#include "transport/ucx/description.h"
#include "transport/ucx/process_wire.h"
#include "transport/ucx/ucx_memory.h"

namespace kvmanager {

class UcxProcessClient : public std::enable_shared_from_this<UcxProcessClient> {
 public:
  using Options = UcxMemory::Options;
  using Memory = UcxMemory::Memory;
  using Source = RemoteMemory::Source;
  using Piece = RemoteMemory::Piece;
  using Done = RemoteMemory::Done;
  using Context = RemoteMemory::Context;
  static constexpr int64_t kLookMs = 1000;  // for reads that do not end

  UcxProcessClient(Options options, std::unique_ptr<Region> staging);
  ~UcxProcessClient();
  /// Waits until the process is ready. Errors: why it is not.
  absl::Status Start();
  void Stop();

  const std::vector<absl::Span<const uint8_t>>& memory() const { return spans_; }
  std::string Describe(size_t index, Context context) const;
  absl::StatusOr<std::shared_ptr<Source>> Open(absl::Span<const uint8_t> description, Context context);
  void Read(const std::shared_ptr<Source>& from, uint64_t offset, uint64_t bytes, Done done);
  std::string version() const;
  pid_t process() const;
  bool idle() const;

 private:
  class RemoteSource;
  class StagedPiece;
  using Time = std::chrono::steady_clock::time_point;
  struct Asked {                                                       // a read
    uint64_t start = 0, source = 0, offset = 0, bytes = 0, place = 0;  // place: in staging_
    Done done;
    Time since;  // when it was sent
  };
  struct Failed {
    Done done;
    absl::Status why;
  };

  absl::Span<const uint8_t> key() const {
    return {reinterpret_cast<const uint8_t*>(options_.key.data()), options_.key.size()};
  }
  void Wake();
  void Release(uint64_t start, uint64_t source);
  void GiveBack(uint64_t place, uint64_t bytes);
  void SendWaiting() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  void Run();
  absl::Status StartProcess();
  absl::StatusOr<ucx::Packet> WaitUntilReady();
  void Serve();
  bool Write();
  bool TakeAnswers();
  void EndProcess();
  bool Pause();

  const Options options_;
  const std::unique_ptr<Region> staging_;
  std::vector<absl::Span<const uint8_t>> spans_;
  int wake_fd_ = -1;
  std::thread thread_;

  // The thread's.
  ChildProcess child_;
  int socket_ = -1;

  mutable Mutex mutex_;
  std::condition_variable changed_;
  // Packets. Bounded: one for each read that waits, and those that open and close sources, which the jobs of a
  // transport's data connections bound.
  std::deque<std::string> to_send_ ABSL_GUARDED_BY(mutex_);
  std::deque<Asked> waiting_ ABSL_GUARDED_BY(mutex_);  // for staging memory
  std::map<uint64_t, Asked> asked_ ABSL_GUARDED_BY(mutex_);
  RangeAllocator free_staging_ ABSL_GUARDED_BY(mutex_);
  uint64_t start_ ABSL_GUARDED_BY(mutex_) = 0;     // grows when a process is ready, and when it ends
  uint64_t newest_ ABSL_GUARDED_BY(mutex_) = 0;    // number of a source or read
  ucx::Description here_ ABSL_GUARDED_BY(mutex_);  // of the process that is ready; else no address
  pid_t pid_ ABSL_GUARDED_BY(mutex_) = 0;          // likewise
  absl::Status first_start_ ABSL_GUARDED_BY(mutex_);
  bool started_ ABSL_GUARDED_BY(mutex_) = false;  // the first start has gone well or not
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvmanager
