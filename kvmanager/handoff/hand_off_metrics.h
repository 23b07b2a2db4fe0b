// Metrics of hand-offs: references to series, made once at start. Any thread may touch them.
#pragma once

#include "monitoring/metrics.h"

namespace kvmanager {

struct HandOffMetrics {
  explicit HandOffMetrics(Metrics* metrics);

  // Sent (OutgoingHandOff).
  prometheus::Counter& sent;
  prometheus::Counter& send_failed;
  // Received (IncomingHandOffs).
  prometheus::Counter& received;
  prometheus::Counter& between_gpus;
  prometheus::Counter& refused;
  prometheus::Counter& aborted;
  prometheus::Gauge& waiting;
  // Tickets.
  prometheus::Counter& claimed;
  prometheus::Counter& expired;
  prometheus::Gauge& tickets;
};

}  // namespace kvmanager
