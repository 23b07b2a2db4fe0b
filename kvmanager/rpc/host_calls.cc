#include "kvmanager/rpc/host_calls.h"

#include <cstring>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "codecs/waiting_codec.h"
#include "kvmanager/base/aligned_buffer.h"
#include "kvmanager/base/on_worker.h"
#include "kvmanager/base/status.h"
#include "kvmanager/rpc/serve.h"
#include "kvmanager/rpc/step_call.h"

namespace kvmanager {
namespace {

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

// Whether all of an append is done at once.
bool AppendsAtOnce(const StepCache& cache, const CheckedStep& step, const AppendWork& work) {
  return step.k.bytes.size() + step.v.bytes.size() + step.x.bytes.size() <= kLoopAppendBytesMax &&
         work.opened * cache.config->layout.raw_bytes() <= kLoopOpenedBytesMax &&
         work.opened + work.aged <= kLoopAppendPagesMax;
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

}  // namespace

// A step whose queries workers look at, whose rows they write, or whose pages are listed in turns. Shared with workers;
// destroyed on the loop's thread, and its members from the last on.
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
    Appends& appends = parts_.store->appends();
    const AppendEntries entries = EntriesToAppend(cache, step);
    if (!AppendsAtOnce(cache, step, appends.Measure(cache.id, step.layer, entries))) {
      auto large = std::make_shared<LargeStep>(session, cache, step);
      KV_RETURN_IF_ERROR(large->KeepRows());
      large->reading = session->messages().HoldReading();
      KV_ASSIGN_OR_RETURN(large->lease, appends.Begin(cache.id, step.layer, EntriesToAppend(cache, large->step)));
      return AppendInTurns(large, context);
    }
    KV_RETURN_IF_ERROR(appends.Append(cache.id, step.layer, entries));
  }
  return Attend(session, cache, step, context);
}

kj::Promise<void> HostCalls::AppendInTurns(const std::shared_ptr<LargeStep>& large, StepContext& context) const {
  return InTurns(large->session, Method::kStep, parts_.long_calls, large->cache.owner,
                 [large] { return large->lease->ReserveNext(); })
      .then([this, large] {
        return OnWorkerInTurns(parts_.workers, parts_.queue, WorkerPool::Priority::kAttend, large->cache.owner,
                               [large] { return large->lease->WriteNext(); });
      })
      .then([this, large] {
        large->status = large->CheckArenas();
        if (!large->status.ok()) return kj::Promise<void>(kj::READY_NOW);
        return InTurns(large->session, Method::kStep, parts_.long_calls, large->cache.owner,
                       [large] { return large->lease->CommitNext(); });
      })
      .then([this, large, context]() mutable {
        const LoopTurn turn(large->session->calls().turns(), MethodName(Method::kStep));
        large->status.Update(large->lease->status());
        large->lease = nullptr;
        return GoOn(*large,
                    large->status.ok() ? Attend(large->session, large->cache, large->step, context)
                                       : absl::StatusOr<kj::Promise<void>>(large->status),
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
    context.getResults().initReply();
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
  return InTurns(large->session, Method::kStep, parts_.long_calls, large->cache.owner,
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
                                                        const std::shared_ptr<Session>& session, const StepCache& cache,
                                                        const CheckedStep& step, StepContext& context) const {
  if (parts_.quality != nullptr && !cache.codec->info().identity) {
    parts_.quality->NoteQueries(cache.id, *cache.config, step.layer, step.entries, step.q_dtype, step.scale,
                                step.q.bytes.data());
  }
  if (step.multiply_adds_max <= kLoopMultiplyAddsMax && lease->ready() && WaitingWorkers(*cache.codec) == nullptr) {
    KV_RETURN_IF_ERROR(lease->status());
    AttendOnLoop(parts_, cache, step, *lease, context);
    return kj::Promise<void>(kj::READY_NOW);
  }
  auto call = std::make_shared<StepCall>(parts_, cache, step, std::move(lease));
  for (const StepTensor* tensor : {&step.q, &step.out, &step.lse}) {
    if (tensor->where == StepTensor::Where::kArena) call->Keep(session->FindArena(tensor->arena));
  }
  if (step.q.where == StepTensor::Where::kInline) {
    call->KeepRequest(session->messages().requests()->KeepRequest(step.q.bytes.data()));
  }
  KV_ASSIGN_OR_RETURN(kj::Promise<MessageShare::Charge> room,
                      session->messages().ReserveReply(call->bytes_to_reserve()));
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
