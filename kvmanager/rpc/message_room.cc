#include "kvmanager/rpc/message_room.h"

#include <algorithm>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr char kMessageHelp[] =
    "Memory of requests that are received or served, of replies that are made or sent, and kept for further replies";
constexpr char kWaitingHelp[] = "Requests and replies that wait for memory";

}  // namespace

// In the room's list until it is reserved or nobody wants it any more.
class MessageRoom::Waiting {
 public:
  Waiting(kj::PromiseFulfiller<MessageShare::Charge>& fulfiller, std::shared_ptr<MessageShare> share, uint64_t bytes)
      : fulfiller_(fulfiller),
        share_(std::move(share)),
        bytes_(bytes),
        at_(share_->room_->waiting_.insert(share_->room_->waiting_.end(), this)) {}
  ~Waiting() { Leave(); }

  const MessageShare& share() const { return *share_; }
  uint64_t bytes() const { return bytes_; }
  /// It has left the list.
  void Grant() {
    Leave();
    share_->room_->used_ += bytes_;
    share_->used_ += bytes_;
    fulfiller_.fulfill(MessageShare::Charge(share_, bytes_));
  }

 private:
  void Leave() {
    if (!waits_) return;
    waits_ = false;
    share_->room_->waiting_.erase(at_);
  }

  kj::PromiseFulfiller<MessageShare::Charge>& fulfiller_;
  const std::shared_ptr<MessageShare> share_;
  const uint64_t bytes_;
  const std::list<Waiting*>::iterator at_;
  bool waits_ = true;
};

MessageRoom::~MessageRoom() { KV_CHECK(shares_.empty()); }

bool MessageRoom::FitsShare(const MessageShare& share, uint64_t bytes) const {
  return share.used_ == 0 || share.used_ + bytes <= bounds_.share;
}

bool MessageRoom::Fits(const MessageShare& share, uint64_t bytes) const {
  if (!FitsShare(share, bytes)) return false;
  // A single message that is larger than the bound gets the whole room.
  return used_ == 0 || used_ + bytes <= bounds_.whole || share.used_ + bytes <= kOwnBytes;
}

void MessageRoom::Admit() {
  absl::flat_hash_set<const MessageShare*> at_bound;
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    Waiting* const next = *at++;
    if (at_bound.contains(&next->share()) || !FitsShare(next->share(), next->bytes())) {
      at_bound.insert(&next->share());
    } else if (Fits(next->share(), next->bytes())) {
      next->Grant();
    } else {
      return;
    }
  }
}

uint64_t MessageRoom::most_used_bytes() const {
  uint64_t most = 0;
  for (const MessageShare* const share : shares_) most = std::max(most, share->used_bytes());
  return most;
}

bool MessageRoom::keeps_waiting() const {
  return std::any_of(waiting_.begin(), waiting_.end(),
                     [this](const Waiting* each) { return FitsShare(each->share(), each->bytes()); });
}

void MessageRoom::Look(bool others_wait) {
  memory_.Look();
  if (!others_wait) return;
  const int64_t now_ns = clock_->NowNs();
  const std::vector<MessageShare*> shares(shares_.begin(), shares_.end());
  for (MessageShare* const share : shares) {
    if (share->stalled(now_ns) && share->used_ > kOwnBytes) share->CutOff();
  }
}

void MessageRoom::CutOffLargest() {
  while (used_ > bounds_.whole) {
    const auto largest =
        std::max_element(shares_.begin(), shares_.end(),
                         [](const MessageShare* a, const MessageShare* b) { return a->counted_ < b->counted_; });
    if (largest == shares_.end() || (*largest)->counted_ <= kOwnBytes) return;
    (*largest)->CutOff();
  }
}

void MessageShare::Charge::Shrink(uint64_t bytes) {
  if (bytes >= bytes_) return;
  of_->GiveBack(bytes_ - bytes);
  bytes_ = bytes;
}

absl::StatusOr<ReplyBuffer> MessageShare::Charge::Make(absl::string_view what, size_t bytes) {
  KV_CHECK(of_ != nullptr);
  MessageRoom& room = *of_->room_;
  return room.memory_.Make(what, bytes, room.bounds_.whole - std::min(room.bounds_.whole, room.used_));
}

void MessageShare::Charge::Keep(ReplyBuffer buffer) {
  if (of_ != nullptr) of_->room_->memory_.Keep(std::move(buffer));
}

MessageShare::MessageShare(MessageRoom* room, absl::AnyInvocable<void()> cut_off)
    : room_(room), cut_off_(std::move(cut_off)) {
  room_->shares_.insert(this);
}

MessageShare::~MessageShare() {
  for (Sending& each : sending_) KeepMemory(each.lent);
  room_->shares_.erase(this);
  room_->used_ -= used_;  // of a request that was being received
  room_->Admit();
}

bool MessageShare::TryTake(uint64_t bytes) {
  const bool overtakes = !room_->waiting_.empty() && used_ + bytes > MessageRoom::kOwnBytes;
  if (overtakes || !room_->Fits(*this, bytes)) return false;
  room_->used_ += bytes;
  used_ += bytes;
  return true;
}

