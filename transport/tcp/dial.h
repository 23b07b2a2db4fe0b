// Makes a connection to a peer: its name resolved, each address tried, TLS spoken and keys exchanged if there is what
// for, hellos said. Owned by whoever wants the connection and the handlers of its pending operations; the transport's
// thread alone. `done` is called once, unless Cancel comes first.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/loop.h"
#include "transport/tcp/peer_auth.h"
#include "transport/tcp/tls_relay.h"

namespace kvmanager::tcp {

/// The address of an abstract Unix socket.
inline asio::local::stream_protocol::endpoint LocalEndpoint(const std::string& name) {
  return asio::local::stream_protocol::endpoint(std::string(1, '\0') + name);
}

class Dial : public std::enable_shared_from_this<Dial> {
 public:
  struct Connection {
    Socket socket;
    HelloFrame theirs;
  };
  struct Address {
    std::string peer;    // "HOST:PORT"; if `local`, the name of a Unix socket in the abstract namespace
    bool local = false;  // then UNAVAILABLE unless a process of this one's user listens there
  };
  using Done = absl::AnyInvocable<void(absl::StatusOr<Connection>)>;

  /// stall_ms: DEADLINE_EXCEEDED after so long.
  Dial(Loop& loop, Address to, int64_t stall_ms, Done done);
  /// first: a frame that goes with the hello, unless the peer's hello has to be known before.
  void Start(std::string first = "");
  void Cancel();

 private:
  void ConnectNext(const ErrorCode& last_error);
  void OnConnected();
  void ExchangeKeys(Socket socket);
  void SayHello(Socket socket);
  /// As `why`, naming the peer, with another code.
  absl::Status OfPeer(absl::StatusCode code, const absl::Status& why) const;
  void Finish(absl::StatusOr<Connection> result);

  Loop& loop_;
  const Address to_;
  const int64_t stall_ms_;
  const SteadyTime deadline_;
  Done done_;  // empty once called
  Resolver resolver_;
  Timer timer_;
  Socket socket_;
  std::string first_;
  std::vector<asio::generic::stream_protocol::endpoint> endpoints_;
  size_t endpoints_tried_ = 0;
  std::string host_;  // of `to_`
  std::shared_ptr<TlsRelay> tls_;
  std::shared_ptr<PeerAuth> auth_;
  std::shared_ptr<Handshake> handshake_;
};

}  // namespace kvmanager::tcp
