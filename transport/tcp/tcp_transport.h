// Transport over TCP: each hand-off has a control connection and data connections, which carry its pages. One thread of
// its own keeps the state of all hand-offs; workers move the bytes. Pages are written from the sender's slots and read
// into the receiver's, never copied in between. wire.h has the format, and what happens when a connection breaks.
//
// Owned by main(). Methods from any thread; callbacks on the transport's thread. Create fails with the field that is
// wrong, or with UNAVAILABLE if the address cannot be listened on. The destructor fails what is being sent with
// CANCELLED, aborts what is being received, and joins the thread (a name being resolved is waited for); it must not run
// on the transport's thread.
//
// A side that has heard nothing of the other for its stall time ends the hand-off, within 9/8 of that time: each side
// makes itself heard whenever it was silent for a quarter of the shorter stall time. Who only makes itself heard keeps
// its place for idle_ms after its last page, then until somebody else needs it or the memory behind it. An
// IncomingHandOff that the receiver offers after the destructor began is destroyed. If the sender dies between Complete
// and its confirmation, the receiver has the hand-off: an unclaimed ticket is the receiver's to expire.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/tcp/zero_copy.h"
#include "transport/transport.h"
#include "transport/transport_metrics.h"

namespace kvmanager {

class DeviceCopier;
class RemoteMemory;
class TlsSwitch;

namespace tcp {
class IoThread;
}

/// Memory in which pages lie that are sent, as another process of this host can map it: all of it, for reading, and for
/// as long as it wants, hence only one that runs as this one's user.
struct SharedMemory {
  const uint8_t* data = nullptr;
  uint64_t bytes = 0;
  /// Of a memfd that can neither shrink nor be mapped for writing (Region, kReadOnly). Outlives the transport.
  int fd = -1;
};

class TcpTransport final : public Transport {
 public:
  struct Options {
    std::string listen;                               // "HOST:PORT", port 0: any; empty: this transport only sends
    int listen_fd = -1;                               // that listens there already, which stays the caller's; -1: none
    HandOffReceiver* receiver = nullptr;              // outlives the transport; needed if `listen` is set
    std::string peer_key;                             // what TCP peers must have, both ways (peer_key.h); empty: none
    const TlsSwitch* tls = nullptr;                   // what TCP peers speak TLS with; nullptr or none: plain; outlives
    TransportMetrics* metrics = nullptr;              // outlives the transport
    std::vector<SharedMemory> memory;                 // lets daemons of this host copy pages out of it; else by sockets
    bool local_connections = false;                   // whether to take pages so, and listen for it
    DeviceCopier* device_copier = nullptr;            // of GPUs' pages; need local_connections; nullptr: none are taken
    RemoteMemory* remote_memory = nullptr;            // pages that are neither copied so nor limited; outlives this
    int copy_threads = kCopyThreadsDefault;           // that copy them, and move bytes from and to sockets
    uint64_t send_bytes_per_s = 0;                    // of all hand-offs; 0: no limit; else `memory` must be empty
    int64_t stall_ms = SendRequest::kStallMsDefault;  // a peer that is not heard of for so long is given up
    uint32_t connections = kConnectionsDefault;       // connections for the pages of a hand-off that is sent, at most
    uint32_t connections_max = kConnectionsMaxDefault;  // of one that is received
    uint64_t window_bytes = kWindowBytesDefault;        // of pages on their way here, of all senders; each may send one
    size_t incoming_max = kIncomingMaxDefault;          // hand-offs received at once, half of them of one host; more
                                                        // are refused, unless one is idle
    int64_t idle_ms = kIdleMsDefault;  // an incoming one with no page for so long gives way to others that wait
    size_t outgoing_max = kOutgoingMaxDefault;  // hand-offs sent at once; more fail with RESOURCE_EXHAUSTED
    size_t pending_connections_max =
        kPendingConnectionsMaxDefault;  // connections that have not said what they are; more are closed
    uint64_t transfer_bytes_max = kTransferBytesMaxDefault;         // pages of one hand-off, either way
    uint64_t offer_buffer_bytes_max = kOfferBufferBytesMaxDefault;  // memory for incoming manifests and page lists
    tcp::ZeroCopyUse zero_copy = tcp::ZeroCopyUse::kWhereItPays;    // of pages over TCP
  };
  static constexpr uint32_t kConnectionsDefault = 4;
  static constexpr int kCopyThreadsDefault = 2;
  static constexpr int kCopyThreadsMax = 64;
  static constexpr uint32_t kConnectionsMaxDefault = 16;
  static constexpr uint64_t kWindowBytesDefault = 64 << 20;
  static constexpr size_t kPendingConnectionsMaxDefault = 256;
  static constexpr size_t kIncomingMaxDefault = 128;
  static constexpr int64_t kIdleMsDefault = 10000;
  static constexpr size_t kOutgoingMaxDefault = 256;
  static constexpr uint64_t kTransferBytesMaxDefault = uint64_t{256} << 30;
  static constexpr uint64_t kOfferBufferBytesMaxDefault = 256 << 20;

  static absl::StatusOr<std::unique_ptr<TcpTransport>> Create(Options options);
  ~TcpTransport() override;

  uint64_t Begin(SendRequest request, SendEvents events) override;
  void Post(uint64_t transfer, std::vector<SendPage> pages) override;
  void Finish(uint64_t transfer, HandOffPart trailer) override;
  void Cancel(uint64_t transfer) override;
  void Probe(std::string peer, absl::AnyInvocable<void(absl::StatusOr<ReceiverLoad>)> done) override;
  std::vector<PeerInfo> Peers() const override;
  std::string listen_address() const override;
  int listen_fd();  // -1: it listens nowhere

 private:
  explicit TcpTransport(std::unique_ptr<tcp::IoThread> io_thread);
  std::unique_ptr<tcp::IoThread> io_thread_;
};

}  // namespace kvmanager
