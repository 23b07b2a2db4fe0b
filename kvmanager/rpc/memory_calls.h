// What the calls of a cache do with its memory: the host's, where everything is written when a call returns
// (host_calls.h), or a GPU's, where kernels of the daemon and of the engine write behind it (device_calls.h).
//
// A cache's capability chooses one of the two, and nothing behind it asks which. The loop's thread.
#pragma once

#include <kj/async.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/rpc/step_check.h"
#include "kvmanager/store/step_cache.h"

namespace kvmanager {

class Session;

using StepContext = capnp::CallContext<api::Cache::StepParams, api::Cache::StepResults>;
using ExtendContext = capnp::CallContext<api::Cache::ExtendParams, api::Cache::ExtendResults>;

/// A fork, and the value of `done` (StepReply) that says that its open pages are copied; 0: they are.
struct Forked {
  SequenceId sequence = 0;
  uint64_t copied = 0;
};

class MemoryCalls {
 public:
  virtual ~MemoryCalls() = default;

  /// Runs a step and replies. `step` refers to the call's parameters. An error of the append has changed nothing; after
  /// one of the attention the tokens are appended. Where a GPU refuses the work, its sequences can only be dropped.
  virtual absl::StatusOr<kj::Promise<void>> Step(const std::shared_ptr<Session>& session, const StepCache& cache,
                                                 const CheckedStep& step, StepContext& context) const = 0;
  /// Plans a step of the engine's own kernels and replies. Errors: FAILED_PRECONDITION where engines have none.
  virtual absl::StatusOr<kj::Promise<void>> Extend(const std::shared_ptr<Session>& session, const StepCache& cache,
                                                   ExtendContext& context) const = 0;
  /// An arena in the cache's memory; empty: unknown, or in another.
  virtual absl::Span<uint8_t> ArenaBytes(const Session& session, const StepCache& cache, uint32_t arena) const = 0;

  // A sequence of this connection, of the cache.

  /// An error if the sequence can only be dropped: an append wrote a NaN or an infinity, or could not run. On a GPU
  /// also FAILED_PRECONDITION where this connection has no stream there.
  virtual absl::Status CheckUsable(Session& session, const StepCache& cache, SequenceId sequence) const = 0;
  /// Whether everything that was appended to it so far is written.
  virtual bool HasWritten(Session& session, const StepCache& cache, SequenceId sequence) const = 0;
  /// Resolves once everything has run that this connection submitted or planned so far, for whichever sequence, with
  /// CheckUsable's result. Not at all if the connection ends before.
  virtual kj::Promise<absl::Status> WhenAllWritten(const std::shared_ptr<Session>& session, const StepCache& cache,
                                                   SequenceId sequence) const = 0;
  /// Tells the store (Exports::Written) once the first tokens[i] tokens of layer first_layer + i are written, which
  /// were all appended: at once if they are, and never if the connection ends before. Nothing where every append is
  /// written at once.
  virtual void TellWhenWritten(Session& session, const StepCache& cache, SequenceId sequence, int first_layer,
                               std::vector<uint64_t> tokens) const = 0;
  /// Forks it (SequenceTable::Fork). Errors: the store's; those of CheckUsable.
  virtual absl::StatusOr<Forked> Fork(Session& session, const StepCache& cache, SequenceId sequence) const = 0;
  /// Crops it to so many tokens (SequenceTable::Crop). Returns Forked::copied of the page that is open then. Errors: as
  /// Fork's.
  virtual absl::StatusOr<uint64_t> Crop(Session& session, const StepCache& cache, SequenceId sequence,
                                        uint64_t tokens) const = 0;
  /// Whether what could not be sent out of this memory, for this reason, may be sent as a copy in the host's.
  virtual bool GoesByHost(const absl::Status& why) const = 0;
};

/// A cache that a connection opened.
struct BoundCache {
  CacheConfig config;  // as opened: the codec's spec is canonical
  StepCache cache;     // its config is this one's
  const MemoryCalls* calls = nullptr;
};

}  // namespace kvmanager
