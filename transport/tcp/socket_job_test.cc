#include "transport/tcp/socket_job.h"

#include <sys/socket.h>
#include <unistd.h>

#include <future>
#include <memory>
#include <random>

#include "gtest/gtest.h"
#include "kvmanager/base/checksum.h"

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

}  // namespace
}  // namespace kvmanager::tcp
