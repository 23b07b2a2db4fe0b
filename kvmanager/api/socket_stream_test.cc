#include "kvmanager/api/socket_stream.h"

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <kj/debug.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <random>
#include <vector>

#include "kvmanager/base/tls_testing.h"

namespace kvmanager {
namespace {

/// Two ends of a socket pair on one event loop.
class SocketStreamTest : public ::testing::Test {
 protected:
  ~SocketStreamTest() noexcept override = default;
  SocketStreamTest() : loop_(port_), scope_(loop_) {
    int pair[2];
    KJ_SYSCALL(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair));
    for (int i = 0; i < 2; ++i) {
      fd_[i] = kj::AutoCloseFd(pair[i]);
      write_fd_[i] = kj::AutoCloseFd(::fcntl(pair[i], F_DUPFD_CLOEXEC, 0));
    }
    a_.emplace(port_, fd_[0], write_fd_[0]);
    b_.emplace(port_, fd_[1], write_fd_[1]);
  }

  void CloseA() {
    a_.reset();
    fd_[0] = nullptr;
    write_fd_[0] = nullptr;
  }

  static std::vector<capnp::word> Words(size_t count, std::mt19937& random) {
    std::vector<capnp::word> words(count);
    auto* bytes = reinterpret_cast<uint8_t*>(words.data());
    for (size_t i = 0; i < count * sizeof(capnp::word); ++i) bytes[i] = uint8_t(random());
    return words;
  }

