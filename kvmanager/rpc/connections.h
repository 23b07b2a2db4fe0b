// Accepts clients and keeps their connections: one Session and one two-party RPC system each.
//
// Made and destroyed on the loop's thread, within the event loop's life. A connection ends, and its leases with it,
// when
//  1. the client closes it;
//  2. its bytes are no Cap'n Proto message, or one of more than limits::kMessageBytesMax;
//  3. on a Unix socket, the process that connected dies, even if a child of it still holds the socket;
//  4. on TCP, the peer is silent for limits::kTcpDeadS although it owes acknowledgements or keepalive answers;
//  5. it does not take the replies that it asked for (limits::kUnsentBytesMax), keeps others waiting for memory
//     (message_room.h), or never finishes its calls (limits::kUnfinishedCallsMax);
//  6. it has not said hello within limits::kHelloMs. Where there are as many connections as there may be, of all or of
//     its user or host, the oldest that has not makes room for the next;
//  7. the handshake of TLS fails, where TCP is to speak it (tls_handshakes.h). Until then it is no connection here.
// Nothing else happens to other connections.
//
// Connections on the admin socket, which are those of the daemon's own user and root, have a bound and descriptors of
// their own (limits::kAdminConnectionsMax): whatever others open, an operator can connect.
#pragma once

#include <kj/async.h>
#include <sys/socket.h>

#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "absl/container/btree_map.h"
#include "kvmanager/base/event_loop.h"
#include "kvmanager/base/owner_counts.h"
#include "kvmanager/rpc/connection_end_log.h"
#include "kvmanager/rpc/listen_socket.h"
#include "kvmanager/rpc/rpc_metrics.h"
#include "kvmanager/rpc/service.h"
#include "kvmanager/rpc/session.h"
#include "kvmanager/rpc/tls_handshakes.h"

namespace kvmanager {

class Connections final : private kj::TaskSet::ErrorHandler {
 public:
  /// What it uses. Everything outlives it.
  struct Parts {
    EventLoop* loop = nullptr;
    ConnectionMetrics* metrics = nullptr;
    const Session::Parts* session = nullptr;  // of each connection
    const DaemonParts* daemon = nullptr;      // of each connection's bootstrap capability
    const TlsSwitch* tls = nullptr;           // what TCP speaks; nullptr, or none for clients: plain
  };

  /// `sockets` outlive this.
  Connections(const Parts& parts, const std::vector<std::unique_ptr<ListenSocket>>& sockets);
  /// Ends every connection.
  ~Connections();

  /// How many there are.
  struct Use {
    size_t engines = 0, tcp = 0, admin = 0, handshakes = 0;
    size_t of_process = 0, of_user = 0, of_host = 0;  // of the one that has most
  };
  Use use() const;

 private:
  class Connection;
  struct Listener;

  kj::Promise<void> AcceptFrom(Listener& listener);
  void Accept(int fd, const ListenSocket& socket);
  void Add(kj::AutoCloseFd fd, std::unique_ptr<TlsLink> tls, const ListenSocket& socket);
  /// Why a connection of `peer` that was accepted is not served; nullptr: it is.
  const char* WhyRefused(int fd, const ListenSocket& socket, const ucred& peer, uint64_t origin);
  void CountIn(const Connection& connection);
  void CountOut(const Connection& connection);
  /// A connection is over: it is removed soon.
  void End(uint64_t id);
  kj::Promise<void> RemoveEnded();
  void Remove(uint64_t id);
  void taskFailed(kj::Exception&& exception) override;

  const Parts parts_;
  ConnectionEndLog end_log_;
  uint64_t next_id_ = 1;
  size_t admin_connections_ = 0;                                        // of connections_
  absl::btree_map<uint64_t, std::unique_ptr<Connection>> connections_;  // the oldest first
  std::deque<uint64_t> ended_;                                          // of them
  uint64_t tcp_connections_ = 0;                                        // likewise
  // Likewise, of engines: of a process over Unix sockets, where it is known, and of a user or a host.
  OwnerCounts<uint32_t> of_process_;
  OwnerCounts<uint64_t> of_user_, of_host_;
  TlsHandshakes handshakes_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::unique_ptr<kj::TaskSet> tasks_;
};

}  // namespace kvmanager
