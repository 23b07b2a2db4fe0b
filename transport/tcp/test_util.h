// What the transport's tests share: a receiver that records, and raw sockets that speak the protocol well or badly.
// Loopback only.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>
#include <xxhash.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <future>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/status.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/tcp/wire.h"

namespace kvmanager::tcp {

using Page = std::vector<uint8_t>;

inline std::vector<Page> RandomPages(const std::vector<size_t>& sizes, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<Page> pages;
  for (const size_t size : sizes) {
    Page page(size);
    for (size_t i = 0; i < size; i += 8) {
      const uint64_t word = random();
      std::copy_n(reinterpret_cast<const uint8_t*>(&word), std::min<size_t>(8, size - i), page.begin() + i);
    }
    pages.push_back(std::move(page));
  }
  return pages;
}

/// Records what it is given. Fields are set before use, or under a hold.
class TestReceiver final : public HandOffReceiver {
 public:
  class HandOff final : public IncomingHandOff {
   public:
    HandOff(TestReceiver* owner, const HandOffPart& first) : owner_(owner) {
      {
        MutexLock lock(owner_->mutex_);
        ++owner_->live_;
      }
      Add(first);
    }
    ~HandOff() override {
      MutexLock lock(owner_->mutex_);
      --owner_->live_;
      owner_->changed_.notify_all();
    }
    absl::Span<uint8_t> target(uint32_t page) const override { return absl::MakeSpan(const_cast<Page&>(pages_[page])); }
    void Arrived(absl::Span<const uint32_t> pages) override {
      for (const uint32_t page : pages) {
        EXPECT_FALSE(pages_[page].empty());
        EXPECT_TRUE(arrived_.insert(page).second) << "page " << page << " arrived twice";
      }
      MutexLock lock(owner_->mutex_);
      owner_->shares_[this] += static_cast<double>(pages.size());
      owner_->arrived_.insert(owner_->arrived_.end(), pages.begin(), pages.end());
      owner_->changed_.notify_all();
    }
    void Extend(HandOffPart last, absl::AnyInvocable<void(absl::Status)> reply) override {
      EXPECT_FALSE(std::exchange(extended_, true));
      Add(last);
      last_manifest_ = last.manifest;
      reply(owner_->refuse_last);
    }
    void Complete(absl::AnyInvocable<void(absl::Status)> reply) override {
      EXPECT_TRUE(extended_);
      {
        MutexLock lock(owner_->mutex_);
        if (owner_->completed_.empty()) owner_->shares_then_ = owner_->shares_;
        owner_->completed_.push_back(std::move(pages_));
        owner_->changed_.notify_all();
      }
      if (!owner_->hold_completes) return reply(owner_->fail_complete);
      MutexLock lock(owner_->mutex_);
      owner_->held_completes_.push_back(std::move(reply));
    }
    void Abort(absl::Status why) override {
      EXPECT_FALSE(why.ok());
      MutexLock lock(owner_->mutex_);
      owner_->aborted_.push_back(std::move(why));
      owner_->changed_.notify_all();
    }

   private:
    void Add(const HandOffPart& part) {
      for (const uint64_t bytes : part.page_bytes) {
        pages_.emplace_back(owner_->skip.count(pages_.size()) ? 0 : bytes + owner_->target_size_error);
      }
    }
    TestReceiver* owner_;
    std::vector<Page> pages_;  // empty: skipped
    std::set<uint32_t> arrived_;
    bool extended_ = false;
    std::string last_manifest_;
  };

  std::set<size_t> skip;
  absl::Status refuse, refuse_last, fail_complete;
  bool hold_offers = false, hold_completes = false;
  int target_size_error = 0;
  std::string ticket = "ticket";

  void Offer(std::string, HandOffPart first, int64_t, OfferReply reply) override {
    if (!refuse.ok()) return reply.done(refuse);
    Accepted accepted{std::make_shared<HandOff>(this, first), ticket};
    MutexLock lock(mutex_);
    ++offers_;
    changed_.notify_all();
    if (!hold_offers) return reply.done(std::move(accepted));
    reply.waiting(FieldError(absl::StatusCode::kResourceExhausted, "slots", "9", "at most 8"));
    held_offers_.emplace_back(std::move(reply), std::move(accepted));
  }
  ReceiverLoad Load() const override { return {1000, 600, 3, 0, 0}; }

