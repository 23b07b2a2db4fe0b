#include "kvmanager/rpc/host_calls.h"

#include <cstring>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "attention/attention.h"
#include "codecs/waiting_codec.h"
#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/base/failpoints.h"
#include "kvmanager/base/on_worker.h"
#include "kvmanager/base/status.h"
#include "kvmanager/rpc/serve.h"

namespace kvmanager {
namespace {

using Parts = HostCalls::Parts;

constexpr size_t kReplyWords = 32;  // of a StepReply without its outputs

using AppendEntries = absl::InlinedVector<AppendEntry, 4>;

AppendEntries EntriesToAppend(const StepCache& cache, const CheckedStep& step) {
  const PageLayout& layout = cache.config->layout;
  const size_t row_bytes = size_t{layout.kv_heads} * layout.head_dim * DTypeBytes(layout.dtype);
  const size_t x_row_bytes = size_t(cache.config->hidden) * DTypeBytes(layout.dtype);
  AppendEntries entries;
  entries.reserve(step.entries.size());
  size_t row = 0;
  for (const AttendEntry& entry : step.entries) {
    entries.push_back({entry.sequence, entry.position, entry.tokens, step.k.bytes.data() + row * row_bytes,
                       step.v.bytes.data() + row * row_bytes,
                       step.x.given() ? step.x.bytes.data() + row * x_row_bytes : nullptr});
    row += entry.tokens;
  }
  return entries;
}

// Of the pages that an append opens.
uint64_t OpenedBytes(const StepCache& cache, const CheckedStep& step) {
  const uint64_t page_tokens = cache.config->layout.page_tokens;
  uint64_t pages = 0;
  for (const AttendEntry& entry : step.entries) {
    const uint64_t end = entry.position + entry.tokens;
    pages += (end + page_tokens - 1) / page_tokens - (entry.position + page_tokens - 1) / page_tokens;
  }
  return pages * cache.config->layout.raw_bytes();
}

// That the step's attention reads.
uint64_t PagesRead(const StepCache& cache, const CheckedStep& step) {
  uint64_t pages = 0;
  for (const AttendEntry& entry : step.entries) {
    pages += (entry.position + entry.tokens - 1) / cache.config->layout.page_tokens + 1;
  }
  return pages;
}

// Owns what a tensor of a step points to; nullptr: it cannot be kept for longer than the call.
std::shared_ptr<const void> Owner(Session& session, const StepTensor& tensor) {
  if (tensor.where == StepTensor::Where::kArena) return session.FindArena(tensor.arena);
  return session.messages().requests()->KeepRequest(tensor.bytes.data());
}

// Where a step's attention reads and writes.
struct Rows {
  const uint8_t* q = nullptr;
  uint8_t* out = nullptr;
  float* lse = nullptr;
};

std::unique_ptr<AttentionPlan> MakePlan(const StepCache& cache, const CheckedStep& step, const AttendLease& lease,
                                        const Rows& rows, int threads) {
  const size_t row_bytes = size_t(cache.config->query_heads) * cache.config->layout.head_dim * DTypeBytes(step.q_dtype);
  absl::InlinedVector<AttentionSequence, 4> sequences(step.entries.size());
  size_t row = 0;
  for (size_t i = 0; i < sequences.size(); ++i) {
    AttentionSequence& sequence = sequences[i];
    sequence.pages = lease.pages(i);
    sequence.selector = lease.selector(i);
    sequence.first_position = step.entries[i].position;
    sequence.tokens = step.entries[i].tokens;
    sequence.q = rows.q + row * row_bytes;
    sequence.out = rows.out + row * row_bytes;
    if (rows.lse != nullptr) sequence.lse = rows.lse + row * cache.config->query_heads;
    row += step.entries[i].tokens;
  }
  AttentionBatch batch;
  batch.codec = cache.codec.get();
  batch.raw_attention = &cache.raw->attention();
  batch.layout = cache.config->layout;
  batch.layer = step.layer;
  batch.query_heads = cache.config->query_heads;
  batch.lag_pages = cache.config->lag_pages;
  batch.scale = step.scale;
  batch.q_dtype = step.q_dtype;
  batch.owner = cache.owner;
  batch.sequences = sequences;
  return AttentionPlan::Make(batch, threads);
}

// Of an identity codec every form is the raw one.
AttentionCounts CountsOf(const AttentionPlan& plan, const StepCache& cache) {
  AttentionCounts counts = plan.counts();
  if (cache.codec->info().identity) {
    counts.raw_pairs += counts.encoded_pairs;
    counts.encoded_pairs = 0;
  }
  return counts;
}

void Count(const Parts& parts, const CheckedStep& step, const AttentionCounts& counts, int64_t start_ns,
           prometheus::Histogram& seconds) {
  seconds.Observe(double(parts.clock->NowNs() - start_ns) * 1e-9);
  parts.metrics->encoded_pairs.Increment(double(counts.encoded_pairs));
  parts.metrics->raw_pairs.Increment(double(counts.raw_pairs));
  parts.metrics->tokens.Increment(double(step.tokens));
}

capnp::MessageSize ReplySize(const CheckedStep& step) {
  uint64_t bytes = 0;
  if (!step.out.given()) bytes += step.out_bytes + sizeof(capnp::word);
  if (step.lse_inline) bytes += step.lse_bytes + sizeof(capnp::word);
  return {bytes / sizeof(capnp::word) + kReplyWords, 0};
}

// REQUIRES: the lease is ready and its status OK.
void RunOnLoop(const Parts& parts, const StepCache& cache, const CheckedStep& step, const AttendLease& lease,
               StepContext& context) {
  auto reply = context.getResults(ReplySize(step)).initReply();
  Rows rows;
  rows.q = step.q.bytes.data();
  rows.out = step.out.given() ? step.out.bytes.data() : reply.initOut(step.out_bytes).begin();
  if (step.lse_bytes != 0) {
    rows.lse =
        reinterpret_cast<float*>(step.lse.given() ? step.lse.bytes.data() : reply.initLse(step.lse_bytes).begin());
  }
  const int64_t start_ns = parts.clock->NowNs();
  const std::unique_ptr<AttentionPlan> plan = MakePlan(cache, step, lease, rows, 1);
  plan->RunHere();
  const AttentionCounts counts = CountsOf(*plan, cache);
  reply.setEncodedPairs(counts.encoded_pairs);
  reply.setRawPairs(counts.raw_pairs);
  Count(parts, step, counts, start_ns, parts.metrics->loop_seconds);
}

// A step whose attention outlasts this turn of the loop. Shared by the promise that waits for it and by the workers'
// completion, whichever lives longer; made and destroyed on the loop's thread.
class StepCall final : public std::enable_shared_from_this<StepCall> {
 public:
  StepCall(const Parts& parts, const StepCache& cache, const CheckedStep& step, std::unique_ptr<AttendLease> lease)
      : parts_(parts),
        cache_(cache),
        waits_(WaitingWorkers(*cache.codec) != nullptr),
        workers_(WorkersOf(*cache.codec, parts.workers)),
        config_(*cache.config),
        step_(step),
        lease_(std::move(lease)) {
    cache_.config = &config_;
    // The request goes with the call's context.
    step_.k = step_.v = step_.x = StepTensor();
  }

