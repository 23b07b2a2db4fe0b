#include "transport/tcp/incoming.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::tcp {
namespace {

/// Posts `call` of the hand-off `token` onto the transport's thread, from any.
template <typename Reply, typename Call, typename Late>
auto OnLoop(const Loop& loop, const Token& token, Call call, Late late) {
  return [gate = loop.gate, token, call, late](Reply reply) {
    gate->Post([token, call, late, reply = std::move(reply)](Loop& loop) mutable {
      const auto found = loop.incoming.find(token);
      if (found == loop.incoming.end()) return late(std::move(reply));
      call(*std::shared_ptr<Incoming>(found->second), std::move(reply));
    });
  };
}

template <typename Call>
auto OnLoop(const Loop& loop, const Token& token, Call call) {
  return OnLoop<absl::Status>(loop, token, call, [](absl::Status) {});
}

void AbortLate(absl::StatusOr<HandOffReceiver::Accepted> reply) {
  if (reply.ok() && reply->hand_off != nullptr) reply->hand_off->Abort(absl::UnavailableError("the sender is gone"));
}

}  // namespace

Incoming::Incoming(Loop& loop, const Token& token, std::string host, std::string peer, int64_t peer_stall_ms)
    : loop_(loop),
      token_(token),
      host_(std::move(host)),
      peer_(std::move(peer)),
      peer_stall_ms_(peer_stall_ms),
      timer_(loop.io) {}

void Incoming::Start(std::shared_ptr<FrameLink> link, OfferFrame offer) {
  ++loop_.incoming_open;
  loop_.metrics.received.active.Increment();
  loop_.peers.Begin(host_, true);
  offered_host_ = offer.host;
  Attach(std::move(link));
  Tick();
  if (absl::Status status = CheckTotal(offer.part); !status.ok()) return End(std::move(status), /*tell=*/true);
  of_gpu_ = offer.part.gpu != GpuName();
  if (absl::Status status = CheckGpu(); !status.ok()) {
    refused_ = true;
    return End(std::move(status), /*tell=*/true);
  }
  page_bytes_ = offer.part.page_bytes;
  first_pages_ = page_bytes_.size();
  HandOffReceiver::OfferReply reply;
  reply.gone = gone_;
  reply.waiting = OnLoop(loop_, token_, [](Incoming& self, const absl::Status& why) { self.OnWaiting(why); });
  reply.done = OnLoop<absl::StatusOr<HandOffReceiver::Accepted>>(
      loop_, token_,
      [](Incoming& self, absl::StatusOr<HandOffReceiver::Accepted> accepted) {
        self.OnOfferReply(std::move(accepted));
      },
      AbortLate);
  loop_.options.receiver->Offer(peer_, std::move(offer.part), offer.room_ms, std::move(reply));
}

absl::Status Incoming::CheckTotal(const HandOffPart& part) {
  uint64_t total = bytes_wanted_;
  total += part.page_bytes.total();
  if (total > loop_.options.transfer_bytes_max) {
    return FieldError(absl::StatusCode::kResourceExhausted, "bytes of all pages", absl::StrCat(total),
                      absl::StrCat("at most ", loop_.options.transfer_bytes_max));
  }
  bytes_wanted_ = total;
  return absl::OkStatus();
}

absl::Status Incoming::CheckGpu() const {
  if (!of_gpu_) return absl::OkStatus();
  const char* missing = nullptr;
  if (loop_.options.device_copier == nullptr) missing = "a receiver that has GPUs";
  if (loop_.local_name.empty()) missing = "a receiver with local data connections";
  if (offered_host_ == HostId() || offered_host_ != loop_.host) missing = "a receiver on the sender's host";
  if (missing == nullptr) return absl::OkStatus();
  return FieldError(absl::StatusCode::kFailedPrecondition, "gpu", "pages in a GPU's memory", missing);
}

void Incoming::Attach(std::shared_ptr<FrameLink> link) {
  if (link_ != nullptr) link_->Close();
  link_ = std::move(link);
  heard_ = Now();
  const auto self = shared_from_this();
  link_->Listen({FrameType::kLast, FrameType::kPing, FrameType::kCancel},
                {[self](Frame frame) { self->OnFrame(std::move(frame)); },
                 [self](absl::Status why) { self->OnLinkBroken(std::move(why)); }});
}

