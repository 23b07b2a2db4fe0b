// What the transport's tests share: a receiver that records, and raw sockets that speak the protocol well or badly.
// Loopback only.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>
#include <xxhash.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <future>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "kvmanager/base/mutex.h"
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

inline SendRequest RequestOf(const std::vector<Page>& pages, const std::string& peer) {
  SendRequest request;
  request.peer = peer;
  request.manifest = "manifest";
  for (const Page& page : pages) request.pages.push_back({page, XXH3_64bits(page.data(), page.size())});
  return request;
}

/// Records what it is given. Fields are set before use, or under a hold.
class TestReceiver final : public HandOffReceiver {
 public:
  class HandOff final : public IncomingHandOff {
   public:
    explicit HandOff(TestReceiver* owner) : owner_(owner) { ++owner_->live; }
    ~HandOff() override { --owner_->live; }
    absl::Span<uint8_t> target(size_t page) override { return absl::MakeSpan(pages[page]); }
    std::vector<Page> pages;  // empty: skipped
   private:
    TestReceiver* owner_;
  };

  std::set<size_t> skip;
  absl::Status refuse, fail_complete;
  bool hold_offers = false, hold_completes = false;
  int target_size_error = 0;

  std::atomic<int> live{0};

  void Offer(std::string peer, std::string manifest, std::vector<uint64_t> page_bytes,
             std::vector<uint64_t> page_checksums, OfferReply reply) override {
    if (!refuse.ok()) return reply(refuse);
    auto hand_off = std::make_unique<HandOff>(this);
    for (size_t i = 0; i < page_bytes.size(); ++i) {
      hand_off->pages.emplace_back(skip.count(i) ? 0 : page_bytes[i] + target_size_error);
    }
    if (!hold_offers) {
      Count(&offers_);
      return reply(std::move(hand_off));
    }
    MutexLock lock(mutex_);
    ++offers_;
    held_offers_.emplace_back(std::move(reply), std::move(hand_off));
    changed_.notify_all();
  }
  void Complete(std::unique_ptr<IncomingHandOff> hand_off, CompleteReply reply) override {
    {
      MutexLock lock(mutex_);
      completed_.push_back(std::move(static_cast<HandOff&>(*hand_off).pages));
      changed_.notify_all();
    }
    hand_off.reset();
    if (!fail_complete.ok()) return reply(fail_complete);
    if (!hold_completes) return reply(std::string("ticket"));
    MutexLock lock(mutex_);
    held_completes_.push_back(std::move(reply));
  }
  void Abort(std::unique_ptr<IncomingHandOff> hand_off, absl::Status why) override {
    EXPECT_NE(hand_off, nullptr);
    EXPECT_FALSE(why.ok());
    hand_off.reset();
    MutexLock lock(mutex_);
    aborted_.push_back(std::move(why));
    changed_.notify_all();
  }

  void WaitForOffers(size_t n) {
    MutexLock lock(mutex_);
    while (offers_ < n) lock.Wait(changed_);
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
  size_t aborts() {
    MutexLock lock(mutex_);
    return aborted_.size();
  }
  size_t offers() {
    MutexLock lock(mutex_);
    return offers_;
  }
  void ReleaseOffers() {
    std::vector<std::pair<OfferReply, std::unique_ptr<HandOff>>> held;
    {
      MutexLock lock(mutex_);
      held.swap(held_offers_);
    }
    for (auto& [reply, hand_off] : held) reply(std::move(hand_off));
  }

 private:
  void Count(size_t* counter) {
    MutexLock lock(mutex_);
    ++*counter;
    changed_.notify_all();
  }
  Mutex mutex_;
  std::condition_variable changed_;
  size_t offers_ = 0;
  std::vector<std::pair<OfferReply, std::unique_ptr<HandOff>>> held_offers_;
  std::vector<CompleteReply> held_completes_;
  std::vector<std::vector<Page>> completed_;
  std::vector<absl::Status> aborted_;
};

/// A blocking socket on loopback; reads give up after 20 s.
class RawSocket {
 public:
  explicit RawSocket(int fd) : fd_(fd) {
    const timeval limit{20, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
  }
  RawSocket(RawSocket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
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
  static RawSocket Connect(const std::string& host_port) {
    const sockaddr_in address = Address(std::stoi(host_port.substr(host_port.rfind(':') + 1)));
    RawSocket socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
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
      if (header->type != FrameType::kPage) bytes += Read(header->body_bytes);
    }
    return ParseFrame(Span(bytes));
  }
  static absl::Span<const uint8_t> Span(const std::string& s) {
    return {reinterpret_cast<const uint8_t*>(s.data()), s.size()};
  }

 private:
  int fd_;
};

inline std::string PageFrameOf(uint32_t index, const Page& page) {
  std::string out(kHeaderBytes, 0);
  PutHeader({FrameType::kPage, index, page.size()}, reinterpret_cast<uint8_t*>(out.data()));
  return out.append(page.begin(), page.end());
}

/// All that a good sender writes for `pages`, none of them skipped.
inline std::string StreamOf(const std::vector<Page>& pages) {
  const SendRequest request = RequestOf(pages, "");
  std::string stream = EncodeHello() + EncodeOffer(request.pages, request.manifest);
  uint64_t bytes = 0;
  for (size_t i = 0; i < pages.size(); ++i) {
    stream += PageFrameOf(i, pages[i]);
    bytes += pages[i].size();
  }
  return stream + EncodeEnd({pages.size(), bytes});
}

}  // namespace kvmanager::tcp
