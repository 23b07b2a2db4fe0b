#include "monitoring/exporter.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <prometheus/exposer.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <thread>

#include "absl/strings/numbers.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

namespace {

constexpr size_t kThreads = 2;
constexpr int kWakeMs = 10;

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

Exporter::~Exporter() {
  if (exposer_ == nullptr) return;
  // The HTTP server looks at its stop flag when somebody connects, else every two seconds.
  std::atomic<bool> stopped{false};
  std::thread waker([this, &stopped] {
    while (!stopped) {
      const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
      sockaddr_in to{};
      to.sin_family = AF_INET;
      to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      to.sin_port = htons(static_cast<uint16_t>(port_));
      if (fd >= 0) {
        (void)connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to);
        close(fd);
      }
      poll(nullptr, 0, kWakeMs);
    }
  });
  exposer_.reset();
  stopped = true;
  waker.join();
}

}  // namespace kvmanager
