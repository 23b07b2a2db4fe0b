// What every RPC method does around its own work: allow cancellation, count, and turn invalid Cap'n Proto into the end
// of the connection.
#pragma once

#include <kj/async.h>
#include <kj/exception.h>
#include <spdlog/spdlog.h>

#include <utility>

#include "kvmanager/base/status.h"
#include "kvmanager/rpc/session.h"
#include "kvmanager/rpc/wire.h"

namespace kvmanager {

/// Counts an error that a client is answered with, and keeps it for people to see.
inline void NoteError(Session& session, Method method, const absl::Status& status) {
  const DaemonContext& daemon = session.daemon();
  daemon.metrics->CountError(method, status.code());
  daemon.errors->Record(MethodName(method), status, daemon.clock->NowNs());
}

/// Runs `body`: void, kj::Promise<void> or absl::Status. An error status goes to `write_error(status)` and is counted.
template <typename Context, typename Body, typename WriteError>
kj::Promise<void> Serve(Session& session, Method method, Context& context, Body&& body, WriteError&& write_error) {
  context.allowCancellation();
  ServerMetrics& metrics = *session.daemon().metrics;
  metrics.calls(method).Increment();
  kj::Promise<void> result = kj::READY_NOW;
  KJ_IF_MAYBE (exception, kj::runCatchingExceptions([&] {
                 absl::StatusOr<kj::Promise<void>> done = body();
                 if (done.ok()) {
                   result = *std::move(done);
                 } else {
                   NoteError(session, method, done.status());
                   write_error(done.status());
                 }
               })) {
    // Only reading the parameters can throw: their encoding is invalid.
    metrics.framing_errors.Increment();
    spdlog::warn("connection of \"{}\" ends: {} was called with an invalid message: {}", session.name(),
                 MethodName(method), exception->getDescription().cStr());
    session.CutOff(EndReason::kFraming);
    return kj::mv(*exception);
  }
  return result;
}

/// An error that arrives later than Serve's body.
template <typename WriteError>
void ServeError(Session& session, Method method, const absl::Status& status, WriteError&& write_error) {
  NoteError(session, method, status);
  write_error(status);
}

inline absl::StatusOr<kj::Promise<void>> Done() { return kj::Promise<void>(kj::READY_NOW); }

}  // namespace kvmanager
