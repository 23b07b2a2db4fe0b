// Carries the exchange of keys (peer_key.h) over a connection, before anything else is said there. Owned by Dial or by
// Loop::authenticating, and by the handlers of its pending operations; the transport's thread alone. `done` is called
// once, unless Cancel comes first.
//
// A peer that has not proved the key costs a socket, a few hundred bytes and kAuthMs at most: nothing that it sends is
// kept, no message is longer than 80 bytes.
#pragma once

#include <array>
#include <memory>
#include <string>

#include "transport/tcp/loop.h"
#include "transport/tcp/peer_key.h"

namespace kvmanager::tcp {

class PeerAuth : public std::enable_shared_from_this<PeerAuth> {
 public:
  /// status: OK: the peer has the key. Else the socket is closed: UNAUTHENTICATED: it has not proved that, and was told
  /// no more than that; UNAVAILABLE: the connection broke; DEADLINE_EXCEEDED.
  using Done = absl::AnyInvocable<void(absl::Status status, Socket socket)>;

  /// REQUIRES: loop.options has a key.
  PeerAuth(Loop& loop, Socket socket, AuthRole role, Done done);
  void Start();
  void Cancel();

 private:
  void Write();
  void Read();
  void OnRead();
  void Refuse(absl::Status why);
  void Drain();
  void Finish(absl::Status status);

  Socket socket_;
  Timer timer_;
  const AuthRole role_;
  AuthExchange exchange_;
  Done done_;  // empty once called
  std::string out_;
  std::array<uint8_t, kAnswerBytes> in_ = {};
  absl::Status refused_;  // why, while the refusal goes out
  size_t drained_ = 0;
};

/// A peer failed the exchange: counts it and, at most once a second, says so in the log.
void CountAuthFailure(Loop& loop, AuthRole role, const std::string& peer, const absl::Status& why);

}  // namespace kvmanager::tcp
