#include "transport/tcp/outgoing.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::tcp {

Outgoing::Outgoing(Loop& loop, uint64_t id, SendRequest request, Done done)
    : loop_(loop),
      id_(id),
      request_(std::move(request)),
      done_(std::move(done)),
      socket_(loop.io),
      resolver_(loop.io),
      stall_timer_(loop.io),
      rate_timer_(loop.io),
      stall_(request_.timeout_ms == 0 ? SendRequest::kStallMsDefault : request_.timeout_ms) {}

absl::Status Outgoing::CheckRequest() {
  if (request_.timeout_ms < 0 || request_.timeout_ms > TcpTransport::kStallMsMax) {
    return InvalidField("timeout_ms", request_.timeout_ms, absl::StrCat("0..", TcpTransport::kStallMsMax));
  }
  if (request_.manifest.empty() || request_.manifest.size() > SendRequest::kManifestBytesMax) {
    return InvalidField("manifest bytes", request_.manifest.size(),
                        absl::StrCat("1..", SendRequest::kManifestBytesMax));
  }
  if (request_.pages.size() > SendRequest::kPagesMax) {
    return InvalidField("pages", request_.pages.size(), absl::StrCat("0..", SendRequest::kPagesMax));
  }
  uint64_t total_bytes = 0;
  for (size_t i = 0; i < request_.pages.size(); ++i) {
    const uint64_t bytes = request_.pages[i].bytes.size();
    if (bytes < 1 || bytes > SendRequest::kPageBytesMax) {
      return InvalidField(absl::StrCat("page ", i, " bytes"), bytes, absl::StrCat("1..", SendRequest::kPageBytesMax));
    }
    total_bytes += bytes;
  }
  if (total_bytes > loop_.options.transfer_bytes_max) {
    return InvalidField("bytes of all pages", total_bytes, absl::StrCat("at most ", loop_.options.transfer_bytes_max));
  }
  return absl::OkStatus();
}

void Outgoing::Start() {
  if (absl::Status status = CheckRequest(); !status.ok()) return Finish(std::move(status));
  absl::StatusOr<HostPort> peer = ParseHostPort("peer", request_.peer, false);
  if (!peer.ok()) return Finish(std::move(peer).status());
  counted_ = true;
  loop_.metrics.sent.active.Increment();
  loop_.peers.Begin(request_.peer, false);
  started_ = std::chrono::steady_clock::now();
  Touch();
  ArmTimer();
  ErrorCode not_numeric;
  const auto address = asio::ip::make_address(peer->host, not_numeric);
  if (!not_numeric) {
    endpoints_ = {asio::ip::tcp::endpoint(address, peer->port)};
    return ConnectNext({});
  }
  resolver_.async_resolve(peer->host, absl::StrCat(peer->port), asio::ip::resolver_base::numeric_service,
                          [self = shared_from_this()](const ErrorCode& error, Resolver::results_type results) {
                            if (self->state_ == State::kFinished) return;
                            if (error) return self->FinishBroken("resolving", error);
                            for (const auto& entry : results) self->endpoints_.push_back(entry.endpoint());
                            self->ConnectNext(asio::error::host_not_found);
                          });
}

void Outgoing::ConnectNext(const ErrorCode& last_error) {
  if (endpoints_tried_ == endpoints_.size()) return FinishBroken("connecting", last_error);
  const asio::ip::tcp::endpoint endpoint = endpoints_[endpoints_tried_++];
  ErrorCode error;
  socket_.close(error);
  socket_.open(endpoint.protocol(), error);
  if (error) return ConnectNext(error);
  TuneEarly(socket_.native_handle());
  socket_.async_connect(endpoint, [self = shared_from_this()](const ErrorCode& error) {
    if (self->state_ == State::kFinished) return;
    if (error) return self->ConnectNext(error);
    self->OnConnected();
  });
}

void Outgoing::OnConnected() {
  Tune(socket_, stall_.count());
  started_ = std::chrono::steady_clock::now();
  Touch();
  state_ = State::kHello;
  WriteControl(EncodeHello());
}

void Outgoing::WriteControl(std::string bytes) {
  control_ = std::move(bytes);
  control_sent_ = 0;
  ContinueControl();
}

void Outgoing::ContinueControl() {
  writing_ = true;
  socket_.async_write_some(asio::buffer(control_.data() + control_sent_, control_.size() - control_sent_),
                           [self = shared_from_this()](const ErrorCode& error, size_t bytes) {
                             self->writing_ = false;
                             if (self->state_ == State::kFinished) return;
                             if (error) return self->OnWriteError(error);
                             self->Touch();
                             self->control_sent_ += bytes;
                             if (self->control_sent_ < self->control_.size()) return self->ContinueControl();
                             if (self->state_ == State::kHello) self->ReadHello();
                           });
}