  /// Hand-offs are let go of right after their end.
  void WaitUntilNoneLives() {
    MutexLock lock(mutex_);
    while (live_ > 0) lock.Wait(changed_);
  }
  void WaitForOffers(size_t n) {
    MutexLock lock(mutex_);
    while (offers_ < n) lock.Wait(changed_);
  }
  void WaitForArrivals(size_t n) {
    MutexLock lock(mutex_);
    while (arrived_.size() < n) lock.Wait(changed_);
  }
  /// Pages, in the order in which they arrived.
  std::vector<uint32_t> arrivals() {
    MutexLock lock(mutex_);
    return arrived_;
  }
  /// How many pages of each hand-off had arrived when the first was complete.
  std::vector<double> shares_at_first_completion() {
    MutexLock lock(mutex_);
    std::vector<double> shares;
    for (const auto& [hand_off, pages] : shares_then_) shares.push_back(pages);
    return shares;
  }
  std::vector<absl::Status> WaitForAborts(size_t n) {
    MutexLock lock(mutex_);
    while (aborted_.size() < n) lock.Wait(changed_);
    return aborted_;
  }
  std::vector<std::vector<Page>> completed() {
    MutexLock lock(mutex_);
    return completed_;
  }
  size_t completions() {
    MutexLock lock(mutex_);
    return completed_.size();
  }
  std::vector<Page> newest() {
    MutexLock lock(mutex_);
    return completed_.back();
  }
  size_t aborts() {
    MutexLock lock(mutex_);
    return aborted_.size();
  }
  size_t offers() {
    MutexLock lock(mutex_);
    return offers_;
  }
  void ReleaseOffers() {
    std::vector<std::pair<OfferReply, Accepted>> held;
    {
      MutexLock lock(mutex_);
      held.swap(held_offers_);
    }
    for (auto& [reply, accepted] : held) reply.done(std::move(accepted));
  }

