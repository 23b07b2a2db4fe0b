// A plug-in's process as the daemon sees it: started, supervised, asked and ended.
//
// A plug-in that has a process of its own (--codec-plugin-process) can at worst give wrong bytes to the caches that use
// it. The process (plugin_host.h) loads the object and serves calls on lanes: a socket for a call and its answer, and
// shared memory for what is encoded, decoded or attended to. Pages are copied into a lane and results out of it, so the
// plug-in sees no memory of the daemon's. What it may do to the system is bounded (confinement.h).
//
// Calls are made by threads of `workers()`, as many as there are lanes; they alone wait for the process, so that a
// plug-in which hangs holds up its own caches. A call that is not answered within kCallMsMax, an answer that is not
// one, or the process's end fails the calls under way, and the process is ended and started again after a pause that
// doubles from kRestartMsMin to kRestartMsMax. Until then calls fail at once. Codecs are made in the new process as
// they are used (process_entries.h).
//
// Owned by whoever started it, and shared with the codecs that were made of it. A thread of its own starts and ends
// processes: a process gets SIGKILL with the thread that started it. Take() may be called from any thread.
//
// Invariants:
// 1. A lane belongs to one LaneUse at a time; its socket is closed when it belongs to none.
// 2. `start` grows with each process; a lane's socket is of the process of `start`.
// 3. At most one call is under way in a lane, and its answer repeats its number.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "codecs/abi/codec_entries.h"
#include "codecs/abi/codec_events.h"
#include "codecs/abi/plugin_wire.h"
#include "kvmanager/base/child_process.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/memory/region.h"

namespace kvmanager {

class PluginProcess {
 public:
  static constexpr int kLanesMax = 16;
  static constexpr uint64_t kLaneBytes = 8 << 20;                  // of shared memory: a page in both forms must fit
  static constexpr uint64_t kAddressBytesMax = uint64_t{4} << 30;  // of the process, beside its lanes and stacks
  static constexpr int64_t kCallMsMax = 5000;                      // until a call is answered
  static constexpr int64_t kMakeMsMax = 20000;                     // until a codec is made, or the object loaded
  static constexpr int64_t kRestartMsMin = 100, kRestartMsMax = 30000;
  static constexpr int64_t kSettledMs = 60000;  // a process that lived so long is started again after kRestartMsMin

  struct Options {
    std::vector<std::string> program;  // runs RunPluginHost
    std::string path;                  // of the object
    int lanes = 1;                     // 1..kLanesMax
    CodecEvents* events = nullptr;     // outlives it
    int64_t call_ms = kCallMsMax, make_ms = kMakeMsMax;
  };

  /// A lane while it is used for calls; one thread.
  class LaneUse;

  /// Waits until the process has loaded the object. Errors: CodecPlugin::Load's, UNAVAILABLE (no process).
  static absl::StatusOr<std::shared_ptr<PluginProcess>> Start(Options options);
  ~PluginProcess();
  PluginProcess(const PluginProcess&) = delete;
  PluginProcess& operator=(const PluginProcess&) = delete;

  /// Ends the process and the workers; calls fail from here on. Not from a worker's thread. Called once, or by the
  /// destructor.
  void Stop();

  const std::string& path() const { return options_.path; }
  const std::string& name() const { return name_; }
  const std::string& help() const { return help_; }
  OptionalEntries optional_entries() const { return entries_; }
  WorkerPool* workers() const { return workers_.get(); }
  pid_t pid() const;  // 0: there is none at the moment

  /// A number for a codec of this plug-in.
  uint64_t NewCodec();
  /// That codec is used no more: it is dropped in the process before the next call.
  void Drop(uint64_t codec);

  /// Waits for a free lane. Errors: UNAVAILABLE while there is no process.
  absl::StatusOr<LaneUse> Take();

  /// The error of a call that was not answered, and whether `error` is one.
  absl::Status Unanswered(absl::string_view why) const;
  static bool IsUnanswered(const absl::Status& error);

 private:
  struct Lane {
    int socket = -1;
    uint8_t* memory = nullptr;
    bool taken = false;
    std::thread::id last;  // who had it last
    uint32_t number = 0;   // of the last call
    // What of pages lies in its memory, from the last call; codec 0: nothing.
    uint64_t pages_codec = 0;
    uint32_t pages_layer = 0;
    std::vector<const uint8_t*> pages;
  };
  struct Started {
    std::string name, help;
    OptionalEntries entries;
  };

  PluginProcess(Options options, std::unique_ptr<Region> memory);
  void Wake();
  void GiveBack(Lane& lane);
  void EndProcess(uint64_t start, absl::string_view why);

  // The supervising thread's.
  void Run();
  absl::StatusOr<Started> StartProcess();
  absl::StatusOr<Started> WaitUntilReady();
  /// Until it has ended or should be.
  void Watch();
  std::string End();
  bool Pause(int64_t ms);

  const Options options_;
  const std::unique_ptr<Region> memory_;
  int wake_fd_ = -1;
  std::unique_ptr<WorkerPool> workers_;
  std::string name_, help_;  // of the first start, as the entries; every later one has the same
  OptionalEntries entries_;
  std::thread thread_;

  // The supervising thread's.
  ChildProcess child_;
  int control_ = -1, pid_fd_ = -1;

  mutable Mutex mutex_;
  std::condition_variable changed_;
  std::vector<Lane> lanes_;                                // of one that is taken, all but `taken` is its LaneUse's
  std::vector<uint64_t> dropped_ ABSL_GUARDED_BY(mutex_);  // at most the codecs that the process has
  uint64_t newest_codec_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t start_ ABSL_GUARDED_BY(mutex_) = 0;
  pid_t pid_ ABSL_GUARDED_BY(mutex_) = 0;        // of the process that serves; 0: none does
  std::string why_end_ ABSL_GUARDED_BY(mutex_);  // empty: it should not end
  absl::Status first_start_ ABSL_GUARDED_BY(mutex_);
  bool started_ ABSL_GUARDED_BY(mutex_) = false;  // the first start has gone well or not
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

class PluginProcess::LaneUse {
 public:
  LaneUse(LaneUse&& other) noexcept;
  LaneUse& operator=(LaneUse&&) = delete;
  ~LaneUse();

  uint8_t* memory() const { return lane_->memory; }
  uint64_t start() const { return start_; }
  /// Codecs that the process still has and nobody uses; the next call's maker drops them.
  std::vector<uint64_t> TakeDropped() { return std::exchange(dropped_, {}); }

  /// Makes a call, and waits for its answer. fd: goes along; -1: none. Errors: the plug-in's, named by `entry`; those
  /// of Unanswered.
  absl::Status Ask(plugin::Call call, absl::string_view entry, int fd = -1);

  /// Whether these pages of a codec's layer lie in the memory already, from this thread's last call in this lane.
  bool HasPages(uint64_t codec, uint32_t layer, absl::Span<const uint8_t* const> pages) const;
  void NotePages(uint64_t codec, uint32_t layer, absl::Span<const uint8_t* const> pages);

 private:
  friend class PluginProcess;
  LaneUse(PluginProcess* process, Lane* lane, uint64_t start, bool own, std::vector<uint64_t> dropped)
      : process_(process), lane_(lane), start_(start), own_(own), dropped_(std::move(dropped)) {}
  absl::Status Failed(absl::string_view entry, absl::string_view why);

  PluginProcess* process_;
  Lane* lane_;
  const uint64_t start_;
  const bool own_;  // this thread had the lane last
  std::vector<uint64_t> dropped_;
};

}  // namespace kvmanager
