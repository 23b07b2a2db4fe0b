#include "transport/tcp/socket_job.h"

#include <linux/capability.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <future>
#include <memory>
#include <random>

#include "gtest/gtest.h"
#include "kvmanager/base/checksum.h"
#include "transport/tcp/zero_copy.h"

namespace kvmanager::tcp {
namespace {

using Pieces = std::vector<std::vector<uint8_t>>;

class SocketJobTest : public testing::Test {
 protected:
  SocketJobTest() { EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends_), 0); }
  ~SocketJobTest() override {
    for (const int end : ends_) ::close(end);
  }
  Pieces RandomPieces(int count, size_t bytes_max) {
    Pieces pieces;
    for (int i = 0; i < count; ++i) {
      pieces.emplace_back(1 + random_() % bytes_max);
      for (uint8_t& byte : pieces.back()) byte = static_cast<uint8_t>(random_());
    }
    return pieces;
  }
  static void Fill(SocketJob& job, Pieces& pieces) {
    job.Clear();
    for (auto& piece : pieces) job.Add(piece.data(), piece.size());
  }
  /// Until what can be moved now has been.
  void Move(const std::shared_ptr<SocketJob>& job, uint64_t bytes_max) {
    std::promise<void> moved;
    SocketJob::Start(job, workers_, bytes_max, [&] { moved.set_value(); });
    moved.get_future().get();
    EXPECT_LE(job->bytes(), bytes_max);
  }

  std::mt19937_64 random_{1};
  int ends_[2];
  WorkerPool workers_{3};
};

TEST_F(SocketJobTest, MovesEverythingInAnyPortions) {
  const auto write = std::make_shared<SocketJob>(SocketJob::Way::kWrite, ends_[0]);
  const auto read = std::make_shared<SocketJob>(SocketJob::Way::kRead, ends_[1]);
  for (int round = 0; round < 30; ++round) {
    Pieces from = RandomPieces(1 + static_cast<int>(random_() % 200), round % 3 == 0 ? 3 : 20000), to;
    for (const auto& piece : from) to.emplace_back(piece.size());
    Fill(*write, from);
    Fill(*read, to);
    uint64_t written = 0, taken = 0;
    while (!read->complete()) {
      if (!write->complete()) {
        Move(write, 1 + random_() % 300000);
        written += write->bytes();
      }
      Move(read, random_() % 4 == 0 ? 1 + random_() % 1000 : UINT64_MAX);
      taken += read->bytes();
      ASSERT_EQ(write->error(), 0);
      ASSERT_EQ(read->error(), 0);
      ASSERT_LE(taken, written);
      for (size_t i = 0; i < read->whole(); ++i) ASSERT_EQ(to[i], from[i]);
    }
    for (size_t i = 0; i < from.size(); ++i) ASSERT_EQ(read->checksum(i), Checksum(from[i].data(), from[i].size()));
    // Nothing is left: the next read finds nothing, and that is no error.
    std::vector<uint8_t> more(1);
    read->Clear();
    read->Add(more.data(), 1);
    Move(read, UINT64_MAX);
    EXPECT_EQ(read->bytes(), 0u);
    EXPECT_EQ(read->error(), 0);
  }
}

TEST_F(SocketJobTest, AnEndComesBehindTheBytesBeforeIt) {
  Pieces from = RandomPieces(3, 100), to;
  for (const auto& piece : from) to.emplace_back(piece.size());
  to.emplace_back(10);
  const auto write = std::make_shared<SocketJob>(SocketJob::Way::kWrite, ends_[0]);
  Fill(*write, from);
  Move(write, UINT64_MAX);
  ::shutdown(ends_[0], SHUT_WR);
  const auto read = std::make_shared<SocketJob>(SocketJob::Way::kRead, ends_[1]);
  Fill(*read, to);
  Move(read, UINT64_MAX);
  EXPECT_EQ(read->whole(), 3u);
  EXPECT_FALSE(read->complete());
  EXPECT_EQ(read->error(), SocketJob::kEnd);
  ::shutdown(ends_[1], SHUT_RD);
  Fill(*write, from);
  Move(write, UINT64_MAX);
  EXPECT_EQ(write->error(), EPIPE);
}

TEST_F(SocketJobTest, AnAbandonedJobTouchesNothing) {
  Pieces from = RandomPieces(300, 5000);
  for (int round = 0; round < 200; ++round) {
    auto to = std::make_unique<std::vector<uint8_t>>(1 << 20);
    const auto write = std::make_shared<SocketJob>(SocketJob::Way::kWrite, ends_[0]);
    const auto read = std::make_shared<SocketJob>(SocketJob::Way::kRead, ends_[1]);
    Fill(*write, from);
    read->Add(to->data(), to->size());
    for (const auto& job : {write, read}) SocketJob::Start(job, workers_, UINT64_MAX, [] {});
    for (uint64_t spin = random_() % 3000; spin > 0; --spin) std::atomic_signal_fence(std::memory_order_seq_cst);
    write->Abandon();
    read->Abandon();
    to.reset();  // AddressSanitizer sees who still writes
  }
}