  ~StepCall() {
    charge_.Keep(std::move(out_));
    charge_.Keep(std::move(lse_));
  }

  // Keeps an arena that the step reads or writes.
  void Keep(std::shared_ptr<Region> arena) { arenas_.push_back(std::move(arena)); }
  // Keeps the request that holds the queries, which are copied else.
  void KeepRequest(std::shared_ptr<const void> request) { request_ = std::move(request); }

  // For queries and outputs that it keeps, and the reply.
  uint64_t bytes_to_book() const {
    return (step_.out.given() ? 0 : SessionMessages::BytesToBook(step_.out_bytes)) +
           (step_.lse_inline ? SessionMessages::BytesToBook(step_.lse_bytes) : 0) +
           (copies_q() ? step_.q.bytes.size() : 0);
  }

  // charge: for bytes_to_book(). The request is read for the last time.
  kj::Promise<void> Begin(MessageShare::Charge charge) {
    charge_ = std::move(charge);
    status_ = Allocate();
    if (!status_.ok()) return kj::READY_NOW;
    auto waiting = kj::newPromiseAndFulfiller<void>();
    fulfiller_ = kj::mv(waiting.fulfiller);
    lease_->OnReady([weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->Run();
    });
    return kj::mv(waiting.promise);
  }

  // Nobody waits any more.
  void GiveUp() {
    given_up_ = true;
    if (plan_ != nullptr) plan_->Cancel();
  }

