// The calls of a cache on a GPU: checked, booked with the store, submitted or planned, answered.
//
// A call that finds no room because kernels still read what was given up waits a little and tries again; one whose
// pages are still to be encoded waits for them. Nothing here waits for a GPU on the loop's thread.
#pragma once

#include <kj/async.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/rpc/session.h"
#include "kvmanager/rpc/step.h"
#include "kvmanager/rpc/step_check.h"

namespace kvmanager {

/// As RunStep. ready: StepRequest's.
absl::StatusOr<kj::Promise<void>> RunDeviceStep(const std::shared_ptr<Session>& session, const StepCache& cache,
                                                const CheckedStep& step, uint64_t ready, StepContext& context);

using ExtendContext = capnp::CallContext<api::Cache::ExtendParams, api::Cache::ExtendResults>;
absl::StatusOr<kj::Promise<void>> RunExtend(const std::shared_ptr<Session>& session, const StepCache& cache,
                                            ExtendContext& context);

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

/// Tells the store (PageStore::Written) once the first tokens[i] tokens of layer first_layer + i are written, which
/// were all booked: at once if they are, and never if the connection ends before.
void TellWhenWritten(Session& session, const StepCache& cache, SequenceId sequence, int first_layer,
                     std::vector<uint64_t> tokens);

/// A fork was made by the last change.
void NoteFork(Session& session, const StepCache& cache, SequenceId fork);

/// Whether everything that was booked for the sequence so far is written.
bool HasWritten(Session& session, const StepCache& cache, SequenceId sequence);

}  // namespace kvmanager
