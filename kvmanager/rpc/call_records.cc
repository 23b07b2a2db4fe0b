#include "kvmanager/rpc/call_records.h"

namespace kvmanager {
namespace {

constexpr char kErrorsHelp[] = "RPC calls answered with an error, by status code; code FRAMING: the connection ended";

}  // namespace

CallRecords::CallRecords(Metrics* metrics, RecentErrors* errors, const Clock* clock)
    : metrics_(metrics),
      errors_(errors),
      clock_(clock),
      malformed_(metrics->Counter("rpc_errors_total", kErrorsHelp, {{"method", "none"}, {"code", "FRAMING"}})),
      turns_(metrics) {
  for (int i = 0; i < kMethods; ++i) {
    calls_[i] =
        &metrics->Counter("rpc_calls_total", "RPC calls by method", {{"method", MethodName(static_cast<Method>(i))}});
  }
}

// The series of an error is made on its first use.
void CallRecords::NoteError(Method method, const absl::Status& status) {
  metrics_
      ->Counter("rpc_errors_total", kErrorsHelp,
                {{"method", MethodName(method)}, {"code", absl::StatusCodeToString(status.code())}})
      .Increment();
  errors_->Record(MethodName(method), status, clock_->NowNs());
}

}  // namespace kvmanager
