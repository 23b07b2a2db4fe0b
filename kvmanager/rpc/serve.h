// What every RPC method does around its own work: allow cancellation, count, answer with a status, and turn invalid
// Cap'n Proto into the end of the connection.
#pragma once

#include <kj/async.h>
#include <kj/exception.h>

#include <memory>
#include <utility>

#include "absl/functional/any_invocable.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/base/worker_pool.h"
#include "kvmanager/rpc/session.h"
#include "kvmanager/rpc/taking_turns.h"
#include "kvmanager/rpc/wire.h"

namespace kvmanager {

/// Writes an error where this method's results have their status: `error`, or `reply.status`, or `status`.
template <typename Context>
void WriteError(Context& context, const absl::Status& status) {
  auto results = context.getResults();
  if constexpr (requires { results.initError(); }) {
    WriteStatus(status, results.initError());
  } else if constexpr (requires { results.initReply(); }) {
    WriteStatus(status, results.initReply().initStatus());
  } else {
    WriteStatus(status, results.initStatus());
  }
}

/// Only reading the parameters can throw: their encoding is invalid, and the connection ends.
inline void NoteInvalid(Session& session, Method method, const kj::Exception& exception) {
  session.calls().NoteMalformed();
  session.CutOff(
      EndReason::kFraming,
      absl::StrCat(MethodName(method), " was called with an invalid message: ", exception.getDescription().cStr()));
}

/// Runs `body`: a function that returns absl::StatusOr<kj::Promise<void>>. An error goes to `write_error(status)` and
/// is counted.
template <typename Context, typename Body, typename Write>
kj::Promise<void> Serve(Session& session, Method method, Context& context, Body&& body, Write&& write_error) {
  context.allowCancellation();
  const LoopTurn turn(session.calls().turns(), MethodName(method));
  session.calls().NoteCall(method);
  kj::Promise<void> result = kj::READY_NOW;
  KJ_IF_MAYBE (exception, kj::runCatchingExceptions([&] {
                 absl::StatusOr<kj::Promise<void>> done = body();
                 if (done.ok()) {
                   result = *std::move(done);
                 } else {
                   session.calls().NoteError(method, done.status());
                   write_error(done.status());
                 }
               })) {
    NoteInvalid(session, method, *exception);
    return kj::mv(*exception);
  }
  return result.attach(CallRecords::UnderWay(&session.calls()));
}

/// The same for a method whose error is written by WriteError.
template <typename Context, typename Body>
kj::Promise<void> Serve(Session& session, Method method, Context& context, Body&& body) {
  return Serve(session, method, context, std::forward<Body>(body),
               [&](const absl::Status& status) { WriteError(context, status); });
}

/// An error that arrives later than Serve's body.
template <typename Context>
void ServeError(Session& session, Method method, const absl::Status& status, Context& context) {
  session.calls().NoteError(method, status);
  WriteError(context, status);
}

/// Calls `step` until it returns false, in turns of the loop between which others are served. `step` may read the
/// call's parameters. owner: whose work it is.
inline kj::Promise<void> InTurns(std::shared_ptr<Session> session, Method method, TakingTurns* turns,
                                 WorkerPool::Owner owner, absl::AnyInvocable<bool()> step) {
  bool more = true;
  KJ_IF_MAYBE (exception, kj::runCatchingExceptions([&] {
                 const LoopTurn watched(session->calls().turns(), MethodName(method));
                 for (const Turn turn(TakingTurns::kLength); more && !turn.over();) more = step();
               })) {
    NoteInvalid(*session, method, *exception);
    return kj::mv(*exception);
  }
  if (!more) return kj::READY_NOW;
  return turns->Next(owner).then(
      [session = std::move(session), method, turns, owner, step = std::move(step)]() mutable {
        return InTurns(std::move(session), method, turns, owner, std::move(step));
      });
}

inline absl::StatusOr<kj::Promise<void>> Done() { return kj::Promise<void>(kj::READY_NOW); }

}  // namespace kvmanager
