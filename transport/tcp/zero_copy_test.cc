// What error queues say, played: ranges in any order, around 2^32, copied or not; and what a data connection makes of
// it.
#include "transport/tcp/zero_copy.h"

#include <linux/errqueue.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace kvmanager::tcp {
namespace {

/// A message of an error queue.
struct Said {
  explicit Said(sock_extended_err error, int level = SOL_IP, int type = IP_RECVERR, size_t bytes = sizeof(error)) {
    message.msg_control = control;
    message.msg_controllen = CMSG_SPACE(bytes);
    cmsghdr* const header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = level;
    header->cmsg_type = type;
    header->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(header), &error, std::min(bytes, sizeof(error)));
  }
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(sock_extended_err) + sizeof(sockaddr_in6))] = {};
  msghdr message = {};
};

sock_extended_err Completed(uint32_t first, uint32_t last, bool copied) {
  sock_extended_err error = {};
  error.ee_origin = SO_EE_ORIGIN_ZEROCOPY;
  error.ee_code = copied ? SO_EE_CODE_ZEROCOPY_COPIED : 0;
  error.ee_info = first;
  error.ee_data = last;
  return error;
}

TEST(ZeroCopyMessageTest, CompletionsOfBothProtocolsAndNothingElse) {
  for (const bool copied : {false, true}) {
    for (const auto& [level, type] : {std::pair(SOL_IP, IP_RECVERR), std::pair(SOL_IPV6, IPV6_RECVERR)}) {
      const auto said = ZeroCopy::ParseCompletion(Said(Completed(4294967295u, 7, copied), level, type).message);
      ASSERT_TRUE(said.has_value());
      EXPECT_EQ(said->first, 4294967295u);
      EXPECT_EQ(said->last, 7u);
      EXPECT_EQ(said->copied, copied);
    }
  }
  sock_extended_err icmp = Completed(1, 2, false), failed = Completed(1, 2, false);
  icmp.ee_origin = SO_EE_ORIGIN_ICMP;
  failed.ee_errno = ECONNREFUSED;
  EXPECT_FALSE(ZeroCopy::ParseCompletion(Said(icmp).message).has_value());
  EXPECT_FALSE(ZeroCopy::ParseCompletion(Said(failed).message).has_value());
  EXPECT_FALSE(ZeroCopy::ParseCompletion(Said(Completed(1, 2, false), SOL_SOCKET, IP_RECVERR).message).has_value());
  EXPECT_FALSE(ZeroCopy::ParseCompletion(Said(Completed(1, 2, false), SOL_IP, IP_TTL).message).has_value());
  EXPECT_FALSE(
      ZeroCopy::ParseCompletion(Said(Completed(1, 2, false), SOL_IP, IP_RECVERR, sizeof(sock_extended_err) - 1).message)
          .has_value());
  EXPECT_FALSE(ZeroCopy::ParseCompletion(msghdr{}).has_value());
}

class ZeroCopyTest : public testing::Test {
 protected:
  ZeroCopyTest() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {}
  ~ZeroCopyTest() override { ::close(fd_); }
  ZeroCopy Make(ZeroCopyUse use, uint32_t first_write = 0) {
    ZeroCopy made(use, metrics_.zero_copy, first_write);
    made.Enable(fd_);
    return made;
  }
  /// Writes one, which the kernel then is through with.
  static void WriteOne(ZeroCopy& zero_copy, uint32_t number, bool copied) {
    ASSERT_GE(zero_copy.allowed(), 1u) << number;
    zero_copy.OnWritten({1000}, 0);
    ASSERT_FALSE(zero_copy.idle());
    zero_copy.OnCompleted({number, number, copied});
    ASSERT_TRUE(zero_copy.idle());
  }

  int fd_;
  Metrics registry_;
  TransportMetrics metrics_{&registry_};
};

