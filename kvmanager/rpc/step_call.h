// The attention of one step of a cache in host memory: on the event loop if it is small, else by workers, in parts
// whose plans the loop makes one after the other: a plan of all entries of the largest step would take it, or a worker,
// 10 ms.
#pragma once

#include <kj/async.h>

#include <cstdint>
#include <memory>

#include "absl/container/inlined_vector.h"
#include "attention/attention.h"
#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/rpc/host_calls.h"
#include "kvmanager/rpc/reply_memory.h"
#include "kvmanager/rpc/step_check.h"
#include "kvmanager/store/step_lease.h"

namespace kvmanager {

/// Answers with what the step's queries read. REQUIRES: the lease is ready and its status OK; the step has at most
/// kLoopMultiplyAddsMax, and its codec does not wait.
void AttendOnLoop(const HostCalls::Parts& parts, const StepCache& cache, const CheckedStep& step,
                  const AttendLease& lease, StepContext& context);

/// Where in a step's entries its next part begins.
struct StepCursor {
  size_t entry = 0;
  int token = 0;
};

/// Pages that one plan goes through, again for each page that its queries are in, and entries: some 0.1 ms.
constexpr uint64_t kPlanPagesMax = 16384;
constexpr size_t kPlanEntriesMax = 256;

/// The entries, or parts of them, that the plan from `*cursor` on takes; `*cursor` is behind them then. Never none
/// while entries are left. whole: whether an entry may not be cut.
absl::InlinedVector<AttendEntry, 4> NextPart(absl::Span<const AttendEntry> entries, uint32_t page_tokens,
                                             absl::FunctionRef<bool(size_t entry)> whole, StepCursor* cursor);

/// A step whose attention outlasts this turn of the loop. Shared by the promise that waits for it and by the workers'
/// completion, whichever lives longer; made and destroyed on the loop's thread.
class StepCall final : public std::enable_shared_from_this<StepCall> {
 public:
  StepCall(const HostCalls::Parts& parts, const StepCache& cache, const CheckedStep& step,
           std::unique_ptr<AttendLease> lease);
  ~StepCall();

  /// Keeps an arena that the step reads or writes.
  void Keep(std::shared_ptr<Region> arena) { arenas_.push_back(std::move(arena)); }
  /// Keeps the request that holds the queries, which are copied else.
  void KeepRequest(std::shared_ptr<const void> request) { request_ = std::move(request); }

  /// For queries and outputs that it keeps, and the reply.
  uint64_t bytes_to_reserve() const;
  /// charge: for bytes_to_book(). The request is read for the last time.
  kj::Promise<void> Begin(MessageShare::Charge charge);
  /// Nobody waits any more.
  void GiveUp();
  const absl::Status& status() const { return status_; }
  /// REQUIRES: status() is OK.
  void WriteReply(Session& session, StepContext& context);

 private:
  bool copies_q() const { return step_.q.where == StepTensor::Where::kInline && request_ == nullptr; }
  absl::Status Allocate();
  // May be called by the lease: it must outlive this.
  void Run();
  void RunNextPart();
  void FinishPart();
  // Small enough for the loop.
  bool here() const { return !waits_ && step_.multiply_adds_max <= kLoopMultiplyAddsMax; }

  const HostCalls::Parts& parts_;
  StepCache cache_;
  const bool waits_;  // the codec does: not on the loop
  WorkerPool* const workers_;
  uint64_t unanswered_ = 0;  // by the codec, before the step
  const CacheConfig config_;
  CheckedStep step_;
  std::unique_ptr<AttendLease> lease_;
  absl::InlinedVector<std::shared_ptr<Region>, 4> arenas_;
  std::shared_ptr<const void> request_;
  MessageShare::Charge charge_;  // for these
  AlignedBuffer q_copy_;
  ReplyBuffer out_, lse_;
  StepCursor cursor_;  // of the next part
  std::unique_ptr<AttentionPlan> plan_;
  absl::Status status_;
  bool given_up_ = false;
  AttentionCounts counts_;
  int64_t start_ns_ = 0;
  kj::Own<kj::PromiseFulfiller<void>> fulfiller_;
};

}  // namespace kvmanager
