// Runs checked reads: K and V of tokens, out of pages that are raw or decoded, into dense rows.
//
// It runs on the workers, page by page, on a call object that owns everything they touch (pages, arenas, inline rows)
// until they are done, so that cancelling the call, or losing the client, is safe at any moment. A worker decodes one
// page at a time into scratch of its own, in turns (worker_pool.h), so that a long read does not keep others waiting.
//
// Pages of a GPU are copied to the host first, some at a time (device_reads.h), once this connection's kernels have
// written what was appended.
#pragma once

#include <kj/async.h>

#include <memory>

#include "kvmanager/api/kvmanager.capnp.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/message_queue.h"
#include "kvmanager/base/poll_list.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/gpu/gpu.h"
#include "kvmanager/rpc/rpc_metrics.h"
#include "kvmanager/rpc/session.h"
#include "kvmanager/rpc/step_check.h"
#include "kvmanager/store/step_cache.h"

namespace kvmanager {

using ReadContext = capnp::CallContext<api::Cache::ReadParams, api::Cache::ReadResults>;

class Reads {
 public:
  /// Everything outlives this and the reads that it runs.
  struct Parts {
    PageStore* store = nullptr;
    WorkerPool* workers = nullptr;
    MessageQueue* queue = nullptr;
    PollList* polls = nullptr;
    const Clock* clock = nullptr;
    Gpus gpus;
    ReadMetrics* metrics = nullptr;
  };

  explicit Reads(const Parts& parts) : parts_(parts) {}
  Reads(const Reads&) = delete;
  Reads& operator=(const Reads&) = delete;

  /// `read` refers to the call's parameters. Errors: PageStore::Load's; DATA_LOSS, where a page's codec failed to
  /// decode it.
  absl::StatusOr<kj::Promise<void>> Run(const std::shared_ptr<Session>& session, const BoundCache& cache,
                                        const CheckedRead& read, ReadContext& context) const;

 private:
  const Parts parts_;
};

}  // namespace kvmanager