  kj::UnixEventPort port_;
  kj::EventLoop loop_;
  kj::WaitScope scope_;
  kj::AutoCloseFd fd_[2], write_fd_[2];
  std::optional<SocketStream> a_, b_;
};

using Segments = std::vector<std::vector<capnp::word>>;

TEST_F(SocketStreamTest, AnyMixOfMessagesArrivesWholeInOrderAndWithItsOwnDescriptors) {
  std::mt19937 random(7);
  struct Sent {
    Segments segments;
    std::vector<kj::ArrayPtr<const capnp::word>> views;
    std::vector<int> fds;
    ino_t inode = 0;
  };
  std::deque<Sent> sent;
  std::vector<kj::AutoCloseFd> files;
  kj::Promise<void> writing = kj::READY_NOW;
  const size_t sizes[] = {0, 1, 2, 60, 500, 1000, 4000, 9000, 70000, 300000};
  for (int i = 0; i < 200; ++i) {
    Sent& message = sent.emplace_back();
    const int segments = 1 + int(random() % 4);
    for (int s = 0; s < segments; ++s) {
      message.segments.push_back(Words(sizes[random() % (i % 10 == 0 ? std::size(sizes) : 6)], random));
    }
    for (const auto& segment : message.segments) message.views.emplace_back(segment.data(), segment.size());
    if (random() % 4 == 0) {
      files.emplace_back(::memfd_create("test", MFD_CLOEXEC));
      struct stat stat;
      KJ_SYSCALL(::fstat(files.back(), &stat));
      message.inode = stat.st_ino;
      message.fds.push_back(files.back());
    }
    writing = writing.then([this, &message] {
      return a_->writeMessage(kj::arrayPtr(message.fds.data(), message.fds.size()),
                              kj::arrayPtr(message.views.data(), message.views.size()));
    });
  }
  auto written = writing.eagerlyEvaluate([](kj::Exception&& e) { ADD_FAILURE() << e.getDescription().cStr(); });
  for (const Sent& message : sent) {
    kj::AutoCloseFd space[1];
    auto maybe = b_->tryReadMessage(kj::arrayPtr(space, 1), {}, nullptr).wait(scope_);
    auto& got = KJ_ASSERT_NONNULL(maybe);
    for (size_t s = 0; s < message.segments.size(); ++s) {
      const auto segment = got.reader->getSegment(uint(s));
      ASSERT_EQ(segment.size(), message.segments[s].size());
      ASSERT_TRUE(std::equal(segment.asBytes().begin(), segment.asBytes().end(), message.views[s].asBytes().begin()));
    }
    ASSERT_EQ(got.fds.size(), message.fds.size());
    if (message.inode != 0) {
      struct stat stat;
      KJ_SYSCALL(::fstat(got.fds[0], &stat));
      ASSERT_EQ(stat.st_ino, message.inode);
    }
  }
  written.wait(scope_);
}

TEST_F(SocketStreamTest, BytesInPiecesOfAnySizeGiveTheSameMessages) {
  std::mt19937 random(11);
  std::vector<kj::byte> bytes;
  std::vector<std::vector<capnp::word>> expected;
  for (int i = 0; i < 50; ++i) {
    expected.push_back(Words(random() % 300, random));
    kj::ArrayPtr<const capnp::word> segment(expected.back().data(), expected.back().size());
    auto flat = capnp::messageToFlatArray(kj::arrayPtr(&segment, 1));
    bytes.insert(bytes.end(), flat.asBytes().begin(), flat.asBytes().end());
  }
  size_t at = 0;
  for (const auto& words : expected) {
    auto reading = b_->tryReadMessage(nullptr, {}, nullptr);
    while (!reading.poll(scope_)) {
      ASSERT_LT(at, bytes.size());
      const size_t n = std::min<size_t>(1 + random() % 100, bytes.size() - at);
      ASSERT_EQ(::send(fd_[0], bytes.data() + at, n, 0), ssize_t(n));
      at += n;
    }
    auto message = reading.wait(scope_);
    const auto segment = KJ_ASSERT_NONNULL(message).reader->getSegment(0);
    ASSERT_EQ(segment.size(), words.size());
    ASSERT_TRUE(std::equal(segment.asBytes().begin(), segment.asBytes().end(),
                           reinterpret_cast<const kj::byte*>(words.data())));
  }
}

TEST_F(SocketStreamTest, EndOfStreamIsSeenWhetherItComesWithDataOrAlone) {
  auto reading = b_->tryReadMessage(nullptr, {}, nullptr);
  EXPECT_FALSE(reading.poll(scope_));
  const uint64_t message[2] = {uint64_t{1} << 32, 42};  // one segment of one word, little-endian
  ASSERT_EQ(::send(fd_[0], message, sizeof(message), 0), ssize_t(sizeof(message)));
  CloseA();
  EXPECT_TRUE(reading.wait(scope_) != nullptr);
  EXPECT_TRUE(b_->tryReadMessage(nullptr, {}, nullptr).wait(scope_) == nullptr);
}

TEST_F(SocketStreamTest, TheEndInsideAMessageIsADisconnection) {
  const uint64_t half = uint64_t{5} << 32;
  ASSERT_EQ(::send(fd_[0], &half, sizeof(half), 0), ssize_t(sizeof(half)));
  CloseA();
  auto failure = kj::runCatchingExceptions([&] { (void)b_->tryReadMessage(nullptr, {}, nullptr).wait(scope_); });
  EXPECT_EQ(KJ_ASSERT_NONNULL(failure).getType(), kj::Exception::Type::DISCONNECTED);
}

TEST_F(SocketStreamTest, HostileTablesAreRefusedBeforeMemoryIsTaken) {
  const uint32_t tables[][2] = {{0xffffffffu, 1}, {600, 1}, {0, 0xffffffffu}, {0, 1u << 24}};
  for (const auto& table : tables) {
    int pair[2];
    KJ_SYSCALL(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, pair));
    kj::AutoCloseFd one(pair[0]), two(pair[1]), again(::fcntl(pair[1], F_DUPFD_CLOEXEC, 0));
    SocketStream stream(port_, two, again);
    ASSERT_EQ(::send(one, table, sizeof(table), 0), ssize_t(sizeof(table)));
    EXPECT_TRUE(kj::runCatchingExceptions([&] { (void)stream.tryReadMessage(nullptr, {}, nullptr).wait(scope_); }) !=
                nullptr);
  }
}