void Incoming::Resume(std::shared_ptr<FrameLink> link) {
  FrameLink& to = *link;  // `link` keeps it, whatever becomes of link_
  if (state_ != State::kEnded) Attach(link);
  to.Send(EncodedJoined());
  if (!ticket_.empty()) to.Send(EncodedAccept());
  if (extended_) to.Send(EncodeExtended({wanted_last_}));
  if (state_ != State::kEnded) return;
  to.Send(ended_with_.ok() ? EncodeEmpty(FrameType::kDone) : EncodeError(ended_with_));
  to.Close(/*lingering=*/true);
}

void Incoming::AddConnection(uint32_t connection, std::shared_ptr<FrameLink> link) {
  if (state_ != State::kReceiving || connection > loop_.options.connections_max) {
    link->Send(
        EncodeError(state_ == State::kReceiving
                        ? InvalidField("connection", connection, absl::StrCat("1..", loop_.options.connections_max))
                        : absl::FailedPreconditionError("this hand-off takes no pages now")));
    return link->Close(/*lingering=*/true);
  }
  heard_ = Now();
  const auto old = connections_.find(connection);
  if (old != connections_.end()) {
    old->second->Close();
    connections_.erase(old);
  }
  // The answer must not ask for pages that a GPU still writes.
  if (gpu_jobs_.empty()) return StartConnection(connection, link->Release());
  made_again_.insert_or_assign(connection, link->Release());
}

void Incoming::StartConnection(uint32_t connection, Socket socket) {
  // The answer is small and the socket's buffer empty: it fits, or the connection is of no use.
  const std::string answer = EncodedJoined();
  ErrorCode error;
  if (socket.write_some(asio::buffer(answer), error) != answer.size() || error) return;
  auto made = std::make_shared<IncomingDataConnection>(loop_, *this, connection, std::move(socket));
  connections_[connection] = made;
  made->Start();
}

std::string Incoming::EncodedJoined() const {
  JoinedFrame joined;
  joined.last_known = last_known_;
  joined.arrived = PageBitmap(pages_.size());
  for (uint32_t i = 0; i < pages_.size(); ++i) {
    if (pages_[i] == PageState::kArrived) joined.arrived.Add(i);
  }
  return EncodeJoined(joined);
}

void Incoming::OnFrame(Frame frame) {
  heard_ = Now();
  if (auto* trailer = std::get_if<TrailerFrame>(&frame)) return OnTrailer(std::move(*trailer));
  if (std::holds_alternative<CancelFrame>(frame)) return End(absl::CancelledError("cancelled by the sender"), false);
}

void Incoming::OnWaiting(const absl::Status& why) {
  if (state_ != State::kOffered || why.ok()) return;
  SetWaitsForRoom(true);
  if (link_ != nullptr) link_->Send(EncodeWaiting(why));
}

void Incoming::SetWaitsForRoom(bool waits) {
  if (std::exchange(waits_for_room_, waits) == waits) return;
  waits ? ++loop_.waiting_for_room : --loop_.waiting_for_room;
}

SteadyTime::duration Incoming::idle() const {
  // A GPU that still copies is at work for it.
  return state_ == State::kReceiving && gpu_jobs_.empty() ? Now() - progress_ : SteadyTime::duration::zero();
}

void Incoming::EndIdle() {
  const int64_t idle_ms = loop_.options.idle_ms;
  End(FieldError(absl::StatusCode::kDeadlineExceeded,
                 absl::StrCat("ms without a page of sender ", peer_, ", while others wait"),
                 absl::StrCat(std::chrono::duration_cast<std::chrono::milliseconds>(idle()).count()),
                 absl::StrCat("below ", idle_ms)),
      /*tell=*/true);
}

void Incoming::OnOfferReply(absl::StatusOr<HandOffReceiver::Accepted> reply) {
  if (state_ != State::kOffered) return AbortLate(std::move(reply));
  SetWaitsForRoom(false);
  if (!reply.ok()) {
    refused_ = true;
    return End(std::move(reply).status(), /*tell=*/true);
  }
  hand_off_ = std::move(reply->hand_off);
  if (hand_off_ == nullptr) return End(absl::InternalError("the receiver accepted without targets"), /*tell=*/true);
  if (reply->ticket.empty() || reply->ticket.size() > HandOffReceiver::kTicketBytesMax) {
    return End(FieldError(absl::StatusCode::kInternal, "ticket bytes", absl::StrCat(reply->ticket.size()),
                          absl::StrCat("1..", HandOffReceiver::kTicketBytesMax)),
               /*tell=*/true);
  }
  if ((reply->device >= 0) != of_gpu_) {
    return End(FieldError(absl::StatusCode::kInternal, "device of targets", absl::StrCat(reply->device),
                          of_gpu_ ? "a GPU" : "the host"),
               /*tell=*/true);
  }
  device_ = reply->device;
  if (device_ >= 0) loop_.options.device_copier->Expect();
  wanted_first_ = TakePart(page_bytes_);
  ticket_ = std::move(reply->ticket);
  state_ = State::kReceiving;
  progress_ = Now();
  ++loop_.receiving;
  if (link_ != nullptr) link_->Send(EncodedAccept());
}

