// Steps of an engine that attends in its own process: what its kernels may touch, and until when.
//
// The process maps slabs of its tenant; for each step the store extends its sequences, and the reply says which slots
// changed and which pages it shall encode. How far its kernels are, its streams say by the words `released` (epochs of
// plans) and `encoded` (batches), which are believed for what is its own alone: no slot that it maps changes tenant.
//
// When the connection ends, its kernels may still run: the epochs, slabs and pages that are its stay as they are until
// its process is gone, as a pidfd says. The loop's thread.
#pragma once

#include <kj/async-unix.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/base/event_loop.h"
#include "kvmanager/base/piece_ring.h"
#include "kvmanager/base/poll_list.h"
#include "kvmanager/gpu/device_encodes.h"
#include "kvmanager/gpu/gpu.h"
#include "kvmanager/memory/release_epochs.h"
#include "kvmanager/memory/shared_semaphores.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/step_cache.h"

namespace kvmanager {

class DepartedProcesses;

class ProcessSteps : public std::enable_shared_from_this<ProcessSteps> {
 public:
  /// Of one plan, as ExtendReply's.
  struct Plan {
    uint64_t epoch = 0;
    std::vector<uint32_t> changes;
    std::vector<uint32_t> encode_items;
    uint64_t encode_batch = 0;
    uint32_t encode_at = 0;
  };
  static constexpr size_t kChangesWordsMax = 4 << 20;                     // of one reply
  static constexpr uint64_t kPlanPagesMax = DeviceEncodes::kJobItemsMax;  // that one plan fills, in all layers

  /// What the steps of every process use. Everything outlives them.
  struct Parts {
    PageStore* store = nullptr;
    PollList* polls = nullptr;
    DepartedProcesses* departed = nullptr;
  };

  /// gpu: outlives this. pid: of the client's process. Errors: FAILED_PRECONDITION, when it cannot be watched.
  static absl::StatusOr<std::shared_ptr<ProcessSteps>> Create(const Parts& parts, Gpu* gpu,
                                                              std::shared_ptr<SharedSemaphores> words, uint32_t pid);
  ~ProcessSteps();
  ProcessSteps(const ProcessSteps&) = delete;
  ProcessSteps& operator=(const ProcessSteps&) = delete;

  /// The connection has ended: DepartedProcesses keeps this until the process is gone.
  void Close();
  void Forget(SequenceId sequence) {
    words_of_.erase(sequence);
    broken_.erase(sequence);
  }

  /// A slab's descriptor, the caller's. Errors: NOT_FOUND for one in which the cache's tenant has no slot.
  absl::StatusOr<int> MapSlab(CacheId cache, uint32_t slab);

  absl::Status CheckSequence(SequenceId sequence) const;
  /// Whether one more plan may be outstanding, that seals so many pages more and has so many changes of tables to
  /// tell, beside what others that are not planned yet have reserved. Errors: RESOURCE_EXHAUSTED.
  absl::Status CheckRoom(uint64_t pages, uint64_t changes) const;
  /// Pages of a plan that is still to be made, from its CheckRoom to its end.
  void ReserveFlags(uint64_t pages) { reserved_flags_ += pages; }
  void ReleaseFlags(uint64_t pages) { reserved_flags_ -= pages; }
  /// What PageStore::Append gave to be encoded. The queue is of all who use this GPU: to be called right after it.
  std::vector<DeviceEncodeJob> TakeJobs();
  std::vector<DeviceIndexJob> TakeIndexJobs();
  /// After PageStore::Append and Attend of all layers. words: of each entry's sequence in the non-finite table. jobs:
  /// TakeJobs'; empty afterwards, once the plan is open.
  absl::StatusOr<Plan> MakePlan(const StepCache& cache, absl::Span<const AttendEntry> entries,
                                absl::Span<const uint32_t> words, bool encode_here, std::vector<DeviceEncodeJob>* jobs);

  /// What was reserved for `entries` cannot be planned: they can only be dropped, and their pages stay raw.
  void Break(absl::Span<const AttendEntry> entries, std::vector<DeviceEncodeJob> jobs, const absl::Status& status);