  const absl::Status& status() const { return status_; }

  // REQUIRES: status() is OK.
  void WriteReply(Session& session, StepContext& context) {
    auto reply = context.getResults(capnp::MessageSize{kReplyWords, 0}).initReply();
    const auto orphanage = capnp::Orphanage::getForMessageContaining(reply);
    if (!step_.out.given()) reply.adoptOut(SessionMessages::DataOf(orphanage, out_));
    if (step_.lse_inline) reply.adoptLse(SessionMessages::DataOf(orphanage, lse_));
    reply.setEncodedPairs(counts_.encoded_pairs);
    reply.setRawPairs(counts_.raw_pairs);
    q_copy_ = AlignedBuffer();
    MessageShare::Lent parts;
    parts.push_back(std::move(out_));
    parts.push_back(std::move(lse_));
    session.messages().SendReply(std::move(charge_), std::move(parts));
  }

 private:
  bool copies_q() const { return step_.q.where == StepTensor::Where::kInline && request_ == nullptr; }
  absl::Status Allocate() {
    if (Fails(Failpoint::kStepAllocate)) return absl::ResourceExhaustedError("failpoint step.allocate");
    if (copies_q()) {
      KV_ASSIGN_OR_RETURN(q_copy_, AlignedBuffer::Make("q", step_.q.bytes.size()));
      std::memcpy(q_copy_.data(), step_.q.bytes.data(), q_copy_.size());
      step_.q.bytes = q_copy_.span();
    }
    if (!step_.out.given()) {
      KV_ASSIGN_OR_RETURN(out_, charge_.Make("out", step_.out_bytes));
    }
    if (step_.lse_inline) {
      KV_ASSIGN_OR_RETURN(lse_, charge_.Make("lse", step_.lse_bytes));
    }
    return absl::OkStatus();
  }

  // May be called by the lease: it must outlive this.
  void Run() {
    status_ = lease_->status();
    if (!status_.ok()) {
      fulfiller_->fulfill();
      return;
    }
    start_ns_ = parts_.clock->NowNs();
    unanswered_ = UnansweredBy(*cache_.codec);
    const bool here = !waits_ && step_.multiply_adds_max <= kLoopMultiplyAddsMax;
    Rows rows;
    rows.q = step_.q.bytes.data();
    rows.out = step_.out.given() ? step_.out.bytes.data() : out_.data();
    if (step_.lse_bytes != 0) {
      rows.lse = reinterpret_cast<float*>(step_.lse.given() ? step_.lse.bytes.data() : lse_.data());
    }
    if (here) {
      plan_ = MakePlan(cache_, step_, *lease_, rows, 1);
      plan_->RunHere();
      Finish(parts_.metrics->loop_seconds);
      return;
    }
    const int threads = workers_->threads();
    if (step_.entries.size() <= kLoopPlanEntriesMax) {
      return RunByWorkers(MakePlan(cache_, step_, *lease_, rows, threads));
    }
    auto plan = [rows, threads, queue = parts_.queue, self = shared_from_this()]() mutable {
      auto made = MakePlan(self->cache_, self->step_, *self->lease_, rows, threads);
      queue->Post([self = std::move(self), made = std::move(made)]() mutable { self->RunByWorkers(std::move(made)); });
    };
    workers_->Post(WorkerPool::Priority::kAttend, std::move(plan), cache_.owner);
  }
  void RunByWorkers(std::unique_ptr<AttentionPlan> plan) {
    if (given_up_) return;
    plan_ = std::move(plan);
    plan_->Run(*workers_, [queue = parts_.queue, self = shared_from_this()]() mutable {
      queue->Post([self = std::move(self)] { self->Finish(self->parts_.metrics->worker_seconds); });
    });
  }