std::string Incoming::EncodedAccept() const {
  const bool local = offered_host_ != HostId() && offered_host_ == loop_.host;
  return EncodeAccept(
      {window(), loop_.options.connections_max, ticket_, wanted_first_, local ? loop_.local_name : std::string()});
}

PageBitmap Incoming::TakePart(const PageSizes& part) {
  const auto first = static_cast<uint32_t>(pages_.size());
  PageBitmap wanted = PageBitmap::All(part.size());
  pages_.resize(first + part.size(), PageState::kWanted);
  const std::vector<uint32_t> unwanted = hand_off_->Unwanted(first, static_cast<uint32_t>(part.size()));
  for (const uint32_t page : unwanted) {
    pages_[page] = PageState::kUnwanted;
    wanted.Remove(page - first);
    bytes_wanted_ -= part[page - first];
  }
  pages_to_come_ += part.size() - unwanted.size();
  loop_.metrics.received.pages_skipped.Increment(static_cast<double>(unwanted.size()));
  return wanted;
}

void Incoming::OnTrailer(TrailerFrame trailer) {
  if (state_ != State::kReceiving) {
    return OnLinkBroken(absl::InvalidArgumentError("LAST before the hand-off was accepted, or after its end"));
  }
  if (last_known_) return OnLinkBroken(absl::InvalidArgumentError("LAST said twice"));
  if (absl::Status status = CheckPart(trailer.part, first_pages_); !status.ok()) return OnLinkBroken(std::move(status));
  for (size_t i = 0; i < trailer.part.withdrawn.size(); ++i) {
    const uint32_t page = trailer.part.withdrawn[i];
    if (pages_[page] == PageState::kArrived || pages_[page] == PageState::kComing) {
      return OnLinkBroken(InvalidField(absl::StrCat("withdrawn[", i, "]"), page, "a page that was not sent"));
    }
  }
  if (absl::Status status = CheckTotal(trailer.part); !status.ok()) return End(std::move(status), /*tell=*/true);
  for (const uint32_t page : trailer.part.withdrawn) {
    if (pages_[page] != PageState::kWanted) continue;
    pages_[page] = PageState::kWithdrawn;
    bytes_wanted_ -= page_bytes_[page];
    --pages_to_come_;
  }
  last_known_ = true;
  progress_ = Now();
  trailer_bytes_ = trailer.part.page_bytes;
  page_bytes_.Append(trailer_bytes_);
  hand_off_->Extend(std::move(trailer.part), OnLoop(loop_, token_, [](Incoming& self, absl::Status status) {
                      self.OnExtendReply(std::move(status));
                    }));
}

void Incoming::OnExtendReply(absl::Status status) {
  if (state_ != State::kReceiving || !last_known_ || extended_) return;
  if (!status.ok()) return End(std::move(status), /*tell=*/true);
  wanted_last_ = TakePart(trailer_bytes_);
  extended_ = true;
  progress_ = Now();
  if (link_ != nullptr) link_->Send(EncodeExtended({wanted_last_}));
  CompleteIfAll();
}

absl::StatusOr<absl::Span<uint8_t>> Incoming::BeginPage(uint32_t page) {
  if (page >= pages_.size()) {
    return InvalidField("page", page, absl::StrCat("below ", pages_.size(), ", the pages that were accepted"));
  }
  if (pages_[page] != PageState::kWanted) {
    static constexpr const char* kWhy[] = {"not wanted here", "", "coming on another data connection", "there",
                                           "withdrawn"};
    return InvalidField("page", absl::StrCat(page, ", which is ", kWhy[static_cast<int>(pages_[page])]),
                        "a page that is wanted and has not arrived");
  }
  const absl::Span<uint8_t> target = hand_off_->target(page);
  if (target.size() != page_bytes_[page]) {
    return FieldError(absl::StatusCode::kInternal, absl::StrCat("target bytes of page ", page),
                      absl::StrCat(target.size()), absl::StrCat(page_bytes_[page]));
  }
  pages_[page] = PageState::kComing;
  return target;
}