  /// Of the newest plan; 0: none yet.
  uint64_t epoch() const { return epoch_; }
  /// Whether its kernels have done with all plans up to this one, or are gone with it.
  bool HasReleased(uint64_t epoch) const { return !holds_ || HasRun(epoch, 0); }
  /// What was reserved for these is to be planned; and is, or can only be dropped.
  void ReserveTokens(absl::Span<const AttendEntry> entries);
  void ReleaseTokens(absl::Span<const AttendEntry> entries);
  /// Tokens of the sequence before this one are in plans, if in any.
  uint64_t planned_to(SequenceId sequence) const;
  /// Whether this process has written all that was reserved for the sequence so far.
  bool HasWritten(SequenceId sequence) const;
  /// Calls `fn` once, when what was reserved for `sequence` is planned, all plans so far are released and their pages
  /// encoded; never, if it closes before.
  void WhenRun(SequenceId sequence, absl::AnyInvocable<void()> fn);
  /// The connection has ended.
  bool closed() const { return closed_; }

 private:
  struct Batch {
    DeviceEncodeJob job;
    uint64_t number = 0;
    uint32_t at = 0;  // in the ring of flags
  };

  friend class DepartedProcesses;

  ProcessSteps(const Parts& parts, Gpu* gpu, std::shared_ptr<SharedSemaphores> words)
      : parts_(parts), gpu_(*gpu), words_(std::move(words)) {}
  bool HasRun(uint64_t epoch, uint64_t batch) const;
  bool EndBatches();  // that are encoded; true: none is left
  void ProcessGone();
  absl::Status DescribeChanges(const StepCache& cache, uint32_t entry, SequenceId sequence,
                               std::vector<uint32_t>* changes);
  absl::Status StartJobs(const StepCache& cache, bool encode_here, std::vector<DeviceEncodeJob>* jobs, Plan* plan);

  const Parts parts_;
  Gpu& gpu_;
  std::shared_ptr<SharedSemaphores> words_;
  ReleaseEpochs::HolderId holder_ = 0;
  bool holds_ = false;
  uint64_t epoch_ = 0;
  absl::flat_hash_set<uint32_t> slabs_;  // exported to this process
  struct NonFiniteWord {
    uint32_t word = 0;   // in the table
    uint64_t since = 0;  // the plan whose kernels clear it
    uint64_t last = 0;   // the newest plan of the sequence
  };
  absl::flat_hash_map<SequenceId, NonFiniteWord> words_of_;
  absl::flat_hash_map<SequenceId, absl::Status> broken_;
  absl::flat_hash_map<SequenceId, std::vector<uint64_t>> reserved_;  // from which tokens on, and not planned
  std::deque<Batch> batches_;
  uint64_t last_batch_ = 0;
  PieceRing flags_{SharedSemaphores::kDeclinedWords};  // of `batches_`
  uint64_t reserved_flags_ = 0;                        // of `flags_`, by plans that are still to be made
  bool polling_ = false, closed_ = false;
  kj::AutoCloseFd pidfd_;
};

/// Steps of processes whose connections have ended: keeps what their kernels may still touch until they are gone.
/// Owned by the daemon's wiring. The loop's thread.
class DepartedProcesses {
 public:
  /// loop: outlives this.
  explicit DepartedProcesses(EventLoop* loop) : loop_(loop) {}
  DepartedProcesses(const DepartedProcesses&) = delete;
  DepartedProcesses& operator=(const DepartedProcesses&) = delete;

  void Keep(std::shared_ptr<ProcessSteps> process);
  /// Keeps none any more: the daemon ends.
  void Clear() { kept_.clear(); }

 private:
  struct Kept {
    std::shared_ptr<ProcessSteps> process;
    kj::Own<kj::UnixEventPort::FdObserver> observer;
    kj::Promise<void> gone = nullptr;
  };

  EventLoop* const loop_;
  uint64_t next_ = 0;
  absl::flat_hash_map<uint64_t, Kept> kept_;
};

}  // namespace kvmanager
