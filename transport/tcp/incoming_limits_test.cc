// The limits of hand-offs that are received at once: who holds a place without using it gives way, and no host has all.
#include <poll.h>

#include <thread>

#include "transport/tcp/test_util.h"

namespace kvmanager::tcp {
namespace {

constexpr int64_t kIdleMs = 300;

class IncomingLimitsTest : public testing::Test {
 protected:
  void Listen(size_t incoming_max, int64_t idle_ms = kIdleMs) {
    TcpTransport::Options options;
    options.listen = "127.0.0.1:0";
    options.receiver = &receiver_;
    options.metrics = &metrics_;
    options.incoming_max = incoming_max;
    options.idle_ms = idle_ms;
    auto made = TcpTransport::Create(options);
    ASSERT_TRUE(made.ok()) << made.status();
    transport_ = *std::move(made);
  }
  /// The control connection of an offer.
  RawSocket Offer(uint8_t from = 1) {
    RawSocket control = RawSocket::Connect(transport_->listen_address(), from);
    token_ = kToken;
    token_[0] = static_cast<uint8_t>(++offers_);
    control.Write(OfferOf(pages_, token_));
    control.Expect<HelloFrame>();
    return control;
  }
  RawSocket Open(uint8_t from = 1) {
    RawSocket control = Offer(from);
    control.Expect<AcceptFrame>();
    return control;
  }
  /// PINGs on all of them for so long.
  static void PingFor(std::vector<RawSocket*> controls, int64_t ms) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(ms);
    while (std::chrono::steady_clock::now() < until) {
      for (RawSocket* control : controls) EXPECT_TRUE(control->Write(EncodeEmpty(FrameType::kPing)));
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
  }

  const std::vector<Page> pages_ = RandomPages({1000, 1000}, 3);
  Metrics metrics_text_;
  TransportMetrics metrics_{&metrics_text_};
  TestReceiver receiver_;
  std::unique_ptr<TcpTransport> transport_;
  Token token_ = {};  // of the newest offer
  int offers_ = 0;
};

TEST_F(IncomingLimitsTest, OneHostHasHalf) {
  Listen(5, 60000);
  std::vector<RawSocket> held;
  for (int i = 0; i < 3; ++i) held.push_back(Open());
  const absl::Status refused = Offer().Expect<ErrorFrame>().status;
  EXPECT_TRUE(absl::IsResourceExhausted(refused)) << refused;
  EXPECT_EQ(DetailOf(refused).field, "hand-offs being received of one host");
  EXPECT_EQ(DetailOf(refused).bound, "at most 3");
  for (int i = 0; i < 2; ++i) held.push_back(Open(2));
  const absl::Status full = Offer(3).Expect<ErrorFrame>().status;
  EXPECT_EQ(DetailOf(full).field, "hand-offs being received");
  EXPECT_EQ(metrics_.connections_refused.Value(), 2);
  // A place that is given back is another's.
  held[4].Write(EncodeEmpty(FrameType::kCancel));
  receiver_.WaitForAborts(1);
  Open(3);
}

TEST_F(IncomingLimitsTest, PingsKeepNoPlaceThatOthersNeed) {
  Listen(2);
  RawSocket stranger = Open(), second = Open(2);
  EXPECT_TRUE(absl::IsResourceExhausted(Offer(3).Expect<ErrorFrame>().status));  // it may still bring pages
  PingFor({&stranger, &second}, kIdleMs + 50);
  EXPECT_EQ(receiver_.aborts(), 0u);  // while nobody else comes
  Open(3);
  const absl::Status why = stranger.Expect<ErrorFrame>().status;  // idle for longest
  EXPECT_TRUE(absl::IsDeadlineExceeded(why)) << why;
  EXPECT_NE(why.message().find("without a page"), std::string::npos) << why;
  receiver_.WaitForAborts(1);
  // The other gives way in its turn, to an offer of its own host too.
  Open(2);
  EXPECT_TRUE(absl::IsDeadlineExceeded(second.Expect<ErrorFrame>().status));
}

TEST_F(IncomingLimitsTest, WhoSendsPagesStays) {
  Listen(1);
  RawSocket control = Open();
  RawSocket data = RawSocket::Connect(transport_->listen_address());
  data.Write(JoinOf(1, token_));
  data.Expect<HelloFrame>();
  data.Expect<JoinedFrame>();
  const std::string stream = PagesFrameOf(pages_, {0, 1});
  const size_t piece = 100;
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(2 * kIdleMs);
  for (size_t at = 0; at < stream.size() && std::chrono::steady_clock::now() < until; at += piece) {
    data.Write(stream.substr(at, piece));
    PingFor({&control}, kIdleMs / 8);
    EXPECT_TRUE(absl::IsResourceExhausted(Offer(2).Expect<ErrorFrame>().status));
  }
  EXPECT_EQ(receiver_.aborts(), 0u);
}

TEST_F(IncomingLimitsTest, PingsKeepNoMemoryThatOthersWaitFor) {
  Listen(8);
  receiver_.hold_offers = true;  // the receiver accepts when it is told to
  RawSocket idle = Offer();
  idle.Expect<WaitingFrame>();
  receiver_.ReleaseOffers();
  idle.Expect<AcceptFrame>();
  PingFor({&idle}, 2 * kIdleMs);
  EXPECT_EQ(receiver_.aborts(), 0u);
  RawSocket waiting = Offer(2);
  waiting.Expect<WaitingFrame>();
  EXPECT_TRUE(absl::IsDeadlineExceeded(idle.Expect<ErrorFrame>().status));
  receiver_.ReleaseOffers();
  waiting.Expect<AcceptFrame>();
  // Nobody waits any more.
  PingFor({&waiting}, 2 * kIdleMs);
  EXPECT_EQ(receiver_.aborts(), 1u);
}

}  // namespace
}  // namespace kvmanager::tcp
