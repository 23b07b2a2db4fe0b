// Runs checked steps of caches in host memory: append, then attend, then the reply.
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
#include "kvmanager/gpu/step_cache.h"
#include "kvmanager/rpc/rpc_metrics.h"
#include "kvmanager/rpc/session.h"
#include "kvmanager/rpc/step_check.h"
#include "kvmanager/store/quality.h"

namespace kvmanager {

/// Upper bound of the multiply-adds that run on the event loop: about 20 us of one core.
constexpr uint64_t kLoopMultiplyAddsMax = 1 << 18;

using StepContext = capnp::CallContext<api::Cache::StepParams, api::Cache::StepResults>;

class HostSteps {
 public:
  /// Everything outlives this and the steps that it runs.
  struct Parts {
    PageStore* store = nullptr;
    WorkerPool* workers = nullptr;
    MessageQueue* queue = nullptr;
    const Clock* clock = nullptr;
    QualityMonitor* quality = nullptr;  // nullptr: no query is noted
    AttendMetrics* metrics = nullptr;
  };

  explicit HostSteps(const Parts& parts) : parts_(parts) {}
  HostSteps(const HostSteps&) = delete;
  HostSteps& operator=(const HostSteps&) = delete;

  /// `step` refers to the call's parameters. An error has changed nothing.
  absl::StatusOr<kj::Promise<void>> Run(const std::shared_ptr<Session>& session, const StepCache& cache,
                                        const CheckedStep& step, StepContext& context) const;

 private:
  const Parts parts_;
};

}  // namespace kvmanager