 private:
  Mutex mutex_;
  std::condition_variable changed_;
  size_t offers_ = 0;
  int live_ = 0;
  std::vector<uint32_t> arrived_;
  std::map<const void*, double> shares_, shares_then_;
  std::vector<std::pair<OfferReply, Accepted>> held_offers_;
  std::vector<absl::AnyInvocable<void(absl::Status)>> held_completes_;
  std::vector<std::vector<Page>> completed_;
  std::vector<absl::Status> aborted_;
};

/// The part that `pages` are.
inline HandOffPart PartOf(const std::vector<Page>& pages) {
  HandOffPart part;
  part.manifest = "manifest";
  for (const Page& page : pages) part.page_bytes.push_back(page.size());
  return part;
}
inline SendPage PageOf(const std::vector<Page>& pages, size_t i) {
  return {static_cast<uint32_t>(i), pages[i], XXH3_64bits(pages[i].data(), pages[i].size())};
}
inline std::vector<SendPage> PagesOf(const std::vector<Page>& pages) {
  std::vector<SendPage> out;
  for (size_t i = 0; i < pages.size(); ++i) out.push_back(PageOf(pages, i));
  return out;
}
inline HandOffPart NothingMore() {
  HandOffPart last;
  last.manifest = "end";
  return last;
}

/// What came of a hand-off.
struct Outcome {
  std::future<absl::StatusOr<SendResult>> done;
  std::shared_ptr<std::atomic<int>> waits = std::make_shared<std::atomic<int>>(0);
  std::future<std::string> ticket;
  uint64_t id = 0;
};
inline Outcome Begin(Transport& transport, SendRequest request) {
  Outcome out;
  SendEvents events;
  auto done = std::make_shared<std::promise<absl::StatusOr<SendResult>>>();
  auto ticket = std::make_shared<std::promise<std::string>>();
  out.done = done->get_future();
  out.ticket = ticket->get_future();
  events.accepted = [ticket](std::string t) { ticket->set_value(std::move(t)); };
  events.waiting = [waits = out.waits](const absl::Status&) { ++*waits; };
  events.done = [done](absl::StatusOr<SendResult> result) { done->set_value(std::move(result)); };
  out.id = transport.Begin(std::move(request), std::move(events));
  return out;
}
inline SendRequest RequestOf(const std::vector<Page>& pages, const std::string& peer) {
  SendRequest request;
  request.peer = peer;
  request.header = PartOf(pages);
  return request;
}
/// All of it at once: `posted` are the pages of `request`.
inline Outcome SendAll(Transport& transport, SendRequest request, std::vector<SendPage> posted) {
  Outcome out = Begin(transport, std::move(request));
  transport.Post(out.id, std::move(posted));
  transport.Finish(out.id, NothingMore());
  return out;
}

/// A blocking socket on loopback; reads give up after 20 s.
class RawSocket {
 public:
  explicit RawSocket(int fd) : fd_(fd) {
    const timeval limit{20, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    const int on = 1;
    ::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  }
  RawSocket(RawSocket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  RawSocket& operator=(RawSocket&& other) noexcept {
    Close();
    fd_ = std::exchange(other.fd_, -1);
    return *this;
  }
  ~RawSocket() { Close(); }
  void Close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }
  static sockaddr_in Address(uint16_t port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
  }
  /// from: 127.0.0.x, the host that it seems to come from.
  static RawSocket Connect(const std::string& host_port, uint8_t from = 1) {
    const sockaddr_in address = Address(std::stoi(host_port.substr(host_port.rfind(':') + 1)));
    RawSocket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_in own = Address(0);
    own.sin_addr.s_addr = htonl(INADDR_LOOPBACK - 1 + from);
    if (from != 1) {
      EXPECT_EQ(::bind(socket.fd_, reinterpret_cast<const sockaddr*>(&own), sizeof(own)), 0);
    }
    EXPECT_EQ(::connect(socket.fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    return socket;
  }
  static RawSocket Listen() {
    const sockaddr_in address = Address(0);
    RawSocket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::bind(socket.fd_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    EXPECT_EQ(::listen(socket.fd_, 8), 0);
    return socket;
  }
  RawSocket Accept() { return RawSocket(::accept(fd_, nullptr, nullptr)); }
  std::string address() const {
    sockaddr_in address{};
    socklen_t size = sizeof(address);
    ::getsockname(fd_, reinterpret_cast<sockaddr*>(&address), &size);
    return absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  }
  /// False if the other side has closed.
  bool Write(const std::string& bytes) { return WriteFrom(bytes.data(), bytes.size()); }
  bool WriteFrom(const void* bytes, size_t size) {
    size_t sent = 0;
    while (sent < size) {
      const ssize_t n = ::send(fd_, static_cast<const char*>(bytes) + sent, size - sent, MSG_NOSIGNAL);
      if (n <= 0) return false;
      sent += n;
    }
    return true;
  }
  void EndWriting() { ::shutdown(fd_, SHUT_WR); }
  void EndBoth() { ::shutdown(fd_, SHUT_RDWR); }
  bool valid() const { return fd_ >= 0; }
  int fd() const { return fd_; }
  ssize_t ReadSome(void* bytes, size_t size) { return ::recv(fd_, bytes, size, 0); }
  /// `size` bytes, or fewer if the other side closed before.
  std::string Read(size_t size) {
    std::string bytes(size, 0);
    bytes.resize(ReadInto(bytes.data(), size));
    return bytes;
  }
  size_t ReadInto(void* bytes, size_t size) {
    size_t read = 0;
    while (read < size) {
      const ssize_t n = ::recv(fd_, static_cast<char*>(bytes) + read, size - read, 0);
      if (n <= 0) break;
      read += n;
    }
    return read;
  }
  /// All until the other side closes; the test fails if it does not.
  std::string ReadToEnd() {
    std::string all;
    char chunk[4096];
    for (;;) {
      const ssize_t n = ::recv(fd_, chunk, sizeof(chunk), 0);
      EXPECT_FALSE(n < 0 && errno == EAGAIN) << "the connection was not closed";
      if (n <= 0) return all;
      all.append(chunk, n);
    }
  }
  /// The next frame, HELLO or other; INVALID_ARGUMENT if it is cut short.
  absl::StatusOr<Frame> ReadFrame() {
    std::string bytes = Read(kHeaderBytes);
    if (bytes.compare(0, 8, std::string(kMagic, 8)) == 0) {
      bytes += Read(kHelloBytes - kHeaderBytes);
    } else {
      const auto header = ParseHeader(Span(bytes));
      if (!header.ok()) return header.status();
      bytes += Read(header->body_bytes);
    }
    return ParseFrame(Span(bytes));
  }
  /// The next frame that is not a PING; the test fails unless it is a T.
  template <typename T>
  T Expect() {
    for (;;) {
      absl::StatusOr<Frame> frame = ReadFrame();
      EXPECT_TRUE(frame.ok()) << frame.status();
      if (!frame.ok()) return T();
      if (std::holds_alternative<PingFrame>(*frame) && !std::is_same_v<T, PingFrame>) continue;
      if (auto* error = std::get_if<ErrorFrame>(&*frame); error != nullptr && !std::is_same_v<T, ErrorFrame>) {
        ADD_FAILURE() << error->status;
      }
      T* wanted = std::get_if<T>(&*frame);
      EXPECT_NE(wanted, nullptr) << "frame " << frame->index();
      return wanted == nullptr ? T() : std::move(*wanted);
    }
  }
  static absl::Span<const uint8_t> Span(const std::string& s) {
    return {reinterpret_cast<const uint8_t*>(s.data()), s.size()};
  }

 private:
  int fd_;
};

inline constexpr Token kToken = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

inline std::string PagesFrameOf(const std::vector<Page>& pages, const std::vector<uint32_t>& indices) {
  std::vector<PageRecord> records;
  for (const uint32_t i : indices) records.push_back({i, XXH3_64bits(pages[i].data(), pages[i].size())});
  std::string out(kHeaderBytes + kPageRecordBytes * records.size(), 0);
  PutPagesHead(records, reinterpret_cast<uint8_t*>(out.data()));
  for (const uint32_t i : indices) out.append(pages[i].begin(), pages[i].end());
  return out;
}

/// What a good sender writes on the control connection of a hand-off of `pages`, LAST not included.
inline std::string OfferOf(const std::vector<Page>& pages, const Token& token = kToken) {
  return EncodeHello({}) + EncodeOffer(token, 0, PartOf(pages));
}
/// What it writes on a data connection before pages.
inline std::string JoinOf(uint32_t connection, const Token& token = kToken) {
  return EncodeHello({}) + EncodeJoin({token, connection});
}
/// All pages, on one data connection, in two frames.
inline std::string DataStreamOf(const std::vector<Page>& pages) {
  std::vector<uint32_t> indices(pages.size());
  std::iota(indices.begin(), indices.end(), 0);
  const size_t half = pages.size() / 2;
  return JoinOf(1) + PagesFrameOf(pages, {indices.begin(), indices.begin() + static_cast<ptrdiff_t>(half)}) +
         PagesFrameOf(pages, {indices.begin() + static_cast<ptrdiff_t>(half), indices.end()});
}

/// A receiver of one hand-off, played by the test: its two connections, up to the first page.
struct PlayedReceiver {
  explicit PlayedReceiver(size_t pages) : control(-1), connection(-1), count(pages) {}
  void Accept(RawSocket& listener) {
    control = listener.Accept();
    control.Write(EncodeHello({}));
    control.Expect<HelloFrame>();
    control.Expect<OfferFrame>();
    AcceptFrame accept;
    accept.window = 64 << 20;
    accept.ticket = "ticket";
    accept.wanted = PageBitmap(count);
    for (uint32_t i = 0; i < count; ++i) accept.wanted.Add(i);
    control.Write(EncodeAccept(accept));
    connection = listener.Accept();
    connection.Write(EncodeHello({}));
    connection.Expect<HelloFrame>();
    EXPECT_EQ(connection.Expect<JoinFrame>().connection, 1u);
    connection.Write(EncodeJoined({false, PageBitmap(count)}));
  }
  RawSocket control, connection;
  size_t count;
};

}  // namespace kvmanager::tcp
