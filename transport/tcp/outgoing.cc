#include "transport/tcp/outgoing.h"

#include <sys/random.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "transport/remote_memory.h"
#include "transport/tcp/drain.h"

namespace kvmanager::tcp {
namespace {

bool IsBroken(const absl::Status& why) {
  return why.code() == absl::StatusCode::kUnavailable || why.code() == absl::StatusCode::kDataLoss ||
         why.code() == absl::StatusCode::kDeadlineExceeded;
}

absl::string_view MessageOf(const absl::Status& status) { return {status.message().data(), status.message().size()}; }

}  // namespace

Outgoing::Outgoing(Loop& loop, uint64_t id, SendRequest request, SendEvents events)
    : loop_(loop),
      id_(id),
      request_(std::move(request)),
      events_(std::move(events)),
      of_gpu_(request_.header.gpu != GpuName()),
      stall_ms_(request_.stall_ms == 0 ? loop.options.stall_ms : request_.stall_ms),
      peer_stall_ms_(stall_ms_),
      timer_(loop.io) {
  KV_CHECK(getrandom(token_.data(), token_.size(), 0) == static_cast<ssize_t>(token_.size()));
}

absl::Status Outgoing::CheckRequest() const {
  if (request_.stall_ms < 0 || request_.stall_ms > kStallMsMax) {
    return InvalidField("stall_ms", request_.stall_ms, absl::StrCat("0..", kStallMsMax));
  }
  if (request_.room_ms < 0 || request_.room_ms > SendRequest::kRoomMsMax) {
    return InvalidField("room_ms", request_.room_ms, absl::StrCat("0..", SendRequest::kRoomMsMax));
  }
  return CheckPart(request_.header, 0);
}

absl::Status Outgoing::CheckTotal(const HandOffPart& part) {
  total_bytes_ += part.page_bytes.total();
  if (total_bytes_ <= loop_.options.transfer_bytes_max) return absl::OkStatus();
  return InvalidField("bytes of all pages", total_bytes_, absl::StrCat("at most ", loop_.options.transfer_bytes_max));
}

void Outgoing::Start() {
  absl::Status status = CheckRequest();
  if (status.ok()) status = CheckTotal(request_.header);
  if (!status.ok()) return Finish(std::move(status));
  counted_ = true;
  loop_.metrics.sent.active.Increment();
  loop_.peers.Begin(request_.peer, false);
  first_pages_ = request_.header.page_bytes.size();
  pages_to_go_ = first_pages_;
  started_ = heard_ = progress_ = Now();
  DialControl();
  if (state_ != State::kFinished) Tick();
}

void Outgoing::DialControl() {
  dial_ = std::make_shared<Dial>(loop_, Dial::Address{request_.peer}, stall_ms_,
                                 [self = shared_from_this()](absl::StatusOr<Dial::Connection> connection) {
                                   self->dial_ = nullptr;
                                   if (connection.ok()) return self->OnControl(*std::move(connection));
                                   absl::Status why = std::move(connection).status();
                                   if (!self->connected_before_ || !IsBroken(why)) return self->Finish(std::move(why));
                                   self->ScheduleRedial(why);
                                 });
  const auto dial = dial_;
  dial->Start();
}

void Outgoing::ScheduleRedial(const absl::Status& why) {
  broken_by_ = why;
  redial_at_ = Now() + std::chrono::milliseconds(redial_ms_);
  redial_ms_ = std::clamp<int64_t>(2 * redial_ms_, kRedialMsMin, kRedialMsMax);
}

void Outgoing::OnControl(Dial::Connection connection) {
  peer_stall_ms_ = connection.theirs.stall_ms;
  peer_features_ = connection.theirs.features;
  heard_ = Now();
  if (of_gpu() && (connection.theirs.features & kFeatureGpuPages) == 0) {
    return Finish(FieldError(absl::StatusCode::kFailedPrecondition, "gpu", "pages in a GPU's memory",
                             "a receiver that knows of them"));
  }
  link_ = std::make_shared<FrameLink>(loop_, std::move(connection.socket));
  const auto self = shared_from_this();
  link_->Listen({FrameType::kWaiting, FrameType::kAccept, FrameType::kExtended, FrameType::kGot, FrameType::kJoined,
                 FrameType::kPing, FrameType::kDone, FrameType::kError},
                {[self](Frame frame) { self->OnFrame(std::move(frame)); },
                 [self](absl::Status why) { self->OnLinkBroken(std::move(why)); }});
  if (connected_before_ && !offer_again_) {
    ++result_.resumes;
    joining_ = true;
    return link_->Send(EncodeJoin({token_, 0}));
  }
  joining_ = false;
  if (!connected_before_) started_ = Now();
  connected_before_ = true;
  offer_again_ = false;
  const bool shares = of_gpu() || !loop_.options.memory.empty();
  link_->Send(EncodeOffer(token_, request_.room_ms, request_.header, shares ? loop_.host : HostId()));
  if (!pages_made_) MakePages();
}

void Outgoing::AddPages(const HandOffPart& part, std::vector<Posted>* posted) {
  const size_t first = pages_.size();
  for (const PageSizes::Run& run : part.page_bytes.runs()) {
    Page page;
    page.size = run.bytes;
    pages_.resize(first + run.end, page);
  }
  posted->resize(part.page_bytes.size());
  wanted_bytes_ += part.page_bytes.total();
}

void Outgoing::MakePages() {
  pages_made_ = true;
  AddPages(request_.header, &first_posted_);
  // First: what was posted may be of the trailer.
  if (early_trailer_.has_value()) FinishParts(*std::exchange(early_trailer_, absl::nullopt));
  TakeEarlyPost();
}

void Outgoing::TakeEarlyPost() {
  if (state_ == State::kFinished || early_posts_.empty()) return;
  std::vector<SendPage> pages = std::move(early_posts_.front());
  early_posts_.pop_front();
  TakePosts(pages);
  // One at a time, so that the receiver's answer is not behind all of them.
  if (!early_posts_.empty()) asio::post(loop_.io, [self = shared_from_this()] { self->TakeEarlyPost(); });
}

void Outgoing::OnFrame(Frame frame) {
  heard_ = Now();
  redial_ms_ = 0;
  absl::Status status;
  if (auto* waiting = std::get_if<WaitingFrame>(&frame)) {
    if (events_.waiting) events_.waiting(std::move(waiting->why));
  } else if (auto* accept = std::get_if<AcceptFrame>(&frame)) {
    status = OnAccept(std::move(*accept));
  } else if (const auto* extended = std::get_if<ExtendedFrame>(&frame)) {
    status = OnExtended(*extended);
  } else if (const auto* got = std::get_if<GotFrame>(&frame)) {
    status = OnGot(*got);
  } else if (const auto* joined = std::get_if<JoinedFrame>(&frame)) {
    status = OnJoined(*joined);
  } else if (std::holds_alternative<DoneFrame>(frame)) {
    status = OnDone();
  } else if (const auto* error = std::get_if<ErrorFrame>(&frame)) {
    return OnError(error->status);
  }
  if (state_ == State::kFinished) return;
  if (!status.ok()) return FinishProtocol(status);
  CountSending();
  OpenConnections();
  Pump();
}

void Outgoing::CountSending() {
  const bool sending = state_ == State::kSending && HasWork();
  if (sending == sending_since_.has_value()) return;
  if (sending) {
    sending_since_ = Now();
  } else {
    result_.sending_seconds += SecondsSince(*sending_since_);
    sending_since_.reset();
  }
}

absl::Status Outgoing::OnAccept(AcceptFrame accept) {
  if (accept.wanted.count != first_pages_) {
    return InvalidField("ACCEPT pages", accept.wanted.count, absl::StrCat(first_pages_));
  }
  window_ = accept.window;
  if (state_ == State::kSending) return absl::OkStatus();  // once more, after a connection was made again
  state_ = State::kSending;
  progress_ = Now();
  accept.wanted.ForEachMissing([this](uint32_t page) { Skip(page); });
  connections_allowed_ = std::min(loop_.options.connections, accept.connections);
  if (of_gpu() && accept.local_name.empty()) {
    return InvalidField("ACCEPT local name", "empty", "one, for pages in a GPU's memory");
  }
  const RemoteMemory* const remote = loop_.options.send_bytes_per_s == 0 ? loop_.options.remote_memory : nullptr;
  if (!accept.local_name.empty()) {
    data_address_ = {accept.local_name, /*local=*/true};
    connections_.resize(1);
  } else if (remote != nullptr && !remote->memory().empty() && (peer_features_ & kFeatureRemoteMemory) != 0) {
    data_address_ = {request_.peer};
    by_ucx_ = true;
    named_way_ = PageWay::kUcx;
    connections_.resize(1);
  } else {
    UseTcpConnections();
  }
  if (events_.accepted) events_.accepted(std::move(accept.ticket));
  if (state_ == State::kSending) SayLast();
  return absl::OkStatus();
}

void Outgoing::UseTcpConnections() {
  by_ucx_ = false;
  data_address_ = {request_.peer};
  const uint64_t useful = (wanted_bytes_ + kBytesPerConnection - 1) / kBytesPerConnection;
  connections_.resize(std::clamp<uint64_t>(useful, 1, connections_allowed_));
}

void Outgoing::SayLast() {
  if (trailer_.has_value() && state_ == State::kSending && link_ != nullptr && !joining_)
    link_->Send(EncodeTrailer(*trailer_));
}

absl::Status Outgoing::OnExtended(const ExtendedFrame& extended) {
  if (!trailer_.has_value() || state_ != State::kSending) return absl::InvalidArgumentError("EXTENDED out of turn");
  if (extended.wanted.count != trailer_->page_bytes.size()) {
    return InvalidField("EXTENDED pages", extended.wanted.count, absl::StrCat(trailer_->page_bytes.size()));
  }
  if (std::exchange(extended_, true)) return absl::OkStatus();
  progress_ = Now();
  extended.wanted.ForEachMissing([this](uint32_t page) { Skip(static_cast<uint32_t>(first_pages_) + page); });
  return absl::OkStatus();
}

void Outgoing::Skip(uint32_t page) {
  Page& skipped = pages_[page];
  if (skipped.state == PageState::kWithdrawn) return;
  if (skipped.state == PageState::kQueued) --queued_pages_;
  skipped.state = PageState::kSkipped;
  --pages_to_go_;
  wanted_bytes_ -= skipped.size;
  ++result_.pages_skipped;
  loop_.metrics.sent.pages_skipped.Increment();
}

void Outgoing::SetArrived(uint32_t page, double now) {
  Page& arrived = pages_[page];
  arrived.state = PageState::kArrived;
  unacked_bytes_ -= arrived.size;
  --pages_to_go_;
  ++result_.pages_sent;
  result_.groups[posted(page).group].arrived_last = now;
  if (!arrived.named) return;
  uncounted_bytes_ += arrived.size;
  ++uncounted_pages_;
}

absl::Status Outgoing::OnGot(const GotFrame& got) {
  window_ = got.window;
  progress_ = Now();
  const double now = SecondsSince(begun_);
  for (const uint32_t page : got.pages) {
    const PageState state = page < pages_.size() ? pages_[page].state : PageState::kUnposted;
    if (state == PageState::kArrived) continue;  // JOINED said so before
    if (state != PageState::kSent) return InvalidField("GOT page", page, "a page that was sent");
    SetArrived(page, now);
  }
  CountNamed();
  return absl::OkStatus();
}

absl::Status Outgoing::OnJoined(const JoinedFrame& joined) {
  progress_ = Now();
  for (uint32_t i = 0; i < joined.arrived.count; ++i) {
    if (!joined.arrived.has(i)) continue;
    if (i >= pages_.size() || (pages_[i].state != PageState::kSent && pages_[i].state != PageState::kArrived)) {
      return InvalidField("JOINED page", i, "a page that was sent");
    }
    if (pages_[i].state == PageState::kSent) SetArrived(i, SecondsSince(begun_));
  }
  CountNamed();
  joining_ = false;
  if (!joined.last_known) SayLast();
  return absl::OkStatus();
}

absl::Status Outgoing::OnDone() {
  if (state_ != State::kSending || !extended_ || pages_to_go_ > 0) {
    return InvalidField("DONE", absl::StrCat("with ", pages_to_go_, " pages to come"), "after the last page");
  }
  result_.seconds = SecondsSince(started_);
  CountSending();
  CloseConnections();  // which counts
  Finish(result_);
  return absl::OkStatus();
}

void Outgoing::OnError(const absl::Status& said) {
  if (said.code() == absl::StatusCode::kNotFound && result_.resumes > 0) {
    if (state_ == State::kOffering) {  // the connection broke before it had the offer
      offer_again_ = true;
      std::exchange(link_, nullptr)->Close();
      return DialControl();
    }
    return Finish(absl::UnavailableError(
        absl::StrCat("peer ", request_.peer, " does not know this hand-off any more: ", MessageOf(said))));
  }
  refused_ = state_ == State::kOffering;
  absl::Status status(said.code(), absl::StrCat("peer ", request_.peer, " answered: ", MessageOf(said)));
  Finish(WithDetail(std::move(status), DetailOf(said)));
}

void Outgoing::OnLinkBroken(absl::Status why) {
  if (state_ == State::kFinished) return;
  if (!IsBroken(why)) return FinishProtocol(why);
  std::exchange(link_, nullptr)->Close();
  ScheduleRedial(absl::UnavailableError(absl::StrCat("peer ", request_.peer, ": ", MessageOf(why))));
  if (Now() >= redial_at_) DialControl();
}

absl::Status Outgoing::TakePosted(const SendPage& said, double now) {
  if (said.page >= pages_.size()) {
    return InvalidField("posted page", said.page, absl::StrCat("below ", pages_.size()));
  }
  Page& page = pages_[said.page];
  if (said.bytes.size() != page.size) {
    return InvalidField(absl::StrCat("page ", said.page, " bytes"), said.bytes.size(), absl::StrCat(page.size));
  }
  if (said.group >= SendPage::kGroupsMax) {
    return InvalidField(absl::StrCat("page ", said.page, " group"), said.group,
                        absl::StrCat("below ", SendPage::kGroupsMax));
  }
  if ((said.slab != nullptr) != of_gpu()) {
    return InvalidField(absl::StrCat("page ", said.page), of_gpu() ? "without a slab" : "in a slab", "as its offer");
  }
  if (of_gpu()) {
    const auto offset = static_cast<uint64_t>(said.bytes.data() - said.slab->data);
    if (said.bytes.data() < said.slab->data || offset > said.slab->bytes || page.size > said.slab->bytes - offset ||
        offset % kDeviceOffsetAlign != 0) {
      return InvalidField(absl::StrCat("page ", said.page, " offset"), offset,
                          absl::StrCat("within ", said.slab->bytes, ", a multiple of ", kDeviceOffsetAlign));
    }
  }
  if (page.state == PageState::kSkipped) return absl::OkStatus();
  if (page.state != PageState::kUnposted) return InvalidField("posted page", said.page, "posted once");
  Posted& kept = posted(said.page);
  kept.bytes = said.bytes.data();
  kept.slab = said.slab;
  kept.checksum = said.checksum;
  kept.group = said.group;
  page.state = PageState::kQueued;
  if (result_.groups.size() <= said.group) result_.groups.resize(said.group + 1);
  SendTimes& times = result_.groups[said.group];
  times.posted_last = now;
  if (times.posted_first < 0) times.posted_first = times.posted_last;
  if (!HasWork()) progress_ = Now();
  ++queued_pages_;
  (said.page < first_pages_ ? first_queue_ : last_queue_).push_back(said.page);
  return absl::OkStatus();
}

void Outgoing::Post(std::vector<SendPage> pages) {
  if (!pages_made_ || !early_posts_.empty()) return early_posts_.push_back(std::move(pages));
  TakePosts(pages);
}

void Outgoing::TakePosts(const std::vector<SendPage>& pages) {
  const double now = SecondsSince(begun_);
  for (const SendPage& page : pages) {
    if (absl::Status status = TakePosted(page, now); !status.ok()) return Stop(std::move(status));
  }
  CountSending();
  Pump();
}

void Outgoing::FinishParts(HandOffPart trailer) {
  absl::Status status = CheckPart(trailer, first_pages_);
  if (status.ok() && (trailer_.has_value() || early_trailer_.has_value()))
    status = absl::FailedPreconditionError("the trailer was said before");
  if (status.ok() && !pages_made_) {
    early_trailer_ = std::move(trailer);
    return;
  }
  if (status.ok()) status = CheckTotal(trailer);
  for (size_t i = 0; status.ok() && i < trailer.withdrawn.size(); ++i) {
    Page& page = pages_[trailer.withdrawn[i]];
    if (page.state == PageState::kSkipped) continue;
    if (page.state != PageState::kUnposted) {
      status = InvalidField(absl::StrCat("withdrawn[", i, "]"), trailer.withdrawn[i], "a page that was not posted");
      break;
    }
    page.state = PageState::kWithdrawn;
    --pages_to_go_;
    wanted_bytes_ -= page.size;
  }
  if (!status.ok()) return Stop(std::move(status));
  AddPages(trailer, &last_posted_);
  pages_to_go_ += trailer.page_bytes.size();
  trailer_ = std::move(trailer);
  SayLast();
}

uint64_t Outgoing::UnackedMax() const {
  // Pages that are only named are not sent twice.
  if (of_gpu() || by_ucx_ || data_address_.local) return window_;
  return std::min(window_, wanted_bytes_ / kUnackedShare);
}

bool Outgoing::TakeFrame(uint32_t connection, std::vector<SendPage>* pages) {
  pages->clear();
  uint64_t frame_bytes = 0;
  const uint64_t unacked_max = UnackedMax();
  const uint64_t frame_max =
      std::min(of_gpu() ? kDeviceFrameBytesTarget : kFrameBytesTarget, unacked_max / (2 * connections_.size()));
  const size_t pages_max = of_gpu() ? kDevicePagesPerFrameMax : kPagesPerFrameMax;
  while (pages->size() < pages_max && (pages->empty() || frame_bytes < frame_max)) {
    std::deque<uint32_t>& queue = extended_ && !last_queue_.empty() ? last_queue_ : first_queue_;
    if (queue.empty()) break;
    Page& page = pages_[queue.front()];
    if (page.state != PageState::kQueued) {  // skipped since
      queue.pop_front();
      continue;
    }
    if (unacked_bytes_ > 0 && unacked_bytes_ + page.size > unacked_max) break;
    if (page.sent_before) result_.bytes_resent += page.size;
    page.state = PageState::kSent;
    page.sent_before = true;
    const Posted& kept = posted(queue.front());
    if (SendTimes& times = result_.groups[kept.group]; times.sent_first < 0) times.sent_first = SecondsSince(begun_);
    page.connection = static_cast<uint8_t>(connection);
    unacked_bytes_ += page.size;
    frame_bytes += page.size;
    --queued_pages_;
    pages->push_back({queue.front(), {kept.bytes, page.size}, kept.checksum, kept.group, kept.slab});
    queue.pop_front();
  }
  return !pages->empty();
}

void Outgoing::OnNamed(const std::vector<SendPage>& pages) {
  for (const SendPage& page : pages) pages_[page.page].named = true;
}

void Outgoing::CountNamed() {
  if (uncounted_pages_ == 0) return;
  OnPayload(std::exchange(uncounted_bytes_, 0), named_way_);
  OnPagesWritten(std::exchange(uncounted_pages_, 0));
}

void Outgoing::OnPayload(uint64_t bytes, PageWay way) {
  progress_ = Now();
  result_.bytes_sent += bytes;
  if (way != PageWay::kSocket) copied_bytes_ += bytes;
  loop_.metrics.sent.CountBytes(bytes, way);
}

void Outgoing::OnPagesWritten(uint64_t pages) { loop_.metrics.sent.pages.Increment(static_cast<double>(pages)); }

void Outgoing::OnConnectionJoined(uint32_t connection, const JoinedFrame& joined) {
  ConnectionSlot& slot = connections_[connection - 1];
  slot.redial_ms = 0;
  heard_ = progress_ = Now();
  if (std::exchange(slot.joined_before, true)) {
    ++result_.resumes;
    // What was on its way on the connection that broke goes first.
    for (uint32_t i = static_cast<uint32_t>(pages_.size()); i-- > 0;) {
      Page& page = pages_[i];
      if (page.state != PageState::kSent || page.connection != connection) continue;
      if (joined.arrived.has(i)) {
        SetArrived(i, SecondsSince(begun_));
        continue;
      }
      page.state = PageState::kQueued;
      if (std::exchange(page.named, false)) page.sent_before = false;
      unacked_bytes_ -= page.size;
      ++queued_pages_;
      (i < first_pages_ ? first_queue_ : last_queue_).push_front(i);
    }
    CountNamed();
  }
  CountSending();
  Pump();
}

void Outgoing::OnConnectionBroken(uint32_t connection, absl::Status why) {
  if (state_ == State::kFinished) return;
  connections_[connection - 1].connection = nullptr;
  // A receiver that has everything closes its connections, and its DONE may arrive later than that.
  const int64_t pause_ms = extended_ && queued_pages_ == 0 ? kRedialMsMin : 0;
  if (of_gpu() && !connections_[connection - 1].joined_before && IsBroken(why)) {
    return Stop(FieldError(absl::StatusCode::kFailedPrecondition, "gpu", "pages in a GPU's memory",
                           "a receiver whose Unix socket can be reached"));
  }
  if ((data_address_.local || by_ucx_) && !of_gpu() && IsBroken(why)) {
    // The receiver's Unix socket cannot be reached (another network namespace or user), or the receiver cannot map this
    // side's memory or read it through UCX, or it found other bytes there than announced. The pages that the first
    // connection has not brought go over TCP.
    UseTcpConnections();
    for (ConnectionSlot& slot : connections_) slot.redial_at = Now() + std::chrono::milliseconds(pause_ms);
    return Tick();
  }
  ConnectionSlot& slot = connections_[connection - 1];
  // A receiver that has all pages refuses more data connections and will send DONE.
  if (!IsBroken(why) && why.code() != absl::StatusCode::kFailedPrecondition) {
    if (why.code() == absl::StatusCode::kNotFound) {
      return Finish(absl::UnavailableError(
          absl::StrCat("peer ", request_.peer, " does not know this hand-off any more: ", MessageOf(why))));
    }
    // It may have read a JOIN that changed on its way, and so does who lies: that one is not asked for ever.
    if (++slot.refused > kJoinsRefusedMax) return FinishProtocol(why);
  }
  slot.redial_ms = std::max(slot.redial_ms, pause_ms);
  slot.redial_at = Now() + std::chrono::milliseconds(slot.redial_ms);
  slot.redial_ms = std::clamp<int64_t>(2 * slot.redial_ms, kRedialMsMin, kRedialMsMax);
  Tick();  // which comes back for it
}

void Outgoing::OpenConnections() {
  if (state_ != State::kSending) return;
  for (uint32_t i = 0; i < connections_.size() && state_ == State::kSending; ++i) {
    ConnectionSlot& slot = connections_[i];
    if (slot.connection != nullptr || Now() < slot.redial_at || pages_to_go_ == 0) continue;
    slot.connection = std::make_shared<OutgoingDataConnection>(loop_, *this, i + 1);
    std::shared_ptr<OutgoingDataConnection>(slot.connection)->Start();
  }
}

void Outgoing::Pump() {
  for (size_t i = 0; i < connections_.size() && state_ == State::kSending; ++i) {
    if (connections_[i].connection != nullptr)
      std::shared_ptr<OutgoingDataConnection>(connections_[i].connection)->Pump();
  }
}

void Outgoing::Tick() {
  if (state_ == State::kFinished) return;
  const auto stall = std::chrono::milliseconds(stall_ms_);
  if (link_ != nullptr) {
    heard_ = std::max(heard_, link_->heard());
    const auto quiet = std::chrono::milliseconds(std::min(stall_ms_, peer_stall_ms_) / 4);
    if (Now() - link_->sent() >= quiet) link_->Send(EncodeEmpty(FrameType::kPing));
  }
  if (!HasWork() || state_ != State::kSending) progress_ = Now();
  const char* missing = Now() - heard_ >= stall ? "ms without a sign of peer " : nullptr;
  if (missing == nullptr && Now() - progress_ >= stall) missing = "ms without a page taken by peer ";
  if (missing != nullptr) {
    if (link_ == nullptr && !broken_by_.ok()) return Finish(std::move(broken_by_));
    return Finish(FieldError(absl::StatusCode::kDeadlineExceeded, absl::StrCat(missing, request_.peer),
                             absl::StrCat(stall_ms_), absl::StrCat("below ", stall_ms_)));
  }
  if (link_ == nullptr && dial_ == nullptr && Now() >= redial_at_) DialControl();
  OpenConnections();
  if (state_ == State::kFinished) return;
  int64_t next_ms = std::clamp<int64_t>(std::min(stall_ms_, peer_stall_ms_) / kTicksPerStall, 1, kTickMsMax);
  if (link_ == nullptr) next_ms = std::min(next_ms, kRedialMsMin);
  for (const ConnectionSlot& slot : connections_) {
    if (slot.connection == nullptr) next_ms = std::min(next_ms, kRedialMsMin);
  }
  timer_.expires_after(std::chrono::milliseconds(next_ms));
  timer_.async_wait([self = shared_from_this()](const ErrorCode& error) {
    if (!error) self->Tick();
  });
}

void Outgoing::Stop(absl::Status why) {
  if (state_ == State::kFinished) return;
  if (link_ != nullptr) link_->Send(EncodeEmpty(FrameType::kCancel));
  Finish(std::move(why));
}

void Outgoing::FinishProtocol(const absl::Status& why) {
  loop_.metrics.protocol_errors.Increment();
  Stop(absl::UnavailableError(absl::StrCat("peer ", request_.peer, " broke the protocol: ", MessageOf(why))));
}

void Outgoing::CloseConnections() {
  for (ConnectionSlot& slot : connections_) {
    if (slot.connection != nullptr) std::exchange(slot.connection, nullptr)->Close();
  }
}

void Outgoing::Finish(absl::StatusOr<SendResult> result) {
  if (state_ == State::kFinished) return;
  const auto self = shared_from_this();
  state_ = State::kFinished;
  if (dial_ != nullptr) std::exchange(dial_, nullptr)->Cancel();
  CloseConnections();
  if (link_ != nullptr) std::exchange(link_, nullptr)->Close(/*lingering=*/!result.ok());
  timer_.cancel();
  loop_.outgoing.erase(id_);
  if (counted_) {
    const double seconds = result.ok() ? result->seconds : 0;
    loop_.metrics.sent.active.Decrement();
    loop_.metrics.sent.transfers(refused_ ? TransferResult::kRefused : ResultOf(result.status())).Increment();
    if (result.ok()) loop_.metrics.sent.seconds.Observe(seconds);
    loop_.peers.End(request_.peer, false, result.status(), result_.bytes_sent, copied_bytes_, result_.sending_seconds);
  } else {
    loop_.metrics.sent.transfers(ResultOf(result.status())).Increment();
  }
  ended_ = std::move(result);
  if (draining_ == 0) return TellDone();
  ++loop_.draining;
}

void Outgoing::DrainConnection(Socket socket, ZeroCopy zero_copy) {
  ++draining_;
  Drain::Start(loop_, std::move(socket), std::move(zero_copy), stall_ms_, [self = shared_from_this()] {
    if (--self->draining_ > 0 || !self->ended_.has_value()) return;
    --self->loop_.draining;
    self->TellDone();
  });
}

void Outgoing::TellDone() {
  const auto done = std::make_unique<SendEvents>(std::move(events_));
  done->done(*std::move(ended_));
}

}  // namespace kvmanager::tcp
