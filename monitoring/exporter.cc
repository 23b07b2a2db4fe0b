#include "monitoring/exporter.h"

#include <prometheus/exposer.h>

#include <exception>

#include "absl/strings/numbers.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

namespace {

constexpr size_t kThreads = 2;

}  // namespace

absl::StatusOr<std::unique_ptr<Exporter>> Exporter::Start(const std::string& listen, const Metrics& metrics) {
  const size_t colon = listen.rfind(':');
  int port = -1;
  std::string host = colon == std::string::npos ? "" : listen.substr(0, colon);
  if (host == "localhost") host = "127.0.0.1";
  // The HTTP server reads lists and suffixes into its option, so only the characters of an address pass.
  if (host.empty() || host.find_first_not_of("0123456789abcdefABCDEF.:[]") != std::string::npos ||
      !absl::SimpleAtoi(listen.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return InvalidField("metrics-listen", listen, "HOST:PORT, a numeric address or localhost and a port 0..65535");
  }
  std::unique_ptr<Exporter> exporter(new Exporter);
  try {
    exporter->exposer_ = std::make_unique<prometheus::Exposer>(absl::StrCat(host, ":", port), kThreads);
    exporter->exposer_->RegisterCollectable(metrics.registry());
    const std::vector<int> ports = exporter->exposer_->GetListeningPorts();
    if (ports.empty()) return absl::UnavailableError(absl::StrCat("metrics-listen ", listen, ": nothing is bound"));
    exporter->port_ = ports.front();
  } catch (const std::exception& error) {
    return absl::UnavailableError(absl::StrCat("metrics-listen ", listen, " cannot be bound: ", error.what()));
  }
  return exporter;
}

Exporter::~Exporter() = default;

}  // namespace kvmanager
