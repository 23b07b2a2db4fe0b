#include "transport/tcp/handshake.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "transport/tcp/peer_key.h"

namespace kvmanager::tcp {
namespace {

constexpr uint8_t kTlsAlert = 21;  // the first byte of what a peer that speaks TLS answers to a hello

}  // namespace

Handshake::Handshake(Loop& loop, Socket socket, int64_t stall_ms, SteadyTime deadline, Done done)
    : socket_(std::move(socket)),
      timer_(loop.io),
      features_(kFeatures | (loop.options.remote_memory == nullptr ? 0 : kFeatureRemoteMemory)),
      has_key_(!loop.options.peer_key.empty()),
      stall_ms_(stall_ms),
      deadline_(deadline),
      done_(std::move(done)) {}

void Handshake::Start(const std::string& first) {
  Tune(socket_, stall_ms_);
  timer_.expires_at(deadline_);
  timer_.async_wait([self = shared_from_this()](const ErrorCode& error) {
    if (error || !self->done_) return;
    self->Finish(absl::DeadlineExceededError("no hello in time"), /*close=*/true);
  });
  HelloFrame ours;
  ours.features = features_;
  ours.stall_ms = static_cast<uint32_t>(stall_ms_);
  out_ = EncodeHello(ours) + first;
  Write();
  Read();
}

void Handshake::Write() {
  socket_.async_write_some(asio::buffer(out_.data() + out_sent_, out_.size() - out_sent_),
                           [self = shared_from_this()](const ErrorCode& error, size_t bytes) {
                             if (!self->done_) return;
                             if (error) {
                               return self->Finish(absl::UnavailableError(absl::StrCat("hello: ", error.message())),
                                                   /*close=*/true);
                             }
                             self->out_sent_ += bytes;
                             if (self->out_sent_ < self->out_.size()) return self->Write();
                             self->MaybeDone();
                           });
}

void Handshake::Read() {
  in_.resize(kHelloBytes);
  asio::async_read(socket_, asio::buffer(in_), [self = shared_from_this()](const ErrorCode& error, size_t bytes) {
    if (!self->done_) return;
    if (error && bytes >= 3 && self->in_[0] == kTlsAlert && self->in_[1] == 3) {
      return self->Finish(
          absl::UnauthenticatedError("the peer speaks TLS, and this daemon does not with peers: start it "
                                     "with --tls-cert, --tls-key and --tls-ca"),
          /*close=*/true);
    }
    if (error) {
      return self->Finish(absl::UnavailableError(absl::StrCat("waiting for its hello: ", error.message())),
                          /*close=*/true);
    }
    if (IsAuthMagic(self->in_)) {
      return self->Finish(self->has_key_
                              ? absl::UnauthenticatedError("the peer did not take this daemon's proof of the key")
                              : PeerWantsKey(),
                          /*close=*/false);
    }
    absl::StatusOr<Frame> frame = ParseFrame(self->in_);
    if (!frame.ok()) return self->Finish(std::move(frame).status(), /*close=*/false);
    const HelloFrame* hello = std::get_if<HelloFrame>(&*frame);
    if (hello == nullptr) return self->Finish(InvalidField("first bytes", "no hello", "a hello"), /*close=*/false);
    if (absl::Status status = CheckVersion(*hello); !status.ok()) {
      return self->Finish(std::move(status), /*close=*/false);
    }
    self->theirs_ = *hello;
    self->heard_ = true;
    self->MaybeDone();
  });
}

void Handshake::MaybeDone() {
  if (heard_ && out_sent_ == out_.size()) Finish(absl::OkStatus(), /*close=*/false);
}

void Handshake::Finish(absl::Status status, bool close) {
  timer_.cancel();
  ErrorCode ignored;
  if (close) socket_.close(ignored);
  std::exchange(done_, nullptr)(std::move(status), std::move(socket_), theirs_);
}

void Handshake::Cancel() {
  if (!done_) return;
  done_ = nullptr;
  timer_.cancel();
  ErrorCode ignored;
  socket_.close(ignored);
}

}  // namespace kvmanager::tcp