void Outgoing::ReadHello() {
  in_.resize(kHelloBytes);
  asio::async_read(socket_, asio::buffer(in_), [self = shared_from_this()](const ErrorCode& error, size_t) {
    if (self->state_ == State::kFinished) return;
    if (error) return self->FinishBroken("waiting for its hello", error);
    self->Touch();
    const absl::StatusOr<Frame> frame = ParseFrame(self->in_);
    if (!frame.ok()) return self->FinishProtocol(frame.status());
    const HelloFrame* hello = std::get_if<HelloFrame>(&*frame);
    if (hello == nullptr) return self->FinishProtocol(absl::InvalidArgumentError("no hello"));
    if (absl::Status status = CheckVersion(*hello); !status.ok()) return self->Finish(std::move(status));
    self->state_ = State::kOffered;
    self->ReadFrame();
    self->WriteControl(EncodeOffer(self->request_.pages, self->request_.manifest));
  });
}

void Outgoing::ReadFrame() {
  in_.resize(kHeaderBytes);
  asio::async_read(socket_, asio::buffer(in_), [self = shared_from_this()](const ErrorCode& error, size_t) {
    if (self->state_ == State::kFinished) return;
    if (error) return self->FinishBroken("receiving", error);
    self->Touch();
    const absl::StatusOr<FrameHeader> header = ParseHeader(self->in_);
    if (!header.ok()) return self->FinishProtocol(header.status());
    if (header->type != FrameType::kAnswer && header->type != FrameType::kDone && header->type != FrameType::kError) {
      return self->FinishProtocol(InvalidField("frame type from a receiver", static_cast<int>(header->type),
                                               "2 (ANSWER), 5 (DONE) or 6 (ERROR)"));
    }
    self->ReadBody(*header);
  });
}

void Outgoing::ReadBody(const FrameHeader& header) {
  in_.resize(kHeaderBytes + header.body_bytes);
  asio::async_read(socket_, asio::buffer(in_.data() + kHeaderBytes, header.body_bytes),
                   [self = shared_from_this()](const ErrorCode& error, size_t) {
                     if (self->state_ == State::kFinished) return;
                     if (error) return self->FinishBroken("receiving", error);
                     self->Touch();
                     self->OnFrame(ParseFrame(self->in_));
                   });
}

void Outgoing::OnFrame(absl::StatusOr<Frame> frame) {
  if (!frame.ok()) return FinishProtocol(frame.status());
  if (auto* error = std::get_if<ErrorFrame>(&*frame)) {
    absl::Status said(error->status.code(),
                      absl::StrCat("peer ", request_.peer, " answered: ", error->status.message()));
    return Finish(WithDetail(std::move(said), DetailOf(error->status)), /*refused=*/state_ == State::kOffered);
  }
  const bool control_written = control_sent_ == control_.size();
  if (auto* answer = std::get_if<AnswerFrame>(&*frame); answer && state_ == State::kOffered && control_written) {
    return OnAnswer(std::move(*answer));
  }
  if (auto* done = std::get_if<DoneFrame>(&*frame); done && state_ == State::kEnding && control_written) {
    return OnDone(std::move(*done));
  }
  FinishProtocol(absl::InvalidArgumentError("answer or confirmation out of turn"));
}

void Outgoing::OnAnswer(AnswerFrame answer) {
  if (answer.page_count != request_.pages.size()) {
    return FinishProtocol(InvalidField("answer pages", answer.page_count, absl::StrCat(request_.pages.size())));
  }
  for (uint32_t i = 0; i < answer.page_count; ++i) {
    if (answer.wanted(i)) order_.push_back(i);
  }
  loop_.metrics.sent.pages_skipped.Increment(static_cast<double>(answer.page_count - order_.size()));
  state_ = State::kSending;
  ReadFrame();
  WritePages();
}

void Outgoing::OnDone(DoneFrame done) {
  SendResult result;
  result.ticket = std::move(done.ticket);
  result.bytes_sent = payload_bytes_;
  result.pages_sent = order_.size();
  result.pages_skipped = request_.pages.size() - order_.size();
  result.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - started_).count();
  Finish(std::move(result));
}