kj::Promise<void> MessageShare::Take(uint64_t bytes) {
  return Reserve(bytes).then([this](Charge charge) {
    used_ += charge.bytes();  // kept, while the charge gives back its own
    room_->used_ += charge.bytes();
  });
}

void MessageShare::GiveBack(uint64_t bytes) {
  used_ -= bytes;
  room_->used_ -= bytes;
  room_->Admit();
}

void MessageShare::NoteReceived(bool whole) {
  received_ns_ = whole ? 0 : room_->clock_->NowNs();
  if (whole || since_ns_ == 0) since_ns_ = received_ns_;
}

void MessageShare::NoteWhole(kj::ArrayPtr<const kj::byte> bytes, const std::shared_ptr<const void>& memory) {
  std::erase_if(requests_, [](const Request& request) { return request.memory.expired(); });
  requests_.push_back({bytes, memory});
}

std::shared_ptr<const void> MessageShare::KeepRequest(const uint8_t* at) {
  for (const Request& request : requests_) {
    if (at < request.bytes.begin() || at >= request.bytes.end()) continue;
    if (std::shared_ptr<const void> memory = request.memory.lock(); memory != nullptr) return memory;
  }
  return nullptr;
}

kj::Promise<MessageShare::Charge> MessageShare::Reserve(uint64_t bytes) {
  if (TryTake(bytes)) return Charge(shared_from_this(), bytes);
  auto waiting = kj::newAdaptedPromise<Charge, MessageRoom::Waiting>(shared_from_this(), bytes);
  room_->Admit();  // those before it may wait for their own shares alone
  return waiting;
}

void MessageShare::SendWith(Charge charge, Lent lent) {
  if (sending_.empty()) since_ns_ = room_->clock_->NowNs();
  sending_bytes_ += charge.bytes();
  sending_.push_back({charge.Release(), std::move(lent)});
}

void MessageShare::NoteSent(kj::ArrayPtr<const kj::ArrayPtr<const capnp::word>> segments, uint64_t unsent) {
  const auto sent = std::find_if(sending_.begin(), sending_.end(), [&](const Sending& reply) {
    const void* const lent = reply.lent.front().data();
    return std::any_of(segments.begin(), segments.end(),
                       [lent](const auto& segment) { return segment.begin() == lent; });
  });
  if (sent != sending_.end()) {
    const uint64_t bytes = sent->bytes;
    KeepMemory(sent->lent);
    std::swap(*sent, sending_.back());
    sending_.pop_back();
    sending_bytes_ -= bytes;
    since_ns_ = sending_.empty() ? 0 : room_->clock_->NowNs();
    GiveBack(bytes);
  }
  if (unsent < counted_ + sending_bytes_) CountUnsent(unsent);
}

void MessageShare::DropUnsent() {
  since_ns_ = 0;
  for (Sending& each : sending_) KeepMemory(each.lent);
  sending_.clear();
  GiveBack(std::exchange(sending_bytes_, 0));
}

void MessageShare::KeepMemory(Lent& lent) {
  for (ReplyBuffer& each : lent) room_->memory_.Keep(std::move(each));
}

void MessageShare::NoteUnsent(uint64_t unsent) { CountUnsent(unsent); }

void MessageShare::CountUnsent(uint64_t unsent) {
  if (cut_off_ == nullptr) return;
  uint64_t unreserved = unsent - std::min(unsent, sending_bytes_);
  if (unreserved <= MessageRoom::kOwnBytes) unreserved = 0;
  if (unreserved == counted_) return;
  const bool less = unreserved < counted_;
  room_->used_ += unreserved - counted_;
  counted_ = unreserved;
  if (less) return room_->Admit();
  if (room_->used_ > room_->bounds_.whole) room_->CutOffLargest();
}

void MessageShare::CutOff() {
  absl::AnyInvocable<void()> cut_off = std::exchange(cut_off_, nullptr);
  room_->used_ -= std::exchange(counted_, 0);  // it is about to go
  since_ns_ = received_ns_ = 0;
  if (cut_off) cut_off();
}

void MessageShare::Detach() {
  cut_off_ = nullptr;
  since_ns_ = received_ns_ = 0;
  room_->used_ -= std::exchange(counted_, 0);
  room_->Admit();
}

MessageMetrics::MessageMetrics(Metrics* m)
    : request_bytes(m->Gauge("message_bytes", kMessageHelp, {{"kind", "requests"}})),
      reply_bytes(m->Gauge("message_bytes", kMessageHelp, {{"kind", "replies"}})),
      kept_bytes(m->Gauge("message_bytes", kMessageHelp, {{"kind", "kept"}})),
      waiting_requests(m->Gauge("messages_waiting", kWaitingHelp, {{"kind", "requests"}})),
      waiting_replies(m->Gauge("messages_waiting", kWaitingHelp, {{"kind", "replies"}})) {}

void MessageMetrics::Set(const MessageRoom& requests, const MessageRoom& replies) {
  request_bytes.Set(double(requests.used_bytes()));
  reply_bytes.Set(double(replies.used_bytes()));
  kept_bytes.Set(double(replies.kept_bytes()));
  waiting_requests.Set(double(requests.waiting()));
  waiting_replies.Set(double(replies.waiting()));
}

}  // namespace kvmanager