void Incoming::OnPayload(size_t bytes, PageWay way) {
  heard_ = progress_ = Now();
  payload_bytes_ += bytes;
  if (way != PageWay::kSocket) copied_bytes_ += bytes;
  loop_.metrics.received.CountBytes(bytes, way);
}

void Incoming::OnPage(uint32_t page) {
  pages_[page] = PageState::kArrived;
  --pages_to_come_;
  bytes_arrived_ += page_bytes_[page];
  got_bytes_ += page_bytes_[page];
  got_.push_back(page);
}

void Incoming::Confirm(bool all) {
  if (got_.empty() || state_ != State::kReceiving) return;
  const auto quiet = std::chrono::milliseconds(std::min(loop_.options.stall_ms, peer_stall_ms_) / kGotsPerStall);
  if (!all && got_bytes_ < window() / kGotsPerWindow && Now() - confirmed_ < quiet) return;
  confirmed_ = Now();
  loop_.metrics.received.pages.Increment(static_cast<double>(got_.size()));
  hand_off_->Arrived(got_);
  for (size_t at = 0; link_ != nullptr && at < got_.size(); at += kGotPagesMax) {
    link_->Send(EncodeGot(window(), absl::MakeConstSpan(got_).subspan(at, kGotPagesMax)));
  }
  got_.clear();
  got_bytes_ = 0;
  CompleteIfAll();
}

void Incoming::CompleteIfAll() {
  if (!extended_ || pages_to_come_ > 0 || state_ != State::kReceiving) return;
  state_ = State::kCompleting;
  CloseConnections();
  hand_off_->Complete(
      OnLoop(loop_, token_, [](Incoming& self, absl::Status status) { self.OnCompleteReply(std::move(status)); }));
}

void Incoming::OnCompleteReply(absl::Status status) {
  if (state_ != State::kCompleting) return;
  hand_off_ = nullptr;  // it has ended, well or not
  End(std::move(status), /*tell=*/true);
}

void Incoming::OnConnectionBroken(uint32_t connection, absl::Status why, bool bad_page) {
  connections_.erase(connection);
  if (state_ == State::kEnded) return;
  if (why.code() == absl::StatusCode::kUnavailable) return;
  if (why.code() == absl::StatusCode::kDataLoss && ++bad_pages_ <= kBadPagesMax) return;
  const bool by_gpu = why.code() == absl::StatusCode::kFailedPrecondition;  // it could not copy
  if (!bad_page && !by_gpu && !absl::IsInternal(why)) loop_.metrics.protocol_errors.Increment();
  End(std::move(why), /*tell=*/true);
}

void Incoming::OnLinkBroken(absl::Status why) {
  if (state_ == State::kEnded) return;
  if (why.code() == absl::StatusCode::kUnavailable ||
      (why.code() == absl::StatusCode::kDataLoss && ++bad_pages_ <= kBadPagesMax)) {
    if (link_ != nullptr) std::exchange(link_, nullptr)->Close();
    return;
  }
  if (why.code() != absl::StatusCode::kResourceExhausted) loop_.metrics.protocol_errors.Increment();
  End(std::move(why), /*tell=*/true);
}

void Incoming::Tick() {
  const int64_t stall_ms = loop_.options.stall_ms;
  if (state_ == State::kEnded) {
    if (!ending_.has_value()) loop_.incoming.erase(token_);
    return;
  }
  if (link_ != nullptr) {
    heard_ = std::max(heard_, link_->heard());
    const auto quiet = std::chrono::milliseconds(std::min(stall_ms, peer_stall_ms_) / 4);
    if (Now() - link_->sent() >= quiet) link_->Send(EncodeEmpty(FrameType::kPing));
  }
  if (Now() - heard_ >= std::chrono::milliseconds(stall_ms)) {
    End(FieldError(absl::StatusCode::kDeadlineExceeded, absl::StrCat("ms without a sign of sender ", peer_),
                   absl::StrCat(stall_ms), absl::StrCat("below ", stall_ms)),
        /*tell=*/true);
  }
  if (loop_.waiting_for_room > 0 && idle() >= std::chrono::milliseconds(loop_.options.idle_ms)) EndIdle();
  if (state_ == State::kEnded) return;
  std::vector<std::shared_ptr<IncomingDataConnection>> connections;
  for (const auto& [index, connection] : connections_) connections.push_back(connection);
  for (const auto& connection : connections) connection->CheckStall(std::min(stall_ms, peer_stall_ms_) / 2);
  if (state_ == State::kEnded) return;
  const int64_t next_ms = std::clamp<int64_t>(std::min(stall_ms, peer_stall_ms_) / kTicksPerStall, 1, kTickMsMax);
  timer_.expires_after(std::chrono::milliseconds(next_ms));
  timer_.async_wait([self = shared_from_this()](const ErrorCode& error) {
    if (!error) self->Tick();
  });
}