/// A connection over loopback that has SO_ZEROCOPY at its near end.
class ZeroCopyJobTest : public testing::Test {
 protected:
  ZeroCopyJobTest() : listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(listener_, any, size), 0);
    EXPECT_EQ(::listen(listener_, 1), 0);
    EXPECT_EQ(::getsockname(listener_, any, &size), 0);
    near_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_EQ(::connect(near_, any, size), 0);
    far_ = ::accept(listener_, nullptr, nullptr);
    EXPECT_GE(far_, 0);
    zero_copy_.Enable(near_);
  }
  ~ZeroCopyJobTest() override {
    for (const int fd : {listener_, near_, far_}) ::close(fd);
  }
  /// Writes all, with zero-copy allowed from the second piece on, and returns what has arrived.
  std::vector<uint8_t> Pass(WorkerPool& workers, const Pieces& pieces) {
    const auto write = std::make_shared<SocketJob>(SocketJob::Way::kWrite, near_);
    size_t bytes = 0;
    for (const auto& piece : pieces) {
      write->Add(piece.data(), piece.size());
      bytes += piece.size();
    }
    std::vector<uint8_t> got;
    std::vector<uint8_t> chunk(1 << 20);
    while (got.size() < bytes) {
      if (!write->complete()) {
        std::promise<void> moved;
        write->AllowZeroCopy(1, zero_copy_.allowed(), ZeroCopy::kPieceBytesMin);
        SocketJob::Start(write, workers, UINT64_MAX, [&] { moved.set_value(); });
        moved.get_future().get();
        EXPECT_EQ(write->error(), 0);
        zero_copy_.OnWritten(write->zero_copied(), write->zero_copy_refused_bytes());
        for (const uint32_t n : write->zero_copied()) zero_copied_ += n;
      }
      const ssize_t n = ::recv(far_, chunk.data(), chunk.size(), 0);
      if (n <= 0) break;
      got.insert(got.end(), chunk.begin(), chunk.begin() + n);
      zero_copy_.Read(near_);
    }
    return got;
  }
  static Pieces HeadAndPages(size_t pages, size_t page_bytes) {
    std::mt19937_64 random(5);
    Pieces pieces = {std::vector<uint8_t>(100)};
    pieces.resize(1 + pages, std::vector<uint8_t>(page_bytes));
    for (auto& piece : pieces) {
      for (uint8_t& byte : piece) byte = static_cast<uint8_t>(random());
    }
    return pieces;
  }
  static std::vector<uint8_t> Joined(const Pieces& pieces) {
    std::vector<uint8_t> all;
    for (const auto& piece : pieces) all.insert(all.end(), piece.begin(), piece.end());
    return all;
  }

  int listener_, near_ = -1, far_ = -1;
  Metrics registry_;
  TransportMetrics metrics_{&registry_};
  ZeroCopy zero_copy_{ZeroCopyUse::kAlways, metrics_.zero_copy};
  uint64_t zero_copied_ = 0;
};

TEST_F(ZeroCopyJobTest, PagesGoSoAndTheHeadDoesNot) {
  WorkerPool workers(2);
  const Pieces pieces = HeadAndPages(100, 48640);
  EXPECT_TRUE(Pass(workers, pieces) == Joined(pieces));
  EXPECT_GT(zero_copied_, 4000000u);
  EXPECT_LE(zero_copied_, 4864000u);
  // The receiver has all of it, so nothing is sent again once the connection is reset.
  const sockaddr none = {AF_UNSPEC, {}};
  EXPECT_EQ(::connect(near_, &none, sizeof(none)), 0);
  zero_copy_.Read(near_);
  EXPECT_TRUE(zero_copy_.idle());
  EXPECT_EQ(metrics_.zero_copy.sent.Value() + metrics_.zero_copy.copied.Value(), zero_copied_);
}

TEST_F(ZeroCopyJobTest, SmallPiecesAreWrittenPlainly) {
  WorkerPool workers(2);
  const Pieces pieces = HeadAndPages(1000, ZeroCopy::kPieceBytesMin / 2);
  EXPECT_TRUE(Pass(workers, pieces) == Joined(pieces));
  EXPECT_EQ(zero_copied_, 0u);
}

TEST_F(ZeroCopyJobTest, WhatTheKernelHasNoRoomForIsWrittenPlainly) {
  // A process that may pin nothing: threads have what the one that makes them has.
  __user_cap_header_struct who = {_LINUX_CAPABILITY_VERSION_3, 0};
  __user_cap_data_struct had[_LINUX_CAPABILITY_U32S_3], less[_LINUX_CAPABILITY_U32S_3];
  ASSERT_EQ(::syscall(SYS_capget, &who, had), 0);
  std::copy(std::begin(had), std::end(had), std::begin(less));
  less[CAP_TO_INDEX(CAP_IPC_LOCK)].effective &= ~CAP_TO_MASK(CAP_IPC_LOCK);
  rlimit limit, none;
  ASSERT_EQ(::getrlimit(RLIMIT_MEMLOCK, &limit), 0);
  none = {0, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &none), 0);
  ASSERT_EQ(::syscall(SYS_capset, &who, less), 0);
  {
    WorkerPool workers(2);
    const Pieces pieces = HeadAndPages(100, 48640);
    EXPECT_TRUE(Pass(workers, pieces) == Joined(pieces));
  }
  ASSERT_EQ(::syscall(SYS_capset, &who, had), 0);
  ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &limit), 0);
  EXPECT_EQ(zero_copied_, 0u);
  EXPECT_GT(metrics_.zero_copy.refused.Value(), 0);
  EXPECT_TRUE(zero_copy_.idle());
}

}  // namespace
}  // namespace kvmanager::tcp
