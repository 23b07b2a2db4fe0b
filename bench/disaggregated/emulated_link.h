// Two hosts on one machine: a network namespace for each, joined by a veth pair whose ends are held to a rate by
// `tc tbf`. Nothing is left behind, however this process ends: the namespaces live as long as their processes.
//
// The calling thread, and threads and processes that it makes from then on, are on the near host; a descriptor says
// where the far one is. Needs iproute2, CAP_SYS_ADMIN and CAP_NET_ADMIN. One thread.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace kvmanager::bench {

/// What passed the near host's end.
struct LinkCounters {
  uint64_t sent_bytes = 0;      // towards the far host, frames' headers included
  uint64_t received_bytes = 0;  // from it
  uint64_t dropped = 0;         // packets towards the far host that found the link's queue full
};

class EmulatedLink {
 public:
  /// What the bucket holds: what may pass at once after a pause. A large packet of the kernel (64 KiB) must fit.
  static constexpr double kBurstSeconds = 200e-6;
  static constexpr uint64_t kBurstBytesMin = 80 << 10;
  static constexpr int kQueueMs = 100;  // what waits at an end before it is dropped

  /// Moves the calling thread to the near host. Errors: PERMISSION_DENIED without the rights, NOT_FOUND without
  /// iproute2, UNAVAILABLE where the kernel has not what it takes; each says what to do.
  static absl::StatusOr<std::unique_ptr<EmulatedLink>> Create();
  ~EmulatedLink();
  EmulatedLink(const EmulatedLink&) = delete;
  EmulatedLink& operator=(const EmulatedLink&) = delete;

  /// Of either direction; 0: as fast as the machine copies.
  absl::Status SetRate(double bits_per_s);
  absl::StatusOr<LinkCounters> Counters() const;

  int far_network() const { return far_network_; }  // a descriptor of its namespace
  static std::string near_address() { return "10.77.0.1"; }
  static std::string far_address() { return "10.77.0.2"; }

 private:
  EmulatedLink() = default;
  absl::Status Build();

  pid_t holder_ = -1;  // a process that keeps the far namespace
  int far_network_ = -1;
};

}  // namespace kvmanager::bench