void Outgoing::WritePages() {
  if (next_ == order_.size()) {
    state_ = State::kEnding;
    return WriteControl(EncodeEnd({order_.size(), payload_bytes_}));
  }
  const size_t pages = std::min(kPagesPerWriteMax, order_.size() - next_);
  uint64_t want = 0;
  for (size_t i = 0; i < pages; ++i) want += kHeaderBytes + request_.pages[order_[next_ + i]].bytes.size();
  want -= offset_;
  const uint64_t granted = loop_.rate.Take(want, NowNs());
  if (granted == 0) {
    rate_timer_.expires_after(std::chrono::milliseconds(kRateWaitMs));
    rate_timer_.async_wait([self = shared_from_this()](const ErrorCode& error) {
      if (!error && self->state_ == State::kSending) self->WritePages();
    });
    return;
  }
  size_t count = 0;
  size_t skip = offset_;
  uint64_t left = granted;
  const auto add = [&](const uint8_t* bytes, size_t size) {
    const size_t skipped = std::min(skip, size);
    skip -= skipped;
    const size_t taken = std::min<uint64_t>(size - skipped, left);
    left -= taken;
    if (taken > 0) buffers_[count++] = asio::const_buffer(bytes + skipped, taken);
  };
  for (size_t i = 0; i < pages && left > 0; ++i) {
    const uint32_t page = order_[next_ + i];
    const absl::Span<const uint8_t> bytes = request_.pages[page].bytes;
    PutHeader({FrameType::kPage, page, bytes.size()}, headers_[i].data());
    add(headers_[i].data(), kHeaderBytes);
    add(bytes.data(), bytes.size());
  }
  writing_ = true;
  socket_.async_write_some(absl::MakeConstSpan(buffers_.data(), count),
                           [self = shared_from_this(), granted](const ErrorCode& error, size_t bytes) {
                             self->writing_ = false;
                             self->loop_.rate.GiveBack(granted - std::min<uint64_t>(granted, bytes));
                             if (self->state_ == State::kFinished) return;
                             if (error) return self->OnWriteError(error);
                             self->Touch();
                             self->OnPagesWritten(bytes);
                             self->WritePages();
                           });
}

void Outgoing::OnPagesWritten(size_t bytes) {
  uint64_t payload = 0;
  uint64_t pages = 0;
  while (bytes > 0) {
    const size_t frame_bytes = kHeaderBytes + request_.pages[order_[next_]].bytes.size();
    const size_t taken = std::min(bytes, frame_bytes - offset_);
    const size_t header_left = kHeaderBytes - std::min(offset_, kHeaderBytes);
    payload += taken - std::min(taken, header_left);
    bytes -= taken;
    offset_ += taken;
    if (offset_ == frame_bytes) {
      ++next_;
      ++pages;
      offset_ = 0;
    }
  }
  payload_bytes_ += payload;
  loop_.metrics.sent.bytes.Increment(static_cast<double>(payload));
  loop_.metrics.sent.pages.Increment(static_cast<double>(pages));
}

void Outgoing::OnWriteError(const ErrorCode& error) {
  if (state_ == State::kHello) return FinishBroken("sending the hello", error);
  writing_ = true;  // the connection is no longer at a frame's end
  // The pending read tells whether the peer said why; the stall timer bounds the wait.
}

void Outgoing::ArmTimer() {
  stall_timer_.expires_at(deadline_);
  stall_timer_.async_wait([self = shared_from_this()](const ErrorCode& error) {
    if (error || self->state_ == State::kFinished) return;
    if (std::chrono::steady_clock::now() < self->deadline_) return self->ArmTimer();
    self->Finish(FieldError(absl::StatusCode::kDeadlineExceeded,
                            absl::StrCat("ms without progress with peer ", self->request_.peer),
                            absl::StrCat(self->stall_.count()), absl::StrCat("below ", self->stall_.count())));
  });
}

void Outgoing::Stop(absl::Status why) {
  const bool offered = state_ == State::kOffered || state_ == State::kSending || state_ == State::kEnding;
  if (offered && !writing_ && offset_ == 0) {
    // Only between two frames, and only if it fits now: else closing says the same, less politely.
    ErrorCode ignored;
    socket_.write_some(asio::buffer(EncodeCancel()), ignored);
  }
  Finish(std::move(why));
}

void Outgoing::FinishBroken(absl::string_view what, const ErrorCode& error) {
  Finish(absl::UnavailableError(absl::StrCat("peer ", request_.peer, ": ", what, ": ", error.message())));
}

void Outgoing::FinishProtocol(absl::Status why) {
  loop_.metrics.protocol_errors.Increment();
  Finish(absl::UnavailableError(absl::StrCat(
      "peer ", request_.peer, " broke the protocol: ", absl::string_view(why.message().data(), why.message().size()))));
}

void Outgoing::Finish(absl::StatusOr<SendResult> result, bool refused) {
  if (state_ == State::kFinished) return;
  const auto self = shared_from_this();
  state_ = State::kFinished;
  ErrorCode ignored;
  socket_.close(ignored);
  resolver_.cancel();
  stall_timer_.cancel();
  rate_timer_.cancel();
  loop_.outgoing.erase(id_);
  if (counted_) {
    const double seconds = result.ok() ? result->seconds : 0;
    loop_.metrics.sent.active.Decrement();
    loop_.metrics.sent.transfers(refused ? TransferResult::kRefused : ResultOf(result.status())).Increment();
    if (result.ok()) loop_.metrics.sent.seconds.Observe(seconds);
    loop_.peers.End(request_.peer, false, result.status(), payload_bytes_, seconds);
  } else {
    loop_.metrics.sent.transfers(ResultOf(result.status())).Increment();
  }
  std::exchange(done_, nullptr)(std::move(result));
}

}  // namespace kvmanager::tcp
