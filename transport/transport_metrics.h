// The metrics of a transport: references to series of a Metrics object that main() owns and that outlives the
// transport. Updates are atomic and may come from any thread.
#pragma once

#include "absl/status/status.h"
#include "monitoring/metrics.h"

namespace kvmanager {

/// How a transfer ended; the label `result` of kvmanager_transport_transfers_total.
enum class TransferResult { kOk, kRefused, kCancelled, kTimeout, kChecksum, kFailed };

/// The result that `status` stands for: CANCELLED, DEADLINE_EXCEEDED and DATA_LOSS have their own, other errors are
/// kFailed.
TransferResult ResultOf(const absl::Status& status);

/// How pages went: through sockets, by a copy from memory to memory of one host, or read through UCX; the label `by` of
/// kvmanager_transport_bytes_total.
enum class PageWay { kSocket, kCopy, kUcx };

struct TransportMetrics {
  explicit TransportMetrics(Metrics* metrics);

  /// The metrics of one direction, label `direction`: "sent" or "received".
  struct Direction {
    Direction(Metrics* metrics, const char* direction);
    void CountBytes(uint64_t bytes, PageWay way) {
      prometheus::Counter& counter =
          way == PageWay::kSocket ? socket_bytes : (way == PageWay::kCopy ? copied_bytes : ucx_bytes);
      counter.Increment(static_cast<double>(bytes));
    }
    prometheus::Counter& transfers(TransferResult result) { return *transfers_by_result[static_cast<int>(result)]; }

    prometheus::Counter& socket_bytes;
    prometheus::Counter& copied_bytes;
    prometheus::Counter& ucx_bytes;
    prometheus::Counter& pages;
    prometheus::Counter& pages_skipped;
    prometheus::Counter& authentication_failures;
    prometheus::Gauge& active;
    prometheus::Histogram& seconds;
    prometheus::Counter* transfers_by_result[6];
  };

  /// Bytes that were written to be sent straight from where they lie; the label `result` of
  /// kvmanager_transport_zero_copy_bytes_total.
  struct ZeroCopy {
    explicit ZeroCopy(Metrics* metrics);
    prometheus::Counter& sent;
    prometheus::Counter& copied;       // the kernel copied them after all
    prometheus::Counter& refused;      // it took them only as a plain write
    prometheus::Counter& unconfirmed;  // it did not say in time that it was through with them
  };

  Direction sent;
  Direction received;
  ZeroCopy zero_copy;
  prometheus::Counter& checksum_failures;
  prometheus::Counter& protocol_errors;
  prometheus::Counter& connections_refused;
};

}  // namespace kvmanager