  void Finish(prometheus::Histogram& seconds) {
    if (given_up_) return;
    if (UnansweredBy(*cache_.codec) != unanswered_) {
      status_ = absl::UnavailableError(absl::StrCat("the process of codec ", cache_.codec->info().name,
                                                    ", a plug-in, did not answer, and is started again: what was to be "
                                                    "appended is; attend again"));
      fulfiller_->fulfill();
      return;
    }
    counts_ = CountsOf(*plan_, cache_);
    Count(parts_, step_, counts_, start_ns_, seconds);
    fulfiller_->fulfill();
  }

  const Parts& parts_;
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
  std::unique_ptr<AttentionPlan> plan_;
  absl::Status status_;
  bool given_up_ = false;
  AttentionCounts counts_;
  int64_t start_ns_ = 0;
  kj::Own<kj::PromiseFulfiller<void>> fulfiller_;
};

}  // namespace

// A step whose queries workers look at, whose rows they write, or whose pages are listed in turns. Destroyed on the
// loop's thread, and
// its members from the last on.
struct HostCalls::LargeStep {
  LargeStep(const std::shared_ptr<Session>& of, const StepCache& with, const CheckedStep& what)
      : session(of), cache(with), config(*with.config), step(what) {
    cache.config = &config;
  }
  // Looks at the next of the queries. False: that was all, or one is not finite.
  bool LookNext() {
    const absl::Span<const uint8_t> part = absl::MakeConstSpan(step.q.bytes).subspan(looked, kQueryPieceBytes);
    looked += part.size();
    status = CheckQueries(step, config, part);
    return status.ok() && looked < step.q.bytes.size();
  }
  // What is appended stays until workers are done with it: a small request, which is not kept, is copied.
  absl::Status KeepRows() {
    for (StepTensor* tensor : {&step.k, &step.v, &step.x}) {
      if (!tensor->given()) continue;
      input.push_back(Owner(*session, *tensor));
      if (input.back() != nullptr) continue;
      KV_ASSIGN_OR_RETURN(AlignedBuffer copy, AlignedBuffer::Make("rows to append", tensor->bytes.size()));
      std::memcpy(copy.data(), tensor->bytes.data(), copy.size());
      tensor->bytes = copy.span();
      input.back() = std::make_shared<AlignedBuffer>(std::move(copy));
    }
    return absl::OkStatus();
  }
  // That no arena of the step went while workers had it.
  absl::Status CheckArenas() const {
    for (const auto& [name, tensor] : {std::pair("q", &step.q), {"out", &step.out}, {"lse", &step.lse}}) {
      if (tensor->where != StepTensor::Where::kArena || session->FindArena(tensor->arena) != nullptr) continue;
      return FieldError(absl::StatusCode::kNotFound, absl::StrCat(name, ".arena"), absl::StrCat(tensor->arena),
                        "an arena of this connection until the call is answered");
    }
    return absl::OkStatus();
  }

