#include "transport/tcp/probe.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::tcp {

Probe::Probe(Loop& loop, std::string peer, Done done)
    : loop_(loop), peer_(std::move(peer)), done_(std::move(done)), timer_(loop.io) {}

void Probe::Start() {
  const auto self = shared_from_this();
  const int64_t stall_ms = loop_.options.stall_ms;
  timer_.expires_after(std::chrono::milliseconds(stall_ms));
  timer_.async_wait([self, stall_ms](const ErrorCode& error) {
    if (error) return;
    self->Finish(FieldError(absl::StatusCode::kDeadlineExceeded, absl::StrCat("ms without an answer of ", self->peer_),
                            absl::StrCat(stall_ms), absl::StrCat("below ", stall_ms)));
  });
  dial_ = std::make_shared<Dial>(loop_, Dial::Address{peer_}, stall_ms,
                                 [self](absl::StatusOr<Dial::Connection> connection) {
                                   self->dial_ = nullptr;
                                   if (!connection.ok()) return self->Finish(std::move(connection).status());
                                   self->Ask(*std::move(connection));
                                 });
  const auto dial = dial_;
  dial->Start();
}

void Probe::Ask(Dial::Connection connection) {
  link_ = std::make_shared<FrameLink>(loop_, std::move(connection.socket));
  const auto self = shared_from_this();
  link_->Listen({FrameType::kLoad, FrameType::kError},
                {[self](Frame frame) { self->OnFrame(std::move(frame)); },
                 [self](const absl::Status& why) {
                   self->Finish(absl::UnavailableError(absl::StrCat(
                       "peer ", self->peer_, ": ", absl::string_view(why.message().data(), why.message().size()))));
                 }});
  link_->Send(EncodeEmpty(FrameType::kProbe));
}

void Probe::OnFrame(Frame frame) {
  if (auto* error = std::get_if<ErrorFrame>(&frame)) return Finish(std::move(error->status));
  Finish(std::get<LoadFrame>(frame).load);
}

void Probe::Finish(absl::StatusOr<ReceiverLoad> result) {
  if (!done_) return;
  const auto self = shared_from_this();
  timer_.cancel();
  if (dial_ != nullptr) std::exchange(dial_, nullptr)->Cancel();
  if (link_ != nullptr) std::exchange(link_, nullptr)->Close();
  loop_.probes.erase(self);
  std::exchange(done_, nullptr)(std::move(result));
}

}  // namespace kvmanager::tcp
