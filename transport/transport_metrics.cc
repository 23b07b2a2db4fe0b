#include "transport/transport_metrics.h"

namespace kvmanager {

namespace {

prometheus::Counter& BytesCounter(Metrics* m, const char* direction, const char* by) {
  return m->Counter("transport_bytes_total",
                    "Bytes of pages moved between daemons, headers not counted: by socket, by a copy from one "
                    "daemon's memory to the other's on one host, or by ucx.",
                    {{"by", by}, {"direction", direction}});
}

prometheus::Counter& ZeroCopyCounter(Metrics* m, const char* result) {
  return m->Counter("transport_zero_copy_bytes_total",
                    "Bytes of pages that were written to be sent by the kernel straight from where they lie, by "
                    "result: sent so, copied by the kernel after all, refused (it had no room, and they were written "
                    "plainly), unconfirmed (it did not say in time that it was through with them).",
                    {{"result", result}});
}

}  // namespace

TransferResult ResultOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kOk:
      return TransferResult::kOk;
    case absl::StatusCode::kCancelled:
      return TransferResult::kCancelled;
    case absl::StatusCode::kDeadlineExceeded:
      return TransferResult::kTimeout;
    case absl::StatusCode::kDataLoss:
      return TransferResult::kChecksum;
    default:
      return TransferResult::kFailed;
  }
}

TransportMetrics::Direction::Direction(Metrics* m, const char* direction)
    : socket_bytes(BytesCounter(m, direction, "socket")),
      copied_bytes(BytesCounter(m, direction, "copy")),
      ucx_bytes(BytesCounter(m, direction, "ucx")),
      pages(m->Counter("transport_pages_total", "Pages moved between daemons.", {{"direction", direction}})),
      pages_skipped(m->Counter("transport_pages_skipped_total",
                               "Pages of a hand-off that the receiver had already and that were not moved.",
                               {{"direction", direction}})),
      authentication_failures(
          m->Counter("transport_authentication_failures_total",
                     "Connections with peers that did not prove the key of --peer-key, or whose TLS "
                     "handshake failed: received, that they made; sent, that this daemon made.",
                     {{"direction", direction}})),
      active(m->Gauge("transport_active_transfers", "Hand-offs under way.", {{"direction", direction}})),
      seconds(m->Histogram("transport_transfer_seconds",
                           "Seconds from the first byte of a hand-off to its confirmation, of those that succeeded.",
                           {0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100}, {{"direction", direction}})) {
  static constexpr const char* kResults[] = {"ok", "refused", "cancelled", "timeout", "checksum", "failed"};
  for (int i = 0; i < 6; ++i) {
    transfers_by_result[i] =
        &m->Counter("transport_transfers_total",
                    "Hand-offs that ended, by result: ok, refused by the receiver, cancelled, timeout (no progress), "
                    "checksum (a page arrived changed), failed (anything else).",
                    {{"direction", direction}, {"result", kResults[i]}});
  }
}

TransportMetrics::ZeroCopy::ZeroCopy(Metrics* m)
    : sent(ZeroCopyCounter(m, "sent")),
      copied(ZeroCopyCounter(m, "copied")),
      refused(ZeroCopyCounter(m, "refused")),
      unconfirmed(ZeroCopyCounter(m, "unconfirmed")) {}

TransportMetrics::TransportMetrics(Metrics* m)
    : sent(m, "sent"),
      received(m, "received"),
      zero_copy(m),
      checksum_failures(m->Counter("transport_checksum_failures_total",
                                   "Pages that arrived with bytes other than their checksum says.")),
      protocol_errors(m->Counter("transport_protocol_errors_total",
                                 "Connections ended because the peer sent bytes that the protocol forbids.")),
      connections_refused(m->Counter("transport_connections_refused_total",
                                     "Incoming connections refused because too many hand-offs were under way, or too "
                                     "many connections that had not "
                                     "said what they are.")) {}

}  // namespace kvmanager
