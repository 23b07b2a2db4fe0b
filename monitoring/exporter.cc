#include "monitoring/exporter.h"

#include <utility>

#include "kvmanager/base/status.h"

namespace kvmanager {

absl::StatusOr<std::unique_ptr<Exporter>> Exporter::Start(const std::string& listen, const Metrics* metrics,
                                                          std::vector<std::string> hosts, int inherited) {
  HttpServer::Options options;
  options.field = "metrics-listen";
  options.listen = listen;
  options.inherited = inherited;
  // No browser leaves the field out.
  options.answers_host = [hosts = std::move(hosts)](absl::string_view host) {
    return host.empty() || IsOwnHost(host, hosts);
  };
  options.handler = [metrics](absl::string_view path) {
    if (path != "/metrics") return HttpAnswer{};
    return HttpAnswer{200, "text/plain; version=0.0.4; charset=utf-8",
                      std::make_shared<const std::string>(metrics->Text())};
  };
  KV_ASSIGN_OR_RETURN(auto server, HttpServer::Start(std::move(options)));
  return std::unique_ptr<Exporter>(new Exporter(std::move(server)));
}

}  // namespace kvmanager
