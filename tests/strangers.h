// Who says what no client says: sessions that were recorded and changed, noise, half handshakes, on every socket that a
// daemon has.
//
// One thread each, but for said().
#pragma once

#include <atomic>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/harness.h"

namespace kvmanager::testing {

class Stranger {
 public:
  /// recorded: what a client said on a Unix socket, from its first byte on.
  Stranger(const DaemonProcess& daemon, std::string recorded, uint64_t seed);

  /// One connection.
  void Turn();
  /// Connections until now. Any thread.
  uint64_t said() const { return said_; }

 private:
  uint64_t Draw(uint64_t below) { return random_() % below; }
  std::string Noise(size_t bytes);
  std::string Changed();
  /// Says it, listens for at most so long, and goes.
  void Say(const std::string& address, const std::string& bytes, int64_t listen_ms);

  const std::vector<std::string> sockets_;  // the first: where a recorded session belongs
  const std::string recorded_;
  std::mt19937_64 random_;
  std::atomic<uint64_t> said_{0};
};

}  // namespace kvmanager::testing