TEST_F(ZeroCopyTest, OffUntilItIsAskedForAndTheKernelHasIt) {
  ZeroCopy not_asked(ZeroCopyUse::kWhereItPays, metrics_.zero_copy);
  EXPECT_EQ(not_asked.allowed(), 0u);
  EXPECT_EQ(Make(ZeroCopyUse::kNever).allowed(), 0u);
  int ends[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  ZeroCopy of_unix_socket(ZeroCopyUse::kAlways, metrics_.zero_copy);
  of_unix_socket.Enable(ends[0]);
  EXPECT_EQ(of_unix_socket.allowed(), 0u);
  for (const int end : ends) ::close(end);
}

TEST_F(ZeroCopyTest, OneAtATimeUntilOneIsNotCopied) {
  ZeroCopy zero_copy = Make(ZeroCopyUse::kWhereItPays);
  EXPECT_EQ(zero_copy.allowed(), 1u);
  zero_copy.OnWritten({5}, 0);
  EXPECT_EQ(zero_copy.allowed(), 0u);
  zero_copy.OnCompleted({0, 0, true});
  EXPECT_EQ(zero_copy.allowed(), 1u);
  zero_copy.OnWritten({7}, 0);
  zero_copy.OnCompleted({1, 1, false});
  EXPECT_EQ(zero_copy.allowed(), ZeroCopy::kOutstandingMax);
  zero_copy.OnWritten(std::vector<uint32_t>(ZeroCopy::kOutstandingMax - 1, 1), 0);
  EXPECT_EQ(zero_copy.allowed(), 1u);
  zero_copy.OnWritten({1}, 0);
  EXPECT_EQ(zero_copy.allowed(), 0u);
  EXPECT_EQ(metrics_.zero_copy.copied.Value(), 5);
  EXPECT_EQ(metrics_.zero_copy.sent.Value(), 7);
}

TEST_F(ZeroCopyTest, GivenUpWhereTheKernelCopies) {
  ZeroCopy zero_copy = Make(ZeroCopyUse::kWhereItPays);
  for (uint32_t i = 0; i < ZeroCopy::kCopiedMax; ++i) WriteOne(zero_copy, i, /*copied=*/true);
  EXPECT_EQ(zero_copy.allowed(), 0u);
  EXPECT_EQ(metrics_.zero_copy.copied.Value(), 1000 * ZeroCopy::kCopiedMax);
}

TEST_F(ZeroCopyTest, GivenUpWhereTheKernelBeginsToCopy) {
  // Somebody listens on the device, or the route has changed. Not for a few among many.
  ZeroCopy zero_copy = Make(ZeroCopyUse::kWhereItPays);
  uint32_t number = 0;
  for (int round = 0; round < 10; ++round) {
    WriteOne(zero_copy, number++, /*copied=*/false);
    for (int i = 0; i + 1 < ZeroCopy::kCopiedMax; ++i) WriteOne(zero_copy, number++, /*copied=*/true);
  }
  EXPECT_EQ(zero_copy.allowed(), ZeroCopy::kOutstandingMax);
  WriteOne(zero_copy, number++, /*copied=*/true);
  EXPECT_EQ(zero_copy.allowed(), 0u);
  zero_copy.OnWritten({}, 0);
  EXPECT_TRUE(zero_copy.idle());
}

TEST_F(ZeroCopyTest, KeptWhereTheKernelCopiesIfAsked) {
  ZeroCopy always = Make(ZeroCopyUse::kAlways);
  for (uint32_t i = 0; i < 100; ++i) WriteOne(always, i, /*copied=*/true);
  EXPECT_EQ(always.allowed(), ZeroCopy::kOutstandingMax);
}

TEST_F(ZeroCopyTest, RangesInAnyOrderAround2To32) {
  std::mt19937_64 random(1);
  for (const uint32_t begin : {0u, 4294967280u, 2147483600u}) {
    for (int round = 0; round < 300; ++round) {
      ZeroCopy zero_copy = Make(ZeroCopyUse::kAlways, begin);
      const double sent_before = metrics_.zero_copy.sent.Value(), copied_before = metrics_.zero_copy.copied.Value();
      double sent = 0, copied = 0;
      uint32_t next = begin;
      std::vector<ZeroCopy::Completion> under_way;
      for (int step = 0; step < 40; ++step) {
        // Some writes, which are going to be told of in ranges.
        std::vector<uint32_t> sizes(random() % 9);
        for (uint32_t& size : sizes) size = 1 + random() % 300000;
        zero_copy.OnWritten(sizes, 0);
        for (size_t at = 0; at < sizes.size();) {
          const size_t end = at + 1 + random() % (sizes.size() - at);
          under_way.push_back({next, static_cast<uint32_t>(next + (end - at) - 1), random() % 2 == 0});
          next += static_cast<uint32_t>(end - at);
          for (; at < end; ++at) (under_way.back().copied ? copied : sent) += sizes[at];
        }
        std::shuffle(under_way.begin(), under_way.end(), random);
        for (size_t n = random() % (under_way.size() + 1); n > 0; --n) {
          zero_copy.OnCompleted(under_way.back());
          if (random() % 4 == 0) zero_copy.OnCompleted(under_way.back());  // once more: nothing
          under_way.pop_back();
        }
        ASSERT_EQ(zero_copy.idle(), under_way.empty());
      }
      for (const ZeroCopy::Completion& left : under_way) zero_copy.OnCompleted(left);
      ASSERT_TRUE(zero_copy.idle());
      ASSERT_EQ(metrics_.zero_copy.sent.Value() - sent_before, sent);
      ASSERT_EQ(metrics_.zero_copy.copied.Value() - copied_before, copied);
    }
  }
}

TEST_F(ZeroCopyTest, RangesOfOtherWritesSayNothing) {
  ZeroCopy zero_copy = Make(ZeroCopyUse::kAlways, 10);
  zero_copy.OnWritten({1, 2, 3}, 0);
  for (const auto& [first, last] :
       {std::pair(9u, 9u), std::pair(9u, 12u), std::pair(12u, 13u), std::pair(13u, 13u), std::pair(0u, 4294967295u),
        std::pair(11u, 10u), std::pair(10u, 9u), std::pair(2147483658u, 2147483658u)}) {
    zero_copy.OnCompleted({first, last, false});
    EXPECT_EQ(metrics_.zero_copy.sent.Value(), 0) << first << ".." << last;
  }
  zero_copy.OnCompleted({11, 11, false});
  EXPECT_EQ(metrics_.zero_copy.sent.Value(), 2);
  EXPECT_FALSE(zero_copy.idle());
  zero_copy.GiveUp();
  EXPECT_TRUE(zero_copy.idle());
  EXPECT_EQ(metrics_.zero_copy.unconfirmed.Value(), 1 + 3);
}

}  // namespace
}  // namespace kvmanager::tcp
