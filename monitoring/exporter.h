// Serves a Metrics object over HTTP for Prometheus: GET /metrics.
//
// Owned by main(); its server's thread only reads. Destroying it closes the port.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "monitoring/http_server.h"
#include "monitoring/metrics.h"

namespace kvmanager {

class Exporter {
 public:
  /// listen: "HOST:PORT"; port 0 takes a free one. metrics: outlives it. hosts: names by which it may be asked for,
  /// besides IsOwnHost's. inherited: HttpServer::Options'. Errors: INVALID_ARGUMENT (listen), UNAVAILABLE (the port
  /// cannot be bound).
  static absl::StatusOr<std::unique_ptr<Exporter>> Start(const std::string& listen, const Metrics* metrics,
                                                         std::vector<std::string> hosts = {}, int inherited = -1);

  int port() const { return server_->port(); }  // the bound one
  int listen_fd() { return server_->listen_fd(); }

 private:
  explicit Exporter(std::unique_ptr<HttpServer> server) : server_(std::move(server)) {}
  const std::unique_ptr<HttpServer> server_;
};

}  // namespace kvmanager
