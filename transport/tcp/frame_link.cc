#include "transport/tcp/frame_link.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::tcp {

void FrameLink::Listen(std::initializer_list<FrameType> accepts, Events events) {
  accepts_ = 0;
  for (const FrameType type : accepts) accepts_ |= 1u << static_cast<int>(type);
  ++generation_;
  events_ = std::move(events);
  if (!reading_ && state_ == State::kOpen) ReadHeader();
}

void FrameLink::Send(const std::string& frame) {
  if (state_ != State::kOpen) return;
  if (out_queue_.size() + frame.size() > kQueuedBytesMax) {
    // Not from here: whoever sends does not expect to lose the link meanwhile.
    asio::post(loop_.io, [self = shared_from_this()] {
      self->Break(FieldError(absl::StatusCode::kResourceExhausted, "bytes that the peer does not read",
                             absl::StrCat("over ", kQueuedBytesMax), absl::StrCat("at most ", kQueuedBytesMax)));
    });
    return;
  }
  sent_ = Now();
  out_queue_ += frame;
  if (!writing_) ContinueWriting();
}

void FrameLink::ContinueWriting() {
  if (out_sent_ == out_.size()) {
    out_ = std::exchange(out_queue_, {});
    out_sent_ = 0;
    if (out_.empty()) {
      if (state_ != State::kLingering) return;
      if (peer_closed_) return CloseNow();
      ErrorCode ignored;
      socket_.shutdown(Socket::shutdown_send, ignored);
      return;
    }
  }
  writing_ = true;
  socket_.async_write_some(asio::buffer(out_.data() + out_sent_, out_.size() - out_sent_),
                           [self = shared_from_this()](const ErrorCode& error, size_t bytes) {
                             self->writing_ = false;
                             if (self->state_ == State::kClosed) return;
                             if (error && self->state_ == State::kLingering) return self->CloseNow();
                             if (error) {
                               // Nothing more is written. The pending read tells whether the peer said why.
                               self->writing_ = true;
                               if (!self->reading_) self->BreakSocket("sending", error);
                               return;
                             }
                             self->out_sent_ += bytes;
                             self->ContinueWriting();
                           });
}

void FrameLink::ReadHeader() {
  reading_ = true;
  in_bytes_ = 0;
  in_.resize(kHeaderBytes);
  asio::async_read(socket_, asio::buffer(in_), [self = shared_from_this()](const ErrorCode& error, size_t bytes) {
    self->reading_ = false;
    if (self->state_ != State::kOpen) return self->OnDrained(error);
    if (error) return self->BreakSocket("receiving", error);
    self->heard_ = Now();
    self->in_bytes_ = bytes;
    self->OnHeader();
  });
}

void FrameLink::OnHeader() {
  const absl::StatusOr<FrameHeader> header = ParseHeader(in_);
  if (!header.ok()) return Break(header.status());
  if ((accepts_ >> static_cast<int>(header->type) & 1) == 0) {
    std::string accepted;
    for (int type = 1; type <= static_cast<int>(FrameType::kLocal); ++type) {
      if ((accepts_ >> type & 1) == 0) continue;
      absl::StrAppend(&accepted, accepted.empty() ? "" : ", ", FrameTypeName(static_cast<FrameType>(type)));
    }
    return Break(InvalidField("frame type here", FrameTypeName(header->type), accepted));
  }
  frame_bytes_ = kHeaderBytes + header->body_bytes;
  ReadBody();
}

absl::Status FrameLink::Grow() {
  // At most twice what has arrived: a header alone cannot claim memory.
  const uint64_t size = std::min<uint64_t>(frame_bytes_, std::max<uint64_t>(2 * in_bytes_, kBodyStepBytes));
  const uint64_t counted = size > kBodyStepBytes ? size : 0;
  const uint64_t others = loop_.frame_buffer_bytes - buffer_counted_;
  if (others + counted > loop_.options.offer_buffer_bytes_max) {
    return FieldError(absl::StatusCode::kResourceExhausted, "bytes of offers being received",
                      absl::StrCat(others + counted), absl::StrCat("at most ", loop_.options.offer_buffer_bytes_max));
  }
  loop_.frame_buffer_bytes = others + counted;
  buffer_counted_ = counted;
  in_.resize(size);
  return absl::OkStatus();
}

