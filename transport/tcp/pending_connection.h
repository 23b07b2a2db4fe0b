// An accepted connection whose first frame has not arrived yet. That frame says what the connection is: a hand-off that
// begins, one that is resumed, a data connection of one, or a probe. Owned by Loop::pending_connections. The
// transport's thread only. The frame must arrive within the transport's stall time, however slowly the peer sends.
#pragma once

#include <memory>
#include <string>

#include "transport/tcp/frame_link.h"
#include "transport/tcp/handshake.h"
#include "transport/tcp/loop.h"

namespace kvmanager::tcp {

class PendingConnection : public std::enable_shared_from_this<PendingConnection> {
 public:
  /// host, peer: its address, without and with its port, for people to read.
  PendingConnection(Loop& loop, Socket socket, std::string host, std::string peer);
  /// REQUIRES: this is in loop.pending_connections.
  void Start();
  void Stop();

 private:
  void OnHello(absl::Status status, Socket socket, HelloFrame theirs);
  void OnFrame(Frame frame);
  void OnOffer(OfferFrame offer);
  /// Whether there is a place for a hand-off of host_, be it that of an idle one.
  absl::Status TakePlace() const;
  void OnJoin(const JoinFrame& join);
  void OnProbe();
  void Refuse(const absl::Status& why);
  void Leave();

  Loop& loop_;
  Socket socket_;
  Timer timer_;
  const SteadyTime deadline_;
  const std::string host_, peer_;
  HelloFrame theirs_;
  std::shared_ptr<Handshake> handshake_;
  std::shared_ptr<FrameLink> link_;
};

}  // namespace kvmanager::tcp
