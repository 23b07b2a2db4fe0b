// The calls of a cache on a GPU: checked, reserved with the store, submitted or planned, answered.
//
// A call that finds no room because kernels still read what was given up waits a little and tries again; one whose
// pages are still to be encoded waits for them. Nothing here waits for a GPU on the loop's thread.
#pragma once

#include <kj/async.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/event_loop.h"
#include "kvmanager/base/poll_list.h"
#include "kvmanager/gpu/gpu.h"
#include "kvmanager/rpc/memory_calls.h"
#include "kvmanager/rpc/rpc_metrics.h"
#include "kvmanager/rpc/session.h"
#include "kvmanager/store/quality.h"

namespace kvmanager {

class DeviceCalls final : public MemoryCalls {
 public:
  /// Everything outlives this and the calls that it runs.
  struct Parts {
    PageStore* store = nullptr;
    PollList* polls = nullptr;
    EventLoop* loop = nullptr;
    const Clock* clock = nullptr;
    QualityMonitor* quality = nullptr;  // nullptr: no query is noted
    Gpus gpus;
    AttendMetrics* metrics = nullptr;
  };

  explicit DeviceCalls(const Parts& parts) : parts_(parts) {}
  DeviceCalls(const DeviceCalls&) = delete;
  DeviceCalls& operator=(const DeviceCalls&) = delete;

  absl::StatusOr<kj::Promise<void>> Step(const std::shared_ptr<Session>& session, const StepCache& cache,
                                         const CheckedStep& step, StepContext& context) const override;
  absl::StatusOr<kj::Promise<void>> Extend(const std::shared_ptr<Session>& session, const StepCache& cache,
                                           ExtendContext& context) const override;
  absl::Span<uint8_t> ArenaBytes(const Session& session, const StepCache& cache, uint32_t arena) const override;
  absl::Status CheckUsable(Session& session, const StepCache& cache, SequenceId sequence) const override;
  bool HasWritten(Session& session, const StepCache& cache, SequenceId sequence) const override;
  kj::Promise<absl::Status> WhenAllWritten(const std::shared_ptr<Session>& session, const StepCache& cache,
                                           SequenceId sequence) const override;
  void TellWhenWritten(Session& session, const StepCache& cache, SequenceId sequence, int first_layer,
                       std::vector<uint64_t> tokens) const override;
  absl::StatusOr<Forked> Fork(Session& session, const StepCache& cache, SequenceId sequence) const override;
  absl::StatusOr<uint64_t> Crop(Session& session, const StepCache& cache, SequenceId sequence,
                                uint64_t tokens) const override;
  bool GoesByHost(const absl::Status& why) const override;

  // What the calls use.
  const Parts& parts() const { return parts_; }

 private:
  /// Forks or crops by `change`, which says what is to be copied, and copies it. pages: what a crop leaves.
  absl::StatusOr<uint64_t> Change(Session& session, const StepCache& cache, SequenceId sequence, uint64_t pages,
                                  absl::FunctionRef<absl::Status(std::vector<OpenCopy>*)> change) const;

  const Parts parts_;
};

}  // namespace kvmanager