TEST_F(SocketStreamTest, AWriterWhosePeerDoesNotReadWaitsAndGoesOn) {
  std::mt19937 random(3);
  const auto words = Words(1 << 20, random);  // 8 MiB: more than a socket holds
  kj::ArrayPtr<const capnp::word> segment(words.data(), words.size());
  auto writing = a_->writeMessage(nullptr, kj::arrayPtr(&segment, 1));
  EXPECT_FALSE(writing.poll(scope_));
  const capnp::word small[1] = {};
  kj::ArrayPtr<const capnp::word> small_segment(small, 1);
  auto later = a_->writeMessage(nullptr, kj::arrayPtr(&small_segment, 1));
  auto first = b_->tryReadMessage(nullptr, {}, nullptr).wait(scope_);
  const auto got = KJ_ASSERT_NONNULL(first).reader->getSegment(0);
  EXPECT_EQ(0, memcmp(got.begin(), words.data(), got.asBytes().size()));
  writing.wait(scope_);
  later.wait(scope_);
  auto second = b_->tryReadMessage(nullptr, {}, nullptr).wait(scope_);
  EXPECT_EQ(KJ_ASSERT_NONNULL(second).reader->getSegment(0).size(), 1u);
}

TEST_F(SocketStreamTest, WritesNoMoreInOneTurnThanItsOwnerSays) {
  constexpr size_t kTurn = 40000;  // less than a socket holds
  a_.reset();
  a_.emplace(port_, fd_[0], write_fd_[0], nullptr, nullptr, kTurn);
  std::mt19937 random(4);
  const auto words = Words(1 << 17, random);  // 1 MiB
  kj::ArrayPtr<const capnp::word> segment(words.data(), words.size());
  auto writing = a_->writeMessage(nullptr, kj::arrayPtr(&segment, 1));
  std::vector<uint8_t> taken(1 << 20);
  ssize_t at = ::recv(fd_[1], taken.data(), taken.size(), MSG_DONTWAIT);
  EXPECT_EQ(at, ssize_t{kTurn});
  while (!writing.poll(scope_)) at += ::recv(fd_[1], taken.data(), taken.size(), MSG_DONTWAIT);
  at += ::recv(fd_[1], taken.data(), taken.size(), MSG_DONTWAIT);
  EXPECT_EQ(size_t(at), sizeof(capnp::word) * (1 + words.size()));
}

TEST_F(SocketStreamTest, WritingToAClosedPeerFailsAsDisconnected) {
  b_.reset();
  fd_[1] = nullptr;
  write_fd_[1] = nullptr;
  std::mt19937 random(5);
  const auto words = Words(1 << 16, random);
  kj::ArrayPtr<const capnp::word> segment(words.data(), words.size());
  auto failure = kj::runCatchingExceptions([&] { a_->writeMessage(nullptr, kj::arrayPtr(&segment, 1)).wait(scope_); });
  EXPECT_EQ(KJ_ASSERT_NONNULL(failure).getType(), kj::Exception::Type::DISCONNECTED);
}

/// The same with TLS between them.
class TlsSocketStreamTest : public SocketStreamTest {
 protected:
  ~TlsSocketStreamTest() noexcept override {
    a_.reset();
    b_.reset();
  }
  TlsSocketStreamTest() {
    testing::TestAuthority authority;
    tls_[0].emplace(testing::DialContext({}, authority.certificate()), fd_[0], "localhost");
    tls_[1].emplace(testing::AcceptContext(authority.Daemon(), ""), fd_[1]);
    for (bool done = false; !done;) {
      done = true;
      for (auto& tls : tls_) done &= tls->Handshake() == TlsLink::Step::kDone;
    }
    a_.emplace(port_, fd_[0], write_fd_[0], nullptr, &*tls_[0]);
    b_.emplace(port_, fd_[1], write_fd_[1], nullptr, &*tls_[1]);
  }

  std::optional<TlsLink> tls_[2];
};

