// Serves a Metrics object over HTTP for Prometheus: GET /metrics.
//
// Owned by main(); its threads are its own and only read. Destroying it closes the port.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "monitoring/metrics.h"

namespace prometheus {
class Exposer;
}

namespace kvmanager {

class Exporter {
 public:
  /// listen: "HOST:PORT"; port 0 takes a free one. `metrics` may be destroyed first. Errors: INVALID_ARGUMENT (listen),
  /// UNAVAILABLE (the port cannot be bound).
  static absl::StatusOr<std::unique_ptr<Exporter>> Start(const std::string& listen, const Metrics& metrics);
  ~Exporter();
  Exporter(const Exporter&) = delete;
  Exporter& operator=(const Exporter&) = delete;

  int port() const { return port_; }  // the bound one

 private:
  Exporter() = default;
  std::unique_ptr<prometheus::Exposer> exposer_;
  int port_ = 0;
};

}  // namespace kvmanager
