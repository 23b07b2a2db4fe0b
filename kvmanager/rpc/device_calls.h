// The calls of a cache on a GPU: checked, reserved with the store, submitted or planned, answered.
//
// A call that finds no room because kernels still read what was given up waits a little and tries again; one whose
// pages are still to be encoded waits for them. Nothing here waits for a GPU on the loop's thread.
#pragma once

#include <kj/async.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/event_loop.h"
#include "kvmanager/base/poll_list.h"
#include "kvmanager/gpu/gpu.h"
#include "kvmanager/rpc/rpc_metrics.h"
#include "kvmanager/rpc/session.h"
#include "kvmanager/rpc/step.h"
#include "kvmanager/rpc/step_check.h"
#include "kvmanager/store/quality.h"

namespace kvmanager {

using ExtendContext = capnp::CallContext<api::Cache::ExtendParams, api::Cache::ExtendResults>;

class DeviceCalls {
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

  /// As HostSteps::Run. ready: StepRequest's.
  absl::StatusOr<kj::Promise<void>> RunStep(const std::shared_ptr<Session>& session, const StepCache& cache,
                                            const CheckedStep& step, uint64_t ready, StepContext& context) const;
  absl::StatusOr<kj::Promise<void>> RunExtend(const std::shared_ptr<Session>& session, const StepCache& cache,
                                              ExtendContext& context) const;

  /// Tells the store (PageStore::Written) once the first tokens[i] tokens of layer first_layer + i are written, which
  /// were all reserved: at once if they are, and never if the connection ends before.
  void TellWhenWritten(Session& session, const StepCache& cache, SequenceId sequence, int first_layer,
                       std::vector<uint64_t> tokens) const;

  // What the calls use.
  const Parts& parts() const { return parts_; }

 private:
  const Parts parts_;
};

/// Forks or crops a sequence of this connection by `change`. sequence: whose pages from `pages` on are gone.
/// Returns the value of `done` that says that open pages are copied.
absl::StatusOr<uint64_t> ChangeOnDevice(Session& session, const StepCache& cache, SequenceId sequence, uint64_t pages,
                                        absl::FunctionRef<absl::Status(std::vector<OpenCopy>*)> change);

/// Resolves once all that this connection submitted or planned on the cache's GPU so far has run, with the error of the
/// sequence, if its appends found one. Not at all if the connection ends before.
kj::Promise<absl::Status> WhenAppended(const std::shared_ptr<Session>& session, const StepCache& cache,
                                       SequenceId sequence);

/// What earlier calls found in the sequence or could not do with it: an error, and it can only be dropped.
absl::Status CheckOnDevice(Session& session, const StepCache& cache, SequenceId sequence);

/// A fork was made by the last change.
void NoteFork(Session& session, const StepCache& cache, SequenceId fork);

/// Whether everything that was reserved for the sequence so far is written.
bool HasWritten(Session& session, const StepCache& cache, SequenceId sequence);

}  // namespace kvmanager
