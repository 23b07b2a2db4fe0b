// Steps that the daemon runs on a GPU for one connection.
//
// A step's appends and attention go to the connection's stream (DeviceStream), behind the engine's `ready` word; the
// reply goes out once they are submitted. Attention that would take the GPU for long goes there in several launches,
// each a submission of its own (launch_cuts.h), so that other connections' steps have their turn. The store keeps the
// books; this class keeps each cache's tables on the device in step with them, opens a plan of ReleaseEpochs for each
// submission, and posts the pages that a step filled for encoding once their bytes are there. Owned by the session, and
// by its stream while that drains. The loop's thread.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/attention.h"
#include "attention/device_step.h"
#include "kvmanager/base/poll_list.h"
#include "kvmanager/gpu/device_stream.h"
#include "kvmanager/gpu/gpu.h"
#include "kvmanager/gpu/launch_cuts.h"
#include "kvmanager/gpu/step_turns.h"
#include "kvmanager/memory/release_epochs.h"
#include "kvmanager/store/page_store.h"
#include "kvmanager/store/quality.h"
#include "kvmanager/store/step_cache.h"

namespace kvmanager {

/// Where a step's tensors are on the device, and from when on.
struct DeviceTensors {
  const void* k = nullptr;  // nullptr: nothing is appended
  const void* v = nullptr;
  const void* q = nullptr;  // nullptr: no attention
  void* out = nullptr;
  float* lse = nullptr;
  uint64_t ready = 0;  // DeviceStream::Begin's
};

/// What an entry's queries read, as its AttendLease says.
struct EntryReading {
  uint32_t aged = 0;
  uint64_t sparse_from = UINT64_MAX;
};

/// OK for 0; else what the word of a non-finite table says of a sequence: INVALID_ARGUMENT.
absl::Status NonFiniteStatus(SequenceId sequence, uint64_t word);

class DeviceWork {
 public:
  static constexpr uint64_t kAllPages = UINT64_MAX;  // of a sequence: none is gone
  static constexpr size_t kRunsMax = 4;              // caches of one connection on one GPU
  static constexpr uint32_t kSequencesMax = 1024;    // of a cache, of one connection
  static constexpr int kStepTokensMax = 16384;       // of all entries of a step
  /// Launches of a step that was cut, which the stream has yet to pass: some 30 ms of work, and room for other calls.
  static constexpr uint64_t kLaunchesAhead = DeviceStream::kSubmissionsMax / 2;
  static_assert(kRunsMax * kSequencesMax <= SharedSemaphores::kNonFiniteWords);

  /// What the steps of every connection use. Everything outlives them.
  struct Parts {
    PageStore* store = nullptr;
    PollList* polls = nullptr;
    QualityMonitor* quality = nullptr;  // nullptr: no query is noted
  };

  /// stream: of `gpu`, which outlives it.
  static absl::StatusOr<std::shared_ptr<DeviceWork>> Create(const Parts& parts, Gpu* gpu,
                                                            std::shared_ptr<DeviceStream> stream);
  ~DeviceWork();
  DeviceWork(const DeviceWork&) = delete;
  DeviceWork& operator=(const DeviceWork&) = delete;

  Gpu& gpu() const { return gpu_; }
  const std::shared_ptr<DeviceStream>& stream() const { return stream_; }

  /// A sequence is given up, before the store drops it.
  void Forget(SequenceId sequence);
  /// What an earlier append found in the sequence, or could not do: INVALID_ARGUMENT for a NaN or an infinity, saying
  /// where. From then on the sequence can only be dropped.
  absl::Status CheckSequence(SequenceId sequence, CacheId cache) const;
  /// Whether a step may be of so many tokens. Errors: INVALID_ARGUMENT.
  static absl::Status CheckTokens(uint64_t tokens);
  /// Whether a step can be submitted now: the stream is not too far behind.
  bool HasRoom() const;
  /// The same of one more launch of a step that was cut.
  bool HasRoomForLaunch() const { return stream_->submitted() - stream_->passed() < kLaunchesAhead; }
  /// The order of the connection's steps.
  StepTurns& turns() { return turns_; }

  /// What one launch may attend to of these entries, which read `pages`: everything, as a rule.
  LaunchCut CutOf(const StepCache& cache, int layer, absl::Span<const AttendEntry> entries,
                  absl::Span<const EntryReading> readings, ReadForm pages);

