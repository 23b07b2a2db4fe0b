// What every RPC method does around its own work: allow cancellation, count, answer with a status, and turn invalid
// Cap'n Proto into the end of the connection.
#pragma once

#include <kj/async.h>
#include <kj/exception.h>
#include <spdlog/spdlog.h>

#include <utility>

#include "kvmanager/base/status.h"
#include "kvmanager/rpc/session.h"
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

/// Runs `body`: a function that returns absl::StatusOr<kj::Promise<void>>. An error goes to `write_error(status)` and
/// is counted.
template <typename Context, typename Body, typename Write>
kj::Promise<void> Serve(Session& session, Method method, Context& context, Body&& body, Write&& write_error) {
  context.allowCancellation();
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
    // Only reading the parameters can throw: their encoding is invalid.
    session.calls().NoteMalformed();
    spdlog::warn("connection of \"{}\" ends: {} was called with an invalid message: {}", session.name(),
                 MethodName(method), exception->getDescription().cStr());
    session.CutOff(EndReason::kFraming);
    return kj::mv(*exception);
  }
  return result;
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

inline absl::StatusOr<kj::Promise<void>> Done() { return kj::Promise<void>(kj::READY_NOW); }

}  // namespace kvmanager