TEST_F(TlsSocketStreamTest, AnyMixOfMessagesArrivesWholeAndInOrderBothWays) {
  std::mt19937 random(13);
  const size_t sizes[] = {0, 1, 60, 500, 2040, 2048, 4000, 9000, 300000, 600000};
  for (const bool forth : {true, false}) {
    SocketStream &from = forth ? *a_ : *b_, &to = forth ? *b_ : *a_;
    std::deque<Segments> sent;
    std::deque<std::vector<kj::ArrayPtr<const capnp::word>>> views;
    kj::Promise<void> writing = kj::READY_NOW;
    for (int i = 0; i < 150; ++i) {
      Segments& segments = sent.emplace_back();
      auto& view = views.emplace_back();
      for (int s = 1 + int(random() % 4); s > 0; --s) {
        segments.push_back(Words(sizes[random() % (i % 10 == 0 ? std::size(sizes) : 7)], random));
      }
      for (const auto& segment : segments) view.emplace_back(segment.data(), segment.size());
      writing =
          writing.then([&from, &view] { return from.writeMessage(nullptr, kj::arrayPtr(view.data(), view.size())); });
    }
    auto written = writing.eagerlyEvaluate([](kj::Exception&& e) { ADD_FAILURE() << e.getDescription().cStr(); });
    for (const Segments& segments : sent) {
      auto maybe = to.tryReadMessage(nullptr, {}, nullptr).wait(scope_);
      auto& got = KJ_ASSERT_NONNULL(maybe);
      for (size_t s = 0; s < segments.size(); ++s) {
        const auto segment = got.reader->getSegment(uint(s));
        ASSERT_EQ(segment.size(), segments[s].size());
        ASSERT_EQ(memcmp(segment.begin(), segments[s].data(), segment.asBytes().size()), 0);
      }
    }
    written.wait(scope_);
  }
  a_->end().wait(scope_);
  EXPECT_TRUE(b_->tryReadMessage(nullptr, {}, nullptr).wait(scope_) == nullptr);
}

// Whoever can cut the connection makes neither a short message whole, nor an announced end.
TEST_F(TlsSocketStreamTest, BeingCutOffInAMessageIsADisconnection) {
  std::mt19937 random(3);
  const auto words = Words(100, random);
  kj::ArrayPtr<const capnp::word> segment(words.data(), words.size());
  const auto flat = capnp::messageToFlatArray(kj::arrayPtr(&segment, 1));
  ASSERT_EQ(tls_[0]->Write(flat.begin(), 400), 400);
  ::shutdown(fd_[0], SHUT_WR);
  const auto failure = kj::runCatchingExceptions([&] { b_->tryReadMessage(nullptr, {}, nullptr).wait(scope_); });
  EXPECT_EQ(KJ_ASSERT_NONNULL(failure).getType(), kj::Exception::Type::DISCONNECTED);
}

TEST_F(TlsSocketStreamTest, BeingCutOffBetweenMessagesIsADisconnection) {
  ::shutdown(fd_[0], SHUT_WR);
  const auto failure = kj::runCatchingExceptions([&] { b_->tryReadMessage(nullptr, {}, nullptr).wait(scope_); });
  EXPECT_EQ(KJ_ASSERT_NONNULL(failure).getType(), kj::Exception::Type::DISCONNECTED);
}

TEST_F(SocketStreamTest, RecordsOfTlsAreRecognised) {
  const kj::byte alert[] = {21, 3, 1, 0, 2, 2, 70, 0};
  ASSERT_EQ(::write(fd_[0], alert, sizeof alert), ssize_t(sizeof alert));
  EXPECT_FALSE(b_->other_speaks_tls());
  const auto failure = kj::runCatchingExceptions([&] { b_->tryReadMessage(nullptr, {}, nullptr).wait(scope_); });
  EXPECT_EQ(KJ_ASSERT_NONNULL(failure).getType(), kj::Exception::Type::FAILED);
  EXPECT_TRUE(b_->other_speaks_tls());
}

}  // namespace
}  // namespace kvmanager