void FrameLink::ReadBody() {
  if (in_bytes_ == frame_bytes_) {
    absl::StatusOr<Frame> frame = ParseFrame(in_);
    loop_.frame_buffer_bytes -= std::exchange(buffer_counted_, 0);
    if (in_.capacity() > kBodyStepBytes) in_ = {};
    if (!frame.ok()) return Break(std::move(frame).status());
    const auto self = shared_from_this();
    // The handler may listen anew, or close this.
    auto handler = std::move(events_.frame);
    const uint64_t generation = generation_;
    handler(*std::move(frame));
    if (generation_ == generation) events_.frame = std::move(handler);
    if (state_ == State::kOpen && !reading_) ReadHeader();
    return;
  }
  if (in_bytes_ == in_.size()) {
    if (absl::Status status = Grow(); !status.ok()) return Break(std::move(status));
  }
  reading_ = true;
  socket_.async_read_some(asio::buffer(in_.data() + in_bytes_, in_.size() - in_bytes_),
                          [self = shared_from_this()](const ErrorCode& error, size_t bytes) {
                            self->reading_ = false;
                            if (self->state_ != State::kOpen) return self->OnDrained(error);
                            if (error) return self->BreakSocket("receiving", error);
                            self->heard_ = Now();
                            self->in_bytes_ += bytes;
                            self->ReadBody();
                          });
}

void FrameLink::Drain() {
  in_.resize(kDrainBytes);
  reading_ = true;
  socket_.async_read_some(asio::buffer(in_), [self = shared_from_this()](const ErrorCode& error, size_t) {
    self->reading_ = false;
    self->OnDrained(error);
  });
}

void FrameLink::OnDrained(const ErrorCode& error) {
  if (state_ != State::kLingering) return;
  if (!error) return Drain();
  if (error != asio::error::eof || !writing_) return CloseNow();
  peer_closed_ = true;
}

void FrameLink::Close(bool lingering) {
  if (state_ == State::kClosed) return;
  ++generation_;
  events_ = {};
  if (!lingering) return CloseNow();
  if (state_ == State::kLingering) return;
  state_ = State::kLingering;
  if (loop_.stopping || loop_.lingering.size() >= loop_.options.pending_connections_max) return CloseNow();
  loop_.lingering.insert(shared_from_this());
  linger_.expires_after(std::chrono::milliseconds(kLingerMs));
  linger_.async_wait([self = shared_from_this()](const ErrorCode& error) {
    if (!error) self->CloseNow();
  });
  if (!writing_) ContinueWriting();
  if (state_ == State::kLingering && !reading_) Drain();
}

void FrameLink::CloseNow() {
  if (state_ == State::kClosed) return;
  const auto self = shared_from_this();
  state_ = State::kClosed;
  ++generation_;
  events_ = {};
  loop_.frame_buffer_bytes -= std::exchange(buffer_counted_, 0);
  ErrorCode ignored;
  socket_.close(ignored);
  linger_.cancel();
  loop_.lingering.erase(self);
}

Socket FrameLink::Release() {
  KV_CHECK(state_ == State::kOpen && !reading_ && !writing_);
  state_ = State::kClosed;
  ++generation_;
  events_ = {};
  Socket socket = std::move(socket_);
  return socket;
}

void FrameLink::Break(absl::Status why) {
  // Whoever listens may still tell the peer why: the connection stays until it is closed.
  const auto self = shared_from_this();
  ++generation_;
  auto broken = std::move(events_.broken);
  events_ = {};
  if (broken) broken(std::move(why));
  if (state_ == State::kOpen) CloseNow();
}

void FrameLink::BreakSocket(const char* what, const ErrorCode& error) {
  Break(absl::UnavailableError(absl::StrCat(what, ": ", error.message())));
}

}  // namespace kvmanager::tcp