void Incoming::CloseConnections() {
  for (auto& [index, connection] : std::exchange(connections_, {})) connection->Close();
}

void Incoming::Count(const absl::Status& status) {
  const double seconds = SecondsSince(started_);
  loop_.metrics.received.active.Decrement();
  loop_.metrics.received.transfers(refused_ ? TransferResult::kRefused : ResultOf(status)).Increment();
  if (status.ok()) loop_.metrics.received.seconds.Observe(seconds);
  loop_.peers.End(host_, true, status, payload_bytes_, copied_bytes_, seconds);
}

void Incoming::End(absl::Status why, bool tell) {
  if (state_ == State::kEnded) return;
  const auto self = shared_from_this();
  CloseConnections();
  SetWaitsForRoom(false);
  const bool offered = state_ == State::kOffered;
  if (!offered) --loop_.receiving;
  state_ = State::kEnded;
  --loop_.incoming_open;
  Count(why);
  std::string said = why.ok() ? EncodeEmpty(FrameType::kDone) : EncodeError(why);
  ended_with_ = why.ok() ? absl::OkStatus()
                         : std::get<ErrorFrame>(*ParseFrame(absl::MakeConstSpan(
                                                    reinterpret_cast<const uint8_t*>(said.data()), said.size())))
                               .status;
  ending_ = Ending{std::move(why), tell, offered, std::move(said)};
  if (gpu_jobs_.empty()) GiveBack();
}

bool Incoming::AwaitGpu(const std::shared_ptr<CopyJob>& job) {
  const bool writes = job->AbandonLater([gate = loop_.gate, self = shared_from_this(), job] {
    gate->Post([self, job](Loop&) { self->OnGpuEnded(job); });
  });
  if (writes) gpu_jobs_.push_back(job);
  return writes;
}

void Incoming::OnGpuEnded(const std::shared_ptr<CopyJob>& job) {
  const auto found = std::find(gpu_jobs_.begin(), gpu_jobs_.end(), job);
  if (found == gpu_jobs_.end()) return;  // Stop waited for it
  gpu_jobs_.erase(found);
  for (const CopyJob::Page& page : job->pages()) DropPage(page.page);
  if (!gpu_jobs_.empty()) return;
  if (ending_.has_value()) GiveBack();
  for (auto& [connection, socket] : std::exchange(made_again_, {})) {
    if (state_ == State::kReceiving) StartConnection(connection, std::move(socket));
  }
}

void Incoming::GiveBack() {
  auto [why, tell, offered, said] = *std::move(ending_);
  ending_.reset();
  // Before the peer hears of it, so that a sender which tries again finds the slots free.
  if (hand_off_ != nullptr) std::exchange(hand_off_, nullptr)->Abort(std::move(why));
  page_bytes_ = {};
  if (offered && !refused_) {
    *gone_ = true;
    loop_.options.receiver->OfferGone();
  }
  if (link_ != nullptr) {
    const std::shared_ptr<FrameLink> link = std::exchange(link_, nullptr);
    if (tell) link->Send(said);
    link->Close(/*lingering=*/tell);
  }
  if (loop_.incoming.size() - loop_.incoming_open > kEndedMax) {
    timer_.cancel();
    loop_.incoming.erase(token_);
    return;
  }
  // Kept for a sender that has not heard it.
  timer_.expires_after(std::chrono::milliseconds(loop_.options.stall_ms));
  timer_.async_wait([self = shared_from_this()](const ErrorCode& error) {
    if (!error) self->Tick();
  });
}

void Incoming::Stop() {
  const auto self = shared_from_this();
  End(absl::CancelledError("the transport is shutting down"), /*tell=*/true);
  for (const auto& job : std::exchange(gpu_jobs_, {})) job->Abandon();
  made_again_.clear();
  if (ending_.has_value()) GiveBack();
  timer_.cancel();
  loop_.incoming.erase(token_);
}

}  // namespace kvmanager::tcp
