#include "gtest/gtest.h"
#include "transport/tcp/host_port.h"
#include "transport/tcp/peer_book.h"
#include "transport/tcp/rate_limit.h"

namespace kvmanager::tcp {
namespace {

TEST(HostPort, Parses) {
  const auto expect = [](const char* text, const char* host, int port) {
    const auto parsed = ParseHostPort("peer", text, true);
    ASSERT_TRUE(parsed.ok()) << text;
    EXPECT_EQ(parsed->host, host);
    EXPECT_EQ(parsed->port, port);
    EXPECT_EQ(FormatHostPort(parsed->host, parsed->port), text);
  };
  expect("127.0.0.1:0", "127.0.0.1", 0);
  expect("[::1]:65535", "::1", 65535);
  expect("decode-7.example:7000", "decode-7.example", 7000);
}

TEST(HostPort, RejectsNamingTheField) {
  for (const char* text : {"", ":", "host", "host:", ":1", "::1:7", "[::1]", "[]:1", "[::1:7", "host:65536", "host:-1",
                           "host:1x", "host: 1", "ho st:1", "host:000001"}) {
    const auto parsed = ParseHostPort("peer", text, true);
    ASSERT_FALSE(parsed.ok()) << text;
    EXPECT_NE(parsed.status().message().find("peer"), absl::string_view::npos);
  }
  EXPECT_FALSE(ParseHostPort("peer", std::string(300, 'a') + ":1", true).ok());
  EXPECT_FALSE(ParseHostPort("peer", "host:0", false).ok());
}

TEST(PeerBook, CountsByPeerAndDirection) {
  PeerBook book;
  book.Begin("a:1", false);
  book.Begin("a:1", true);
  EXPECT_EQ(book.List().size(), 2u);
  EXPECT_EQ(book.List()[0].active, 1u);
  book.End("a:1", false, absl::OkStatus(), 1000, 600, 0.5);
  book.Begin("a:1", false);
  book.End("a:1", false, absl::DataLossError("page 3"), 10, 0, 1);
  const PeerInfo info = book.List()[0];
  EXPECT_FALSE(info.incoming);
  EXPECT_EQ(info.active, 0u);
  EXPECT_EQ(info.transfers, 2u);
  EXPECT_EQ(info.failures, 1u);
  EXPECT_EQ(info.bytes, 1010u);
  EXPECT_EQ(info.bytes_per_s, 2000);
  EXPECT_NE(info.last_error.find("page 3"), std::string::npos);
}

TEST(PeerBook, DropsTheLeastRecentlyUsed) {
  PeerBook book;
  for (size_t i = 0; i < PeerBook::kPeersMax; ++i) book.Begin(std::to_string(i), true);
  book.Begin("0", true);
  book.Begin("new", true);
  const std::vector<PeerInfo> list = book.List();
  EXPECT_EQ(list.size(), PeerBook::kPeersMax);
  EXPECT_EQ(list[0].peer, "new");
  EXPECT_EQ(list[1].peer, "0");
  EXPECT_EQ(list.back().peer, "2");
  book.End("1", true, absl::OkStatus(), 0, 0, 0);  // dropped while active: begins anew, never below zero
  EXPECT_EQ(book.List()[0].active, 0u);
}

TEST(RateLimit, GrantsTheRateAndNoMoreThanItsBurst) {
  RateLimit limit(1000000);
  const int64_t second_ns = 1000000000;
  EXPECT_EQ(limit.Take(1 << 30, second_ns), 20000u);
  EXPECT_EQ(limit.Take(1, second_ns), 0u);
  EXPECT_EQ(limit.Take(1 << 30, second_ns + second_ns / 1000), 0u);  // a little of much is not worth a call
  EXPECT_EQ(limit.Take(700, second_ns + second_ns / 1000), 700u);    // all of a little is
  EXPECT_EQ(limit.Take(1 << 30, second_ns + 6 * second_ns / 1000), 5300u);
  limit.GiveBack(5200);
  EXPECT_EQ(limit.Take(1 << 30, second_ns + 6 * second_ns / 1000), 5200u);
  EXPECT_EQ(limit.Take(1 << 30, 9 * second_ns), 20000u);
  uint64_t total = 0;
  for (int ms = 1; ms <= 1000; ++ms) total += limit.Take(1 << 30, 9 * second_ns + ms * (second_ns / 1000));
  EXPECT_NEAR(static_cast<double>(total), 1e6, 5000);
}

TEST(RateLimit, ZeroIsNoLimit) {
  RateLimit limit(0);
  EXPECT_EQ(limit.Take(uint64_t{1} << 40, 0), uint64_t{1} << 40);
}

}  // namespace
}  // namespace kvmanager::tcp
