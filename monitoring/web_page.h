// The page that the daemon serves to people: kvmanagerd --http-listen. HTML, style and script are in the binary; the
// script asks for state.json once a second.
//
// Owned by the Server. Its thread reads the Metrics and RecentErrors objects, which outlive it, and nothing else.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvmanager/base/clock.h"
#include "monitoring/dashboard.h"
#include "monitoring/http_server.h"

namespace kvmanager {

class WebPage {
 public:
  /// clock: outlives it. hosts: names by which it may be asked for, besides loopback's, or, elsewhere than there,
  /// IsOwnHost's. inherited: HttpServer::Options'. Errors: HttpServer::Start's.
  static absl::StatusOr<std::unique_ptr<WebPage>> Start(const std::string& listen, const Metrics* metrics,
                                                        const RecentErrors* errors, const Clock* clock,
                                                        DashboardFacts facts, std::vector<std::string> hosts = {},
                                                        int inherited = -1);
  int port() const { return server_->port(); }
  int listen_fd() { return server_->listen_fd(); }

 private:
  WebPage(const Metrics* metrics, const RecentErrors* errors, DashboardFacts facts)
      : dashboard_(metrics, errors, std::move(facts)) {}

  Dashboard dashboard_;
  std::unique_ptr<HttpServer> server_;  // its thread uses dashboard_
};

}  // namespace kvmanager
