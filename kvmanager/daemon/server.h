// One daemon as an object: kvmanagerd's main runs one, tests run several in a process.
//
//   auto server = Server::Create(options);          // memory is taken, every address is bound
//   std::thread loop([&] { (*server)->Run(); });    // serves; the listen sockets queue clients until then
//   (*server)->Stop();
//   loop.join();
//
// This is the central header of the room daemon/: it knows every other room, and none knows it. Options become values
// and objects become constructor arguments here: server.cc wires them (server_devices.h: those of GPUs), so a lower
// room never asks for more than its Parts name.
//
// Owned by its maker. Create and Run may be on different threads; Run is called at most once and is the loop's thread;
// Stop and Terminate come from any thread. Destroy it after Run has returned, or without Run.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "kvmanager/daemon/options.h"
#include "kvmanager/daemon/upgrade.h"

namespace kvmanager {

class Server {
 public:
  /// Errors: INVALID_ARGUMENT, RESOURCE_EXHAUSTED (the host has not that much memory), UNAVAILABLE (an address).
  static absl::StatusOr<std::unique_ptr<Server>> Create(const Options& options);
  virtual ~Server() = default;

  /// Serves until Stop, or until a Terminate has drained. signal_fd: a signalfd that the loop reads: SIGHUP reads
  /// Options::tenants and the files of TLS again, each other signal is a Terminate; -1: none.
  virtual void Run(int signal_fd = -1) = 0;
  /// Ends Run now: leases are lost.
  virtual void Stop() = 0;
  /// Drains: no new sequences or incoming hand-offs. Run ends when clients hold no sequence, no hand-off is under way
  /// and every received one is claimed or expired, or after Options::drain_s. The second call ends Run now.
  virtual void Terminate() = 0;

  /// Comma-separated, as bound.
  virtual std::string listen_address() const = 0;
  virtual std::string peer_address() const = 0;     // empty: none
  virtual std::string metrics_address() const = 0;  // empty: none
  virtual std::string http_address() const = 0;     // empty: none
  virtual std::string admin_address() const = 0;    // empty: none
  /// The metrics in Prometheus' text format.
  virtual std::string MetricsText() const = 0;

  /// What is to go on in this process, by the sockets that it had: Run ended for an upgrade (Admin.upgrade). Once,
  /// behind Run; only destruction may follow, and where no GPU is used not even that.
  virtual Successor TakeSuccessor() = 0;
};

}  // namespace kvmanager
