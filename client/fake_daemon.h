// A daemon for the client's tests: the API over a real socket, on a thread of its own, with kj's own streams (so that
// the client's are tested against another implementation), and knobs for what a real daemon does rarely.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/string_view.h"
#include "kvmanager/base/mutex.h"

namespace kvmanager::client {

class FakeDaemon {
 public:
  struct Behaviour {
    uint16_t api_major = 1;
    bool silent_hello = false;
    uint64_t message_bytes_max = 32 << 20;
    bool tcp = false;
    std::vector<std::string> features;
  };

  FakeDaemon() : FakeDaemon(Behaviour{}) {}
  explicit FakeDaemon(const Behaviour& behaviour);
  ~FakeDaemon();

  /// "unix:..." or "tcp:127.0.0.1:...".
  const std::string& address() const { return address_; }

  /// Stops: connections end. Start() listens on the same Unix address again, as another boot.
  void Stop();
  void Start();

  // What has happened. Counters of all boots.
  struct Seen {
    int connections_open = 0;
    int calls_held = 0;       // pings and steps that are kept waiting
    int calls_cancelled = 0;  // of those
    int sequences_alive = 0;
    int caches_alive = 0;
    int arenas_alive = 0;
    int leases_alive = 0;  // of blocks
    int slabs_asked = 0;   // calls of mapSlab
    int slabs_sent = 0;    // descriptors that the client has not dropped, and the most of them
    int slabs_sent_most = 0;
    uint64_t bound_bytes = 0;    // of the last call of bindSlabs
    uint32_t corrupt_block = 0;  // of the last lease that was released
    int mapped_at_the_end = 0;   // slabs in this process's memory when a connection ended
    std::string client_name;
    uint32_t last_step_tokens = 0;
    bool purge_all = false;
    bool draining = false;
  };
  Seen seen() const;
  /// Waits until `condition` holds.
  void Await(const std::function<bool(const Seen&)>& condition) const;

  // Pings are kept waiting while this is set, and steps of layer kHeldLayer always.
  void HoldPings(bool on);
  static constexpr int kHeldLayer = 99;
  static constexpr int kRefusedLayer = 98;  // INVALID_ARGUMENT with field, value and bound

  /// What readBlocks answers from now on, whatever is asked.
  struct Blocks {
    uint32_t blocks = 0;
    uint64_t bytes = 0;
    std::string raw, places, checksums;
    bool lease = true;
    std::vector<uint32_t> unmap;
    std::vector<uint32_t> bound;  // what bindSlabs gives, as many as are asked for
  };
  void SetBlocks(Blocks blocks);
  Blocks blocks() const;
  // mapSlab gives slabs of kSlabBytes, of which each byte is the slab's number. Of kRefusedSlab it is
  // FAILED_PRECONDITION; kBareSlab has no descriptor, kShortSlab half of its bytes, kOpenSlab no seals.
  static constexpr uint64_t kSlabBytes = 128 << 10;
  static constexpr uint32_t kRefusedSlab = 100, kBareSlab = 101, kShortSlab = 102, kOpenSlab = 103;
  /// How many of them this process maps.
  static int MappedSlabs();

  void Change(const std::function<void(Seen&)>& change);
  bool pings_held() const;
  const Behaviour& behaviour() const { return behaviour_; }

 private:
  void Run(int listening_fd, int stop_fd, uint64_t boot_epoch);

  const Behaviour behaviour_;
  std::string path_, address_;
  mutable Mutex mutex_;
  mutable std::condition_variable changed_;
  Seen seen_ ABSL_GUARDED_BY(mutex_);
  bool pings_held_ ABSL_GUARDED_BY(mutex_) = false;
  Blocks blocks_ ABSL_GUARDED_BY(mutex_);
  uint64_t boots_ = 0;
  int stop_fd_ = -1;
  std::thread thread_;
};

}  // namespace kvmanager::client
