// The calls of a cache in host memory. A step appends, then attends, then replies; everything is written when a call
// returns.
//
// Small steps run on the event loop, straight into the reply: no thread is woken, little is allocated. Larger ones run
// on the workers, on a call object that owns everything the workers touch (pages, arenas, copies of q, outputs) until
// they are done, so that cancelling the call, or losing the client, is safe at any moment.
#pragma once

#include <kj/async.h>

#include <cstdint>
#include <memory>

#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/rpc/memory_calls.h"
#include "kvmanager/rpc/rpc_metrics.h"
#include "kvmanager/rpc/session.h"
#include "kvmanager/rpc/taking_turns.h"
#include "kvmanager/store/quality.h"

namespace kvmanager {

/// Upper bound of the multiply-adds that run on the event loop: about 20 us of one core.
constexpr uint64_t kLoopMultiplyAddsMax = 1 << 18;

/// Of K, V and X together; more is copied by workers. What is appended inline has at least as much, or the request is
/// small and is not kept (MessageMemory::kKeptBytesMin).
constexpr uint64_t kLoopAppendBytesMax = 1 << 20;

/// Of pages that an append opens; more are opened by workers, since each may have to be zeroed first.
constexpr uint64_t kLoopOpenedBytesMax = 4 << 20;

/// Pages that an append opens, or ages, at once; more are in turns.
constexpr uint64_t kLoopAppendPagesMax = 256;

/// Pages that an attention of the loop's lists at once; more are listed in turns.
constexpr uint64_t kLoopPagesMax = 1024;

/// Of queries that a worker looks at before it looks at the clock.
constexpr uint64_t kQueryPieceBytes = 256 << 10;

class HostCalls final : public MemoryCalls {
 public:
  /// Everything outlives this and the calls that it runs.
  struct Parts {
    PageStore* store = nullptr;
    WorkerPool* workers = nullptr;
    MessageQueue* queue = nullptr;
    TakingTurns* long_calls = nullptr;
    const Clock* clock = nullptr;
    QualityMonitor* quality = nullptr;  // nullptr: no query is noted
    AttendMetrics* metrics = nullptr;
  };

  explicit HostCalls(const Parts& parts) : parts_(parts) {}
  HostCalls(const HostCalls&) = delete;
  HostCalls& operator=(const HostCalls&) = delete;

  absl::StatusOr<kj::Promise<void>> Step(const std::shared_ptr<Session>& session, const StepCache& cache,
                                         const CheckedStep& step, StepContext& context) const override;
  absl::StatusOr<kj::Promise<void>> Extend(const std::shared_ptr<Session>& session, const StepCache& cache,
                                           ExtendContext& context) const override;
  absl::Span<uint8_t> ArenaBytes(const Session& session, const StepCache& cache, uint32_t arena) const override;
  absl::Status CheckUsable(Session&, const StepCache&, SequenceId) const override { return absl::OkStatus(); }
  bool HasWritten(Session&, const StepCache&, SequenceId) const override { return true; }
  kj::Promise<absl::Status> WhenAllWritten(const std::shared_ptr<Session>&, const StepCache&,
                                           SequenceId) const override {
    return absl::OkStatus();
  }
  void TellWhenWritten(Session&, const StepCache&, SequenceId, int, std::vector<uint64_t>) const override {}
  absl::StatusOr<Forked> Fork(Session& session, const StepCache& cache, SequenceId sequence) const override;
  absl::StatusOr<uint64_t> Crop(Session& session, const StepCache& cache, SequenceId sequence,
                                uint64_t tokens) const override;
  bool GoesByHost(const absl::Status&) const override { return false; }

 private:
  struct LargeStep;

  /// A step whose queries are looked at.
  absl::StatusOr<kj::Promise<void>> AppendAndAttend(const std::shared_ptr<Session>& session, const StepCache& cache,
                                                    const CheckedStep& step, StepContext& context) const;
  /// The attention of a step whose tokens are appended.
  absl::StatusOr<kj::Promise<void>> Attend(const std::shared_ptr<Session>& session, const StepCache& cache,
                                           const CheckedStep& step, StepContext& context) const;
  kj::Promise<void> CheckByWorkers(const std::shared_ptr<LargeStep>& large, StepContext& context) const;
  kj::Promise<void> AppendInTurns(const std::shared_ptr<LargeStep>& large, StepContext& context) const;
  kj::Promise<void> AttendInTurns(const std::shared_ptr<LargeStep>& large, StepContext& context) const;
  absl::StatusOr<kj::Promise<void>> AttendWith(std::unique_ptr<AttendLease> lease,
                                               const std::shared_ptr<Session>& session, const StepCache& cache,
                                               const CheckedStep& step, StepContext& context) const;
  static kj::Promise<void> GoOn(LargeStep& large, absl::StatusOr<kj::Promise<void>> rest, StepContext& context);

  const Parts parts_;
};

}  // namespace kvmanager
