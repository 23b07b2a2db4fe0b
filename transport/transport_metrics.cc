#include "transport/transport_metrics.h"

namespace kvmanager {
namespace {

prometheus::Family<prometheus::Counter>& CounterFamily(prometheus::Registry& registry, const char* name,
                                                       const char* help) {
  return prometheus::BuildCounter().Name(name).Help(help).Register(registry);
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

TransportMetrics::Direction::Direction(prometheus::Registry& registry, const char* direction)
    : bytes(CounterFamily(registry, "kvmanager_transport_bytes_total",
                          "Bytes of pages moved between daemons, headers not counted.")
                .Add({{"direction", direction}})),
      pages(CounterFamily(registry, "kvmanager_transport_pages_total", "Pages moved between daemons.")
                .Add({{"direction", direction}})),
      pages_skipped(CounterFamily(registry, "kvmanager_transport_pages_skipped_total",
                                  "Pages of a hand-off that the receiver had already and that were not moved.")
                        .Add({{"direction", direction}})),
      active(prometheus::BuildGauge()
                 .Name("kvmanager_transport_active_transfers")
                 .Help("Hand-offs under way.")
                 .Register(registry)
                 .Add({{"direction", direction}})),
      seconds(prometheus::BuildHistogram()
                  .Name("kvmanager_transport_transfer_seconds")
                  .Help("Seconds from the first byte of a hand-off to its confirmation, of those that succeeded.")
                  .Register(registry)
                  .Add({{"direction", direction}}, prometheus::Histogram::BucketBoundaries{
                                                       0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100})) {
  static constexpr const char* kResults[] = {"ok", "refused", "cancelled", "timeout", "checksum", "failed"};
  auto& family = CounterFamily(registry, "kvmanager_transport_transfers_total",
                               "Hand-offs that ended, by result: ok, refused by the receiver, cancelled, timeout (no "
                               "progress), checksum (a page arrived changed), failed (anything else).");
  for (int i = 0; i < 6; ++i) {
    transfers_by_result[i] = &family.Add({{"direction", direction}, {"result", kResults[i]}});
  }
}

TransportMetrics::TransportMetrics(prometheus::Registry& registry)
    : sent(registry, "sent"),
      received(registry, "received"),
      checksum_failures(CounterFamily(registry, "kvmanager_transport_checksum_failures_total",
                                      "Pages that arrived with bytes other than their checksum says.")
                            .Add({})),
      protocol_errors(CounterFamily(registry, "kvmanager_transport_protocol_errors_total",
                                    "Connections ended because the peer sent bytes that the protocol forbids.")
                          .Add({})),
      connections_refused(CounterFamily(registry, "kvmanager_transport_connections_refused_total",
                                        "Incoming connections refused because too many hand-offs were under way.")
                              .Add({})) {}

}  // namespace kvmanager
