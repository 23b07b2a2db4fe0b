// The daemon's side of the process in which UCX runs: what is asked of it, what it answered, and its ends.
//
// Any thread puts packets on a queue and takes places; the desk's own thread starts the process, writes and reads its
// socket, and ends it. What the process says is not believed: a packet that nobody expects ends it.
//
// Invariants: 1. A place belongs to one read or one piece, from before its READ is said until its DONE, or until the
// process that could write to it has ended. 2. `done` of every read is called once, but for those under way when the
// desk stops. 3. Sources and reads belong to one start of the process; later starts do not know them.
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

#include "kvmanager/base/mutex.h"
#include "kvmanager/memory/region.h"
#include "transport/ucx/child.h"
#include "transport/ucx/description.h"
#include "transport/ucx/places.h"
#include "transport/ucx/process_wire.h"
#include "transport/ucx/ucx_memory.h"

namespace kvmanager {

class UcxMemory::Desk : public std::enable_shared_from_this<Desk> {
 public:
  static constexpr int64_t kLookMs = 1000;  // for reads that do not end

  Desk(Options options, std::unique_ptr<Region> staging);
  ~Desk();
  /// Until the process is ready, or why it is not.
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
  class PlacedPiece;
  using Time = std::chrono::steady_clock::time_point;
  struct Asked {  // a read
    uint64_t start = 0, source = 0, offset = 0, bytes = 0, place = 0;
    Done done;
    Time since;  // when it was said
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
  void SayWaiting() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

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
  ucx::Child child_;
  int socket_ = -1;

  mutable Mutex mutex_;
  std::condition_variable changed_;
  // As many as what waits to be read, and openings and endings of sources: jobs of a transport's data connections bound
  // them.
  std::deque<std::string> to_say_ ABSL_GUARDED_BY(mutex_);
  std::deque<Asked> waiting_ ABSL_GUARDED_BY(mutex_);  // for places
  std::map<uint64_t, Asked> asked_ ABSL_GUARDED_BY(mutex_);
  ucx::Places places_ ABSL_GUARDED_BY(mutex_);
  uint64_t start_ ABSL_GUARDED_BY(mutex_) = 0;     // grows when a process is ready, and when it ends
  uint64_t newest_ ABSL_GUARDED_BY(mutex_) = 0;    // number of a source or read
  ucx::Description here_ ABSL_GUARDED_BY(mutex_);  // of the process that is ready; else no address
  pid_t pid_ ABSL_GUARDED_BY(mutex_) = 0;          // likewise
  absl::Status first_start_ ABSL_GUARDED_BY(mutex_);
  bool started_ ABSL_GUARDED_BY(mutex_) = false;  // the first start has gone well or not
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace kvmanager
