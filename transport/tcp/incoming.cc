#include "transport/tcp/incoming.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "transport/tcp/host_port.h"

namespace kvmanager::tcp {

Incoming::Incoming(Loop& loop, uint64_t id, Socket socket)
    : loop_(loop), id_(id), socket_(std::move(socket)), timer_(loop.io) {
  ErrorCode gone;
  const asio::ip::tcp::endpoint endpoint = socket_.remote_endpoint(gone);
  host_ = gone ? "unknown" : endpoint.address().to_string(gone);
  peer_ = FormatHostPort(host_, endpoint.port());
}

void Incoming::Start(absl::Status refusal) {
  ++loop_.incoming_open;
  Tune(socket_, loop_.options.stall_ms);
  started_ = std::chrono::steady_clock::now();
  deadline_ = started_ + std::chrono::milliseconds(loop_.options.stall_ms);
  ArmTimer();
  Queue(EncodeHello());
  if (!refusal.ok()) return End(std::move(refusal), /*tell=*/true);
  ReadHello();
}

void Incoming::Touch() {
  // A hello is short, and a closing connection has had its time: neither earns more by trickling bytes.
  if (state_ == State::kHello || state_ == State::kClosing) return;
  deadline_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(loop_.options.stall_ms);
}

void Incoming::ArmTimer() {
  timer_.expires_at(deadline_);
  timer_.async_wait([self = shared_from_this()](const ErrorCode& error) {
    if (error || self->state_ == State::kClosed) return;
    if (std::chrono::steady_clock::now() < self->deadline_) return self->ArmTimer();
    if (self->state_ == State::kClosing) return self->Close();
    const int64_t stall_ms = self->loop_.options.stall_ms;
    self->End(FieldError(absl::StatusCode::kDeadlineExceeded, "ms without progress at the receiver",
                         absl::StrCat(stall_ms), absl::StrCat("below ", stall_ms)),
              /*tell=*/true);
  });
}

void Incoming::Queue(std::string frame) {
  out_queue_ += frame;
  if (!writing_) ContinueWriting();
}

void Incoming::ContinueWriting() {
  if (out_sent_ == out_.size()) {
    out_ = std::exchange(out_queue_, {});
    out_sent_ = 0;
    if (out_.empty()) {
      ErrorCode ignored;
      if (state_ != State::kClosing) return;
      if (peer_closed_) return Close();
      socket_.shutdown(Socket::shutdown_send, ignored);
      return;
    }
  }
  writing_ = true;
  socket_.async_write_some(asio::buffer(out_.data() + out_sent_, out_.size() - out_sent_),
                           [self = shared_from_this()](const ErrorCode& error, size_t bytes) {
                             self->writing_ = false;
                             if (self->state_ == State::kClosed) return;
                             if (error == asio::error::operation_aborted) return self->Close();
                             if (error) return self->EndBroken("sending", error);
                             self->Touch();
                             self->out_sent_ += bytes;
                             self->ContinueWriting();
                           });
}

void Incoming::ReadHello() {
  in_.resize(kHelloBytes);
  asio::async_read(socket_, asio::buffer(in_), [self = shared_from_this()](const ErrorCode& error, size_t) {
    if (self->state_ != State::kHello) return;
    if (error) return self->EndBroken("waiting for its hello", error);
    absl::StatusOr<Frame> frame = ParseFrame(self->in_);
    if (!frame.ok()) return self->EndProtocol(std::move(frame).status());
    const HelloFrame* hello = std::get_if<HelloFrame>(&*frame);
    if (hello == nullptr) return self->EndProtocol(InvalidField("first bytes", "no hello", "a hello"));
    if (absl::Status status = CheckVersion(*hello); !status.ok()) return self->End(std::move(status), /*tell=*/true);
    self->state_ = State::kOffer;
    self->Touch();
    self->ReadOfferHeader();
  });
}

void Incoming::ReadOfferHeader() {
  in_.resize(kHeaderBytes);
  asio::async_read(socket_, asio::buffer(in_), [self = shared_from_this()](const ErrorCode& error, size_t) {
    if (self->state_ != State::kOffer) return;
    if (error) return self->EndBroken("waiting for its offer", error);
    self->Touch();
    absl::StatusOr<FrameHeader> header = ParseHeader(self->in_);
    if (!header.ok()) return self->EndProtocol(std::move(header).status());
    if (header->type == FrameType::kCancel) return self->End(absl::CancelledError("cancelled by the sender"), false);
    if (header->type != FrameType::kOffer) {
      return self->EndProtocol(InvalidField("first frame's type", static_cast<int>(header->type), "1 (OFFER)"));
    }
    self->in_bytes_ = kHeaderBytes;
    self->frame_bytes_ = kHeaderBytes + header->body_bytes;
    self->ReadOfferBody();
  });
}

absl::Status Incoming::GrowOffer() {
  // At most twice what has arrived: a header alone cannot claim memory.
  const uint64_t size = std::min<uint64_t>(frame_bytes_, std::max<uint64_t>(2 * in_bytes_, kOfferStepBytes));
  const uint64_t others = loop_.offer_buffer_bytes - buffer_counted_;
  if (others + size > loop_.options.offer_buffer_bytes_max) {
    return FieldError(absl::StatusCode::kResourceExhausted, "bytes of offers being received",
                      absl::StrCat(others + size), absl::StrCat("at most ", loop_.options.offer_buffer_bytes_max));
  }
  loop_.offer_buffer_bytes = others + size;
  buffer_counted_ = size;
  in_.resize(size);
  return absl::OkStatus();
}

void Incoming::ReadOfferBody() {
  if (in_bytes_ == frame_bytes_) return OnOffer(ParseFrame(in_));
  if (in_bytes_ == in_.size()) {
    if (absl::Status status = GrowOffer(); !status.ok()) return End(std::move(status), /*tell=*/true);
  }
  socket_.async_read_some(asio::buffer(in_.data() + in_bytes_, in_.size() - in_bytes_),
                          [self = shared_from_this()](const ErrorCode& error, size_t bytes) {
                            if (self->state_ != State::kOffer) return;
                            if (error) return self->EndBroken("receiving its offer", error);
                            self->Touch();
                            self->in_bytes_ += bytes;
                            self->ReadOfferBody();
                          });
}

void Incoming::OnOffer(absl::StatusOr<Frame> frame) {
  if (!frame.ok()) return EndProtocol(std::move(frame).status());
  OfferFrame& offer = std::get<OfferFrame>(*frame);
  in_ = {};
  transfer_ = true;
  loop_.metrics.received.active.Increment();
  loop_.peers.Begin(host_, true);
  if (offer.total_bytes > loop_.options.transfer_bytes_max) {
    return End(FieldError(absl::StatusCode::kResourceExhausted, "bytes of all pages", absl::StrCat(offer.total_bytes),
                          absl::StrCat("at most ", loop_.options.transfer_bytes_max)),
               /*tell=*/true);
  }
  page_bytes_ = offer.page_bytes;
  page_checksums_ = offer.page_checksums;
  state_ = State::kOffered;
  HandOffReceiver* receiver = loop_.options.receiver;
  receiver->Offer(peer_, std::move(offer.manifest), std::move(offer.page_bytes), std::move(offer.page_checksums),
                  [gate = loop_.gate, id = id_](absl::StatusOr<std::unique_ptr<IncomingHandOff>> reply) {
                    gate->Post([id, reply = std::move(reply)](Loop& loop) mutable {
                      const auto found = loop.incoming.find(id);
                      if (found != loop.incoming.end()) {
                        return std::shared_ptr<Incoming>(found->second)->OnOfferReply(std::move(reply));
                      }
                      if (reply.ok() && *reply != nullptr) {
                        loop.options.receiver->Abort(*std::move(reply), absl::UnavailableError("the sender is gone"));
                      }
                    });
                  });
}

void Incoming::OnOfferReply(absl::StatusOr<std::unique_ptr<IncomingHandOff>> reply) {
  if (state_ != State::kOffered || hand_off_ != nullptr) {
    if (reply.ok() && *reply != nullptr) {
      loop_.options.receiver->Abort(*std::move(reply), absl::UnavailableError("the hand-off has ended"));
    }
    return;
  }
  if (!reply.ok()) {
    loop_.metrics.received.transfers(TransferResult::kRefused).Increment();
    loop_.metrics.received.active.Decrement();
    loop_.peers.End(host_, true, reply.status(), 0, 0);
    transfer_ = false;
    return End(std::move(reply).status(), /*tell=*/true);
  }
  hand_off_ = *std::move(reply);
  if (absl::Status status = TakeTargets(); !status.ok()) return End(std::move(status), /*tell=*/true);
  AnswerFrame answer;
  answer.page_count = page_bytes_.size();
  answer.bitmap.resize((page_bytes_.size() + 7) / 8);
  for (const uint32_t page : order_) answer.bitmap[page / 8] |= 1 << (page % 8);
  loop_.metrics.received.pages_skipped.Increment(static_cast<double>(page_bytes_.size() - order_.size()));
  state_ = State::kReceiving;
  Touch();
  Queue(EncodeAnswer(answer));
  ReadPages();
}

absl::Status Incoming::TakeTargets() {
  if (hand_off_ == nullptr) return absl::InternalError("the receiver accepted without targets");
  for (size_t i = 0; i < page_bytes_.size(); ++i) {
    const absl::Span<uint8_t> target = hand_off_->target(i);
    if (target.empty()) continue;
    if (target.size() != page_bytes_[i]) {
      return FieldError(absl::StatusCode::kInternal, absl::StrCat("target bytes of page ", i),
                        absl::StrCat(target.size()), absl::StrCat(page_bytes_[i]));
    }
    targets_.push_back(target);
    order_.push_back(i);
  }
  return absl::OkStatus();
}

void Incoming::ReadPages() {
  if (next_ == order_.size()) return ReadEnd();
  const size_t pages = std::min(kPagesPerReadMax, order_.size() - next_);
  size_t count = 0;
  size_t skip = offset_;
  const auto add = [&](uint8_t* bytes, size_t size) {
    const size_t skipped = std::min(skip, size);
    skip -= skipped;
    if (size > skipped) buffers_[count++] = asio::mutable_buffer(bytes + skipped, size - skipped);
  };
  for (size_t i = 0; i < pages; ++i) {
    add(headers_[i].data(), kHeaderBytes);
    add(targets_[next_ + i].data(), targets_[next_ + i].size());
  }
  socket_.async_read_some(absl::MakeConstSpan(buffers_.data(), count),
                          [self = shared_from_this()](const ErrorCode& error, size_t bytes) {
                            if (self->state_ != State::kReceiving) return;
                            if (error) return self->EndBroken("receiving pages", error);
                            self->Touch();
                            if (absl::Status status = self->OnPageBytes(bytes); !status.ok()) {
                              if (status.code() == absl::StatusCode::kInvalidArgument)
                                return self->EndProtocol(std::move(status));
                              const bool tell = status.code() != absl::StatusCode::kCancelled;
                              return self->End(std::move(status), tell);
                            }
                            self->ReadPages();
                          });
}

absl::Status Incoming::OnPageBytes(size_t bytes) {
  uint64_t payload = 0;
  uint64_t pages = 0;
  absl::Status status;
  size_t slot = 0;
  while (bytes > 0 && status.ok()) {
    const size_t frame_bytes = kHeaderBytes + targets_[next_].size();
    const size_t taken = std::min(bytes, frame_bytes - offset_);
    const size_t header_taken = std::min(taken, kHeaderBytes - std::min(offset_, kHeaderBytes));
    const bool header_arrived = offset_ < kHeaderBytes && offset_ + taken >= kHeaderBytes;
    payload += taken - header_taken;
    bytes -= taken;
    offset_ += taken;
    if (header_arrived) status = CheckPageHeader(headers_[slot], order_[next_]);
    if (status.ok() && offset_ == frame_bytes) {
      const uint64_t announced = page_checksums_[order_[next_]];
      const uint64_t checksum = XXH3_64bits(targets_[next_].data(), targets_[next_].size());
      if (checksum != announced) {
        loop_.metrics.checksum_failures.Increment();
        status = FieldError(absl::StatusCode::kDataLoss, absl::StrCat("checksum of page ", order_[next_]),
                            absl::StrCat(absl::Hex(checksum, absl::kZeroPad16)),
                            absl::StrCat(absl::Hex(announced, absl::kZeroPad16)));
      }
      ++next_;
      ++pages;
      ++slot;
      offset_ = 0;
    }
  }
  if (slot > 0 && offset_ > 0 && offset_ < kHeaderBytes) headers_[0] = headers_[slot];
  payload_bytes_ += payload;
  loop_.metrics.received.bytes.Increment(static_cast<double>(payload));
  loop_.metrics.received.pages.Increment(static_cast<double>(pages));
  return status;
}

absl::Status Incoming::CheckPageHeader(absl::Span<const uint8_t> bytes, uint32_t page) {
  KV_ASSIGN_OR_RETURN(const FrameHeader header, ParseHeader(bytes));
  if (header.type == FrameType::kCancel) return absl::CancelledError("cancelled by the sender");
  if (header.type != FrameType::kPage) {
    return InvalidField("frame type among pages", static_cast<int>(header.type), "3 (PAGE)");
  }
  if (header.page != page) return InvalidField("page", header.page, absl::StrCat(page, ", the next wanted one"));
  if (header.body_bytes != page_bytes_[page]) {
    return InvalidField(absl::StrCat("page ", page, " bytes"), header.body_bytes,
                        absl::StrCat(page_bytes_[page], ", as offered"));
  }
  return absl::OkStatus();
}

void Incoming::ReadEnd() {
  in_.resize(kHeaderBytes);
  in_bytes_ = 0;
  asio::async_read(socket_, asio::buffer(in_), [self = shared_from_this()](const ErrorCode& error, size_t) {
    if (self->state_ != State::kReceiving) return;
    if (error) return self->EndBroken("waiting for its end of pages", error);
    self->Touch();
    absl::StatusOr<FrameHeader> header = ParseHeader(self->in_);
    if (!header.ok()) return self->EndProtocol(std::move(header).status());
    if (header->type == FrameType::kCancel) return self->End(absl::CancelledError("cancelled by the sender"), false);
    if (header->type != FrameType::kEnd) {
      return self->EndProtocol(InvalidField("frame type after pages", static_cast<int>(header->type), "4 (END)"));
    }
    self->in_.resize(kHeaderBytes + kEndBytes);
    asio::async_read(self->socket_, asio::buffer(self->in_.data() + kHeaderBytes, kEndBytes),
                     [self](const ErrorCode& error, size_t) {
                       if (self->state_ != State::kReceiving) return;
                       if (error) return self->EndBroken("waiting for its end of pages", error);
                       self->Touch();
                       self->OnEnd();
                     });
  });
}

void Incoming::OnEnd() {
  absl::StatusOr<Frame> frame = ParseFrame(in_);
  if (!frame.ok()) return EndProtocol(std::move(frame).status());
  const EndFrame& end = std::get<EndFrame>(*frame);
  if (end.pages != order_.size())
    return EndProtocol(InvalidField("pages sent", end.pages, absl::StrCat(order_.size())));
  if (end.bytes != payload_bytes_) {
    return EndProtocol(InvalidField("bytes sent", end.bytes, absl::StrCat(payload_bytes_)));
  }
  state_ = State::kCompleting;
  targets_.clear();
  loop_.options.receiver->Complete(std::move(hand_off_),
                                   [gate = loop_.gate, id = id_](absl::StatusOr<std::string> ticket) {
                                     gate->Post([id, ticket = std::move(ticket)](Loop& loop) mutable {
                                       const auto found = loop.incoming.find(id);
                                       if (found != loop.incoming.end())
                                         std::shared_ptr<Incoming>(found->second)->OnCompleteReply(std::move(ticket));
                                     });
                                   });
}

void Incoming::OnCompleteReply(absl::StatusOr<std::string> ticket) {
  if (state_ != State::kCompleting) return;
  if (ticket.ok() && ticket->size() > kTicketBytesMax) {
    ticket = FieldError(absl::StatusCode::kInternal, "ticket bytes", absl::StrCat(ticket->size()),
                        absl::StrCat("at most ", kTicketBytesMax));
  }
  if (!ticket.ok()) return End(std::move(ticket).status(), /*tell=*/true);
  Leave(absl::OkStatus());
  Queue(EncodeDone(*ticket));
  Drain();
}

void Incoming::Drain() {
  in_.resize(kDrainBytes);
  socket_.async_read_some(asio::buffer(in_), [self = shared_from_this()](const ErrorCode& error, size_t) {
    if (self->state_ != State::kClosing) return;
    if (!error) return self->Drain();
    if (error != asio::error::eof || !self->writing_) return self->Close();
    self->peer_closed_ = true;
  });
}

void Incoming::Leave(const absl::Status& status) {
  state_ = State::kClosing;
  --loop_.incoming_open;
  loop_.offer_buffer_bytes -= std::exchange(buffer_counted_, 0);
  deadline_ = std::chrono::steady_clock::now() + std::chrono::milliseconds(kLingerMs);
  ArmTimer();
  if (!transfer_) return;
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
  loop_.metrics.received.active.Decrement();
  loop_.metrics.received.transfers(ResultOf(status)).Increment();
  if (status.ok()) loop_.metrics.received.seconds.Observe(seconds);
  loop_.peers.End(host_, true, status, payload_bytes_, seconds);
}

void Incoming::End(absl::Status why, bool tell) {
  if (state_ == State::kClosed) return;
  if (state_ == State::kClosing) {
    if (!tell) Close();
    return;
  }
  const auto self = shared_from_this();
  // Ends the pending read. A write that is still pending has met a full buffer: its handler sees the peer does not
  // read, and closes.
  ErrorCode ignored;
  socket_.cancel(ignored);
  std::string error = tell ? EncodeError(why) : std::string();
  Leave(why);
  targets_.clear();
  // Before the peer hears of it, so that a sender which tries again finds the slots free.
  if (hand_off_ != nullptr) loop_.options.receiver->Abort(std::move(hand_off_), std::move(why));
  if (!tell) return Close();
  Queue(std::move(error));
  Drain();
}

void Incoming::EndProtocol(absl::Status why) {
  loop_.metrics.protocol_errors.Increment();
  End(std::move(why), /*tell=*/true);
}

void Incoming::EndBroken(absl::string_view what, const ErrorCode& error) {
  End(absl::UnavailableError(absl::StrCat("peer ", peer_, ": ", what, ": ", error.message())), /*tell=*/false);
}

void Incoming::Stop(absl::Status why) {
  if (state_ != State::kClosing && !writing_) {
    ErrorCode ignored;
    socket_.write_some(asio::buffer(EncodeError(why)), ignored);  // only if it fits now
  }
  const auto self = shared_from_this();
  End(std::move(why), /*tell=*/false);
  Close();
}

void Incoming::Close() {
  if (state_ == State::kClosed) return;
  state_ = State::kClosed;
  ErrorCode ignored;
  socket_.close(ignored);
  timer_.cancel();
  loop_.incoming.erase(id_);
}

}  // namespace kvmanager::tcp