  struct Submitted {
    uint64_t done = 0;  // what `done` will be
    /// False: there were no queries, or so many of their pages are there in their raw form alone that they would take
    /// too long. They are to be cut again (CutOf) for ReadForm::kRaw.
    bool attended = false;
  };
  /// After PageStore::Append to one layer, or without. readings: of each entry; empty for an append alone. pages: what
  /// CutOf took the entries to read. Adds to *counts what the queries read. An error leaves the sequences of entries
  /// that were to be appended to unusable.
  absl::StatusOr<Submitted> Submit(const StepCache& cache, int layer, absl::Span<const AttendEntry> entries,
                                   absl::Span<const EntryReading> readings, const DeviceTensors& tensors,
                                   ReadForm pages, AttentionCounts* counts);
  /// Of a fork or crop: `change` makes it in the store, inside a plan, since the store gives up pages that are still to
  /// be copied; then its copies are enqueued. `sequence` has no pages from `pages` on. released: first the
  /// engine's kernels are to have come so far. Errors: change's, which then changed nothing.
  absl::StatusOr<uint64_t> Copy(const StepCache& cache, SequenceId sequence, uint64_t pages, uint64_t released,
                                absl::FunctionRef<absl::Status(std::vector<OpenCopy>*)> change);

  /// Whether the stream has written all that was submitted for the sequence so far.
  bool HasWritten(SequenceId sequence) const {
    const auto found = written_.find(sequence);
    return found == written_.end() || stream_->passed() >= found->second;
  }
  /// What was submitted last writes pages of this sequence: it is a fork.
  void NoteFork(SequenceId sequence) { written_[sequence] = stream_->submitted(); }
  /// Whether everything submitted so far has run, when `fn` is asked: calls it once then, on the loop; never, if the
  /// stream closes before.
  void WhenRun(absl::AnyInvocable<void()> fn);

 private:
  /// Rows of queries on their way to the quality monitor; shared by the run and by those who wait for one.
  struct QueryRows {
    std::unique_ptr<PinnedRegion> memory;  // [kQueryRowsMax] rows
    uint32_t taken = 0;                    // bits
  };
  static constexpr uint32_t kQueryRowsMax = 16;  // of a cache; what comes meanwhile is not copied

  /// One cache.
  struct Run {
    std::shared_ptr<const DeviceCodec> codec;  // outlives the step, as the next does
    std::unique_ptr<PinnedRegion> upload;
    std::unique_ptr<DeviceStep> step;
    struct Place {
      uint32_t place = 0;
      uint64_t since = 0;  // the submission that clears its non-finite word
    };
    absl::flat_hash_map<SequenceId, Place> places;
    uint32_t first_word = 0;          // of its places, in the stream's non-finite table
    std::shared_ptr<QueryRows> rows;  // nullptr before the first
  };

  DeviceWork(const Parts& parts, Gpu* gpu, std::shared_ptr<DeviceStream> stream)
      : parts_(parts), gpu_(*gpu), stream_(std::move(stream)) {}
  absl::StatusOr<Run*> RunOf(const StepCache& cache);
  void DropRunsOfClosedCaches();
  /// *attended: Submitted's.
  absl::Status Enqueue(const StepCache& cache, Run& run, int layer, absl::Span<const AttendEntry> entries,
                       absl::Span<const EntryReading> readings, const DeviceTensors& tensors, ReadForm pages,
                       bool* attended);
  AttentionRates RatesOf(const StepCache& cache, int layer) const;
  void ListWork(absl::Span<const AttendEntry> entries, absl::Span<const EntryReading> readings);
  absl::Status CopyQueryRow(const StepCache& cache, Run& run, int layer, absl::Span<const AttendEntry> entries,
                            const void* q);
  absl::StatusOr<uint32_t> PlaceOf(Run& run, SequenceId sequence);
  absl::Status Describe(Run& run, SequenceId sequence, int layer, uint32_t place);
  template <typename Work>
  absl::StatusOr<uint64_t> Submission(uint64_t ready, Work work);
  void PostEncodes(const StepCache& cache);

  const Parts parts_;
  Gpu& gpu_;
  const std::shared_ptr<DeviceStream> stream_;
  ReleaseEpochs::HolderId holder_ = 0;
  bool holds_ = false;
  absl::flat_hash_map<CacheId, std::unique_ptr<Run>> runs_;
  absl::flat_hash_map<SequenceId, absl::Status> broken_;
  absl::flat_hash_map<SequenceId, uint64_t> written_;  // the submission that writes its pages last
  StepTurns turns_;
  std::vector<PagePlace> changes_;  // scratch
  std::vector<AttentionWork> work_;
  std::vector<DeviceStep::Entry> entries_;
};

}  // namespace kvmanager