  const std::shared_ptr<Session> session;
  StepCache cache;
  const CacheConfig config;
  CheckedStep step;
  size_t looked = 0;    // bytes of the queries
  absl::Status status;  // of what was looked at
  std::vector<std::shared_ptr<const void>> input;
  std::shared_ptr<const void> reading;  // no other call of the connection comes in between
  std::unique_ptr<AppendLease> lease;
  std::unique_ptr<Listing> listing;
};

absl::StatusOr<kj::Promise<void>> HostCalls::Step(const std::shared_ptr<Session>& session, const StepCache& cache,
                                                  const CheckedStep& step, StepContext& context) const {
  if (step.queries_unchecked) {
    auto large = std::make_shared<LargeStep>(session, cache, step);
    large->input.push_back(Owner(*session, step.q));
    if (large->input.back() != nullptr) {
      large->reading = session->messages().HoldReading();
      return CheckByWorkers(large, context);
    }
    KV_RETURN_IF_ERROR(CheckQueries(step, *cache.config, step.q.bytes));
  }
  return AppendAndAttend(session, cache, step, context);
}

kj::Promise<void> HostCalls::CheckByWorkers(const std::shared_ptr<LargeStep>& large, StepContext& context) const {
  return OnWorkerInTurns(parts_.workers, parts_.queue, WorkerPool::Priority::kAttend, large->cache.owner,
                         [large] { return large->LookNext(); })
      .then([this, large, context]() mutable {
        const LoopTurn turn(large->session->calls().turns(), MethodName(Method::kStep));
        absl::Status checked = large->status;
        checked.Update(large->CheckArenas());
        return GoOn(*large,
                    checked.ok() ? AppendAndAttend(large->session, large->cache, large->step, context)
                                 : absl::StatusOr<kj::Promise<void>>(checked),
                    context);
      });
}

absl::StatusOr<kj::Promise<void>> HostCalls::AppendAndAttend(const std::shared_ptr<Session>& session,
                                                             const StepCache& cache, const CheckedStep& step,
                                                             StepContext& context) const {
  // What Attend could refuse after this append, the append refuses: it checks positions against the same counts.
  if (step.append()) {
    const uint64_t bytes = step.k.bytes.size() + step.v.bytes.size() + step.x.bytes.size();
    if (bytes > kLoopAppendBytesMax || OpenedBytes(cache, step) > kLoopOpenedBytesMax) {
      auto large = std::make_shared<LargeStep>(session, cache, step);
      KV_RETURN_IF_ERROR(large->KeepRows());
      large->reading = session->messages().HoldReading();
      KV_ASSIGN_OR_RETURN(large->lease,
                          parts_.store->appends().Begin(cache.id, step.layer, EntriesToAppend(cache, large->step)));
      return AppendByWorkers(large, context);
    }
    KV_RETURN_IF_ERROR(parts_.store->Append(cache.id, step.layer, EntriesToAppend(cache, step)));
  }
  return Attend(session, cache, step, context);
}

kj::Promise<void> HostCalls::AppendByWorkers(const std::shared_ptr<LargeStep>& large, StepContext& context) const {
  return OnWorkerInTurns(parts_.workers, parts_.queue, WorkerPool::Priority::kAttend, large->cache.owner,
                         [large] { return large->lease->WriteNext(); })
      .then([this, large, context]() mutable {
        const LoopTurn turn(large->session->calls().turns(), MethodName(Method::kStep));
        absl::Status committed = large->CheckArenas();
        if (committed.ok()) committed = large->lease->Commit();
        return GoOn(*large,
                    committed.ok() ? Attend(large->session, large->cache, large->step, context)
                                   : absl::StatusOr<kj::Promise<void>>(committed),
                    context);
      });
}

// Behind what workers did.
kj::Promise<void> HostCalls::GoOn(LargeStep& large, absl::StatusOr<kj::Promise<void>> rest, StepContext& context) {
  large.reading = nullptr;
  if (rest.ok()) return *std::move(rest);
  ServeError(*large.session, Method::kStep, rest.status(), context);
  return kj::READY_NOW;
}

absl::StatusOr<kj::Promise<void>> HostCalls::Attend(const std::shared_ptr<Session>& session, const StepCache& cache,
                                                    const CheckedStep& step, StepContext& context) const {
  if (!step.attend()) {
    context.getResults(capnp::MessageSize{kReplyWords, 0}).initReply();
    return kj::Promise<void>(kj::READY_NOW);
  }
  if (PagesRead(cache, step) > kLoopPagesMax) {
    auto large = std::make_shared<LargeStep>(session, cache, step);
    KV_ASSIGN_OR_RETURN(large->listing,
                        parts_.store->long_calls().BeginAttend(cache.id, step.layer, large->step.entries));
    large->reading = session->messages().HoldReading();
    return AttendInTurns(large, context);
  }
  KV_ASSIGN_OR_RETURN(std::unique_ptr<AttendLease> lease, parts_.store->Attend(cache.id, step.layer, step.entries));
  return AttendWith(std::move(lease), session, cache, step, context);
}

kj::Promise<void> HostCalls::AttendInTurns(const std::shared_ptr<LargeStep>& large, StepContext& context) const {
  return InTurns(large->session, Method::kStep, parts_.long_calls,
                 [large] { return large->listing->DoPiece() == LongCall::Next::kPiece; })
      .then([this, large, context]() mutable {
        const LoopTurn turn(large->session->calls().turns(), MethodName(Method::kStep));
        absl::StatusOr<std::unique_ptr<AttendLease>> lease = large->listing->Commit();
        if (const absl::Status there = large->CheckArenas(); lease.ok() && !there.ok()) lease = there;
        return GoOn(*large,
                    lease.ok() ? AttendWith(*std::move(lease), large->session, large->cache, large->step, context)
                               : absl::StatusOr<kj::Promise<void>>(lease.status()),
                    context);
      });
}

absl::StatusOr<kj::Promise<void>> HostCalls::AttendWith(std::unique_ptr<AttendLease> lease,
                                                        const std::shared_ptr<Session>& session,
                                                        const StepCache& cache, const CheckedStep& step,
                                                        StepContext& context) const {
  if (parts_.quality != nullptr && !cache.codec->info().identity) {
    parts_.quality->NoteQueries(cache.id, *cache.config, step.layer, step.entries, step.q_dtype, step.scale,
                                step.q.bytes.data());
  }
  if (step.multiply_adds_max <= kLoopMultiplyAddsMax && lease->ready() && WaitingWorkers(*cache.codec) == nullptr) {
    KV_RETURN_IF_ERROR(lease->status());
    RunOnLoop(parts_, cache, step, *lease, context);
    return kj::Promise<void>(kj::READY_NOW);
  }
  auto call = std::make_shared<StepCall>(parts_, cache, step, std::move(lease));
  for (const StepTensor* tensor : {&step.q, &step.out, &step.lse}) {
    if (tensor->where == StepTensor::Where::kArena) call->Keep(session->FindArena(tensor->arena));
  }
  if (step.q.where == StepTensor::Where::kInline) {
    call->KeepRequest(session->messages().requests()->KeepRequest(step.q.bytes.data()));
  }
  KV_ASSIGN_OR_RETURN(kj::Promise<MessageShare::Charge> room, session->messages().BookReply(call->bytes_to_book()));
  kj::Promise<void> ran = room.then([call, context](MessageShare::Charge charge) mutable {
    kj::Promise<void> begun = call->Begin(std::move(charge));
    context.releaseParams();
    return begun;
  });
  ran = ran.attach(kj::defer([call] { call->GiveUp(); }));
  return ran.then([call, context, session]() mutable {
    if (call->status().ok()) return call->WriteReply(*session, context);
    ServeError(*session, Method::kStep, call->status(), context);
  });
}

absl::StatusOr<kj::Promise<void>> HostCalls::Extend(const std::shared_ptr<Session>&, const StepCache& cache,
                                                    ExtendContext&) const {
  return FieldError(absl::StatusCode::kFailedPrecondition, "device", absl::StrCat(cache.config->device),
                    "a GPU: other caches are attended to by step");
}

absl::Span<uint8_t> HostCalls::ArenaBytes(const Session& session, const StepCache&, uint32_t arena) const {
  return session.ArenaBytes(arena);
}

// Host memory copies at once.
absl::StatusOr<Forked> HostCalls::Fork(Session&, const StepCache&, SequenceId sequence) const {
  std::vector<OpenCopy> copies;
  KV_ASSIGN_OR_RETURN(const SequenceId fork, parts_.store->Fork(sequence, &copies));
  KV_CHECK(copies.empty());
  return Forked{fork, 0};
}

absl::StatusOr<uint64_t> HostCalls::Crop(Session&, const StepCache&, SequenceId sequence, uint64_t tokens) const {
  std::vector<OpenCopy> copies;
  KV_RETURN_IF_ERROR(parts_.store->Crop(sequence, tokens, &copies));
  KV_CHECK(copies.empty());
  return 0;
}

}  // namespace kvmanager
