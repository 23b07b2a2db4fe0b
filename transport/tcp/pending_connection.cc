#include "transport/tcp/pending_connection.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "transport/tcp/host_port.h"
#include "transport/tcp/incoming.h"

namespace kvmanager::tcp {

PendingConnection::PendingConnection(Loop& loop, Socket socket, std::string host, std::string peer)
    : loop_(loop),
      socket_(std::move(socket)),
      timer_(loop.io),
      deadline_(Now() + std::chrono::milliseconds(loop.options.stall_ms)),
      host_(std::move(host)),
      peer_(std::move(peer)) {}

void PendingConnection::Start() {
  handshake_ =
      std::make_shared<Handshake>(loop_, std::move(socket_), loop_.options.stall_ms, deadline_,
                                  [self = shared_from_this()](absl::Status status, Socket socket, HelloFrame theirs) {
                                    self->OnHello(std::move(status), std::move(socket), theirs);
                                  });
  const auto handshake = handshake_;
  handshake->Start();
}

void PendingConnection::OnHello(absl::Status status, Socket socket, HelloFrame theirs) {
  handshake_ = nullptr;
  theirs_ = theirs;
  if (!socket.is_open()) return Leave();
  link_ = std::make_shared<FrameLink>(loop_, std::move(socket));
  if (!status.ok()) {
    if (status.code() != absl::StatusCode::kUnimplemented) loop_.metrics.protocol_errors.Increment();
    return Refuse(status);
  }
  timer_.expires_at(deadline_);
  timer_.async_wait([self = shared_from_this()](const ErrorCode& error) {
    if (error || self->link_ == nullptr) return;
    const int64_t stall_ms = self->loop_.options.stall_ms;
    self->Refuse(FieldError(absl::StatusCode::kDeadlineExceeded, "ms without a first frame", absl::StrCat(stall_ms),
                            absl::StrCat("below ", stall_ms)));
  });
  const auto self = shared_from_this();
  link_->Listen({FrameType::kOffer, FrameType::kJoin, FrameType::kProbe, FrameType::kCancel},
                {[self](Frame frame) { self->OnFrame(std::move(frame)); },
                 [self](absl::Status why) {
                   if (why.code() == absl::StatusCode::kUnavailable) return self->Leave();
                   self->loop_.metrics.protocol_errors.Increment();
                   self->Refuse(why);
                 }});
}

void PendingConnection::OnFrame(Frame frame) {
  if (auto* offer = std::get_if<OfferFrame>(&frame)) return OnOffer(std::move(*offer));
  if (const auto* join = std::get_if<JoinFrame>(&frame)) return OnJoin(*join);
  if (std::holds_alternative<ProbeFrame>(frame)) return OnProbe();
  Leave();
}

void PendingConnection::OnOffer(OfferFrame offer) {
  if (loop_.incoming.count(offer.token) > 0) {
    return Refuse(absl::AlreadyExistsError("this hand-off was offered before"));
  }
  if (absl::Status status = TakePlace(); !status.ok()) {
    loop_.metrics.connections_refused.Increment();
    return Refuse(status);
  }
  auto incoming = std::make_shared<Incoming>(loop_, offer.token, host_, peer_, theirs_.stall_ms);
  loop_.incoming.emplace(offer.token, incoming);
  incoming->Start(std::move(link_), std::move(offer));
  Leave();
}

absl::Status PendingConnection::TakePlace() const {
  const size_t all_max = loop_.options.incoming_max, of_host_max = (all_max + 1) / 2;
  size_t of_host = 0;
  std::shared_ptr<Incoming> idle, idle_of_host;  // those for longest
  const auto take = [](const std::shared_ptr<Incoming>& each, std::shared_ptr<Incoming>* longest) {
    if (*longest == nullptr || each->idle() > (*longest)->idle()) *longest = each;
  };
  for (const auto& [token, incoming] : loop_.incoming) {
    if (incoming->ended()) continue;
    const bool same = incoming->host() == host_;
    if (same) ++of_host;
    if (incoming->idle() < std::chrono::milliseconds(loop_.options.idle_ms)) continue;
    take(incoming, &idle);
    if (same) take(incoming, &idle_of_host);
  }
  if (of_host >= of_host_max) {
    if (idle_of_host == nullptr) {
      return FieldError(absl::StatusCode::kResourceExhausted, "hand-offs being received of one host",
                        absl::StrCat(of_host + 1), absl::StrCat("at most ", of_host_max));
    }
    idle_of_host->EndIdle();
  } else if (loop_.incoming_open >= all_max) {
    if (idle == nullptr) {
      return FieldError(absl::StatusCode::kResourceExhausted, "hand-offs being received",
                        absl::StrCat(loop_.incoming_open + 1), absl::StrCat("at most ", all_max));
    }
    idle->EndIdle();
  }
  return absl::OkStatus();
}

void PendingConnection::OnJoin(const JoinFrame& join) {
  const auto found = loop_.incoming.find(join.token);
  if (found == loop_.incoming.end()) {
    return Refuse(absl::NotFoundError("no such hand-off here: it has ended, or this daemon was started anew"));
  }
  const std::shared_ptr<Incoming> incoming = found->second;
  if (join.connection == 0) {
    incoming->Resume(std::move(link_));
  } else {
    incoming->AddConnection(join.connection, std::move(link_));
  }
  Leave();
}

void PendingConnection::OnProbe() {
  ReceiverLoad load = loop_.options.receiver->Load();
  load.active_transfers = loop_.incoming_open;
  for (const auto& [token, incoming] : loop_.incoming) load.queued_bytes += incoming->bytes_to_come();
  link_->Send(EncodeLoad(load));
  std::exchange(link_, nullptr)->Close(/*lingering=*/true);
  Leave();
}

void PendingConnection::Refuse(const absl::Status& why) {
  link_->Send(EncodeError(why));
  std::exchange(link_, nullptr)->Close(/*lingering=*/true);
  Leave();
}

void PendingConnection::Leave() {
  timer_.cancel();
  if (link_ != nullptr) std::exchange(link_, nullptr)->Close();
  loop_.pending_connections.erase(shared_from_this());
}

void PendingConnection::Stop() {
  const auto self = shared_from_this();
  if (handshake_ != nullptr) std::exchange(handshake_, nullptr)->Cancel();
  Leave();
}

}  // namespace kvmanager::tcp
