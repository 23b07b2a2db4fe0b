// An accepted connection until its first frame says what it is: a hand-off that begins, one that goes on, a data
// connection of it, or a question. Owned by Loop::visitors; the transport's thread alone. It has the transport's stall
// time for that, however many bytes it trickles.
#pragma once

#include <memory>
#include <string>

#include "transport/tcp/frame_link.h"
#include "transport/tcp/greeting.h"
#include "transport/tcp/loop.h"

namespace kvmanager::tcp {

class Visitor : public std::enable_shared_from_this<Visitor> {
 public:
  /// host, peer: its address, without and with its port, for people to read.
  Visitor(Loop& loop, Socket socket, std::string host, std::string peer);
  /// REQUIRES: this is in loop.visitors.
  void Start();
  void Stop();

 private:
  void OnHello(absl::Status status, Socket socket, HelloFrame theirs);
  void OnFrame(Frame frame);
  void OnOffer(OfferFrame offer);
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
  std::shared_ptr<Greeting> greeting_;
  std::shared_ptr<FrameLink> link_;
};

}  // namespace kvmanager::tcp
