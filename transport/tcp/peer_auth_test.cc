// Transports with a key, without one, with another, and strangers: who gets to say a frame.
#include <thread>

#include "transport/tcp/peer_key.h"
#include "transport/tcp/test_util.h"

namespace kvmanager::tcp {
namespace {

const std::string kKey(32, 'k'), kOther(32, 'o');

class PeerAuthTest : public testing::Test {
 protected:
  void SetUp() override { Listen(kKey); }
  void Listen(const std::string& key) {
    TcpTransport::Options options;
    options.listen = "127.0.0.1:0";
    options.receiver = &receiver_;
    options.metrics = &metrics_;
    options.peer_key = key;
    receiving_ = Make(options);
  }
  static std::unique_ptr<TcpTransport> Make(const TcpTransport::Options& options) {
    auto made = TcpTransport::Create(options);
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? *std::move(made) : nullptr;
  }
  std::unique_ptr<TcpTransport> Sender(const std::string& key) {
    TcpTransport::Options options;
    options.metrics = &sender_metrics_;
    options.peer_key = key;
    return Make(options);
  }
  absl::StatusOr<SendResult> Send(const std::string& key, const std::string& peer) {
    const auto sender = Sender(key);
    return SendAll(*sender, RequestOf(pages_, peer), PagesOf(pages_)).done.get();
  }
  std::string address() const { return receiving_->listen_address(); }
  double failures() { return metrics_.received.authentication_failures.Value(); }
  double sender_failures() { return sender_metrics_.sent.authentication_failures.Value(); }
  void WaitForFailures(double n) {
    while (failures() < n) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  /// A connection that has proved the key.
  RawSocket Prove(uint8_t from = 1) {
    RawSocket socket = RawSocket::Connect(address(), from);
    AuthExchange exchange(kKey, AuthRole::kDialer);
    socket.Write(exchange.Begin());
    while (exchange.wants() > 0) {
      const std::string bytes = socket.Read(exchange.wants());
      if (bytes.size() < exchange.wants()) break;
      const auto next = exchange.Read(RawSocket::Span(bytes));
      EXPECT_TRUE(next.ok()) << next.status();
      if (!next.ok()) break;
      socket.Write(*next);
    }
    EXPECT_EQ(exchange.wants(), 0u);
    return socket;
  }

  const std::vector<Page> pages_ = RandomPages({100000, 7, 300000, 64, 90001, 1 << 20}, 5);
  Metrics metrics_text_, sender_metrics_text_;
  TransportMetrics metrics_{&metrics_text_}, sender_metrics_{&sender_metrics_text_};
  TestReceiver receiver_;
  std::unique_ptr<TcpTransport> receiving_;
};

TEST_F(PeerAuthTest, TheSameKeyHandsOffAndProbes) {
  const auto result = Send(kKey, address());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(receiver_.newest() == pages_);
  const auto sender = Sender(kKey);
  std::promise<absl::StatusOr<ReceiverLoad>> load;
  sender->Probe(address(), [&](absl::StatusOr<ReceiverLoad> got) { load.set_value(std::move(got)); });
  const auto got = load.get_future().get();
  ASSERT_TRUE(got.ok()) << got.status();
  EXPECT_EQ(got->free_bytes, 600u);
  EXPECT_EQ(failures() + sender_failures(), 0);
  EXPECT_EQ(metrics_.protocol_errors.Value(), 0);
}

TEST_F(PeerAuthTest, WithoutAKeyTheWireIsAsBefore) {
  Listen("");
  ASSERT_TRUE(Send("", address()).ok());
  RawSocket socket = RawSocket::Connect(address());
  EXPECT_EQ(socket.Read(kHelloBytes), EncodeHello({}));  // at once
}

TEST_F(PeerAuthTest, AnotherKeyIsRefusedOnBothSides) {
  const auto result = Send(kOther, address());
  EXPECT_TRUE(absl::IsUnauthenticated(result.status())) << result.status();
  EXPECT_NE(result.status().message().find("did not prove the key"), std::string::npos) << result.status();
  WaitForFailures(1);
  EXPECT_EQ(sender_failures(), 1);
  EXPECT_EQ(receiver_.offers(), 0u);
}

TEST_F(PeerAuthTest, ADialerWithoutAKeyIsToldThatOneIsWanted) {
  const auto result = Send("", address());
  EXPECT_TRUE(absl::IsUnauthenticated(result.status())) << result.status();
  EXPECT_NE(result.status().message().find("the peer wants a key: start this daemon with --peer-key FILE"),
            std::string::npos)
      << result.status();
  WaitForFailures(1);
  EXPECT_EQ(sender_failures(), 1);
  EXPECT_EQ(receiver_.offers(), 0u);
  EXPECT_TRUE(Send(kKey, address()).ok());  // it serves on
}

TEST_F(PeerAuthTest, ADialerWithAKeyOffersNothingToAPeerWithoutOne) {
  Listen("");
  const auto result = Send(kKey, address());
  EXPECT_TRUE(absl::IsUnauthenticated(result.status())) << result.status();
  EXPECT_NE(result.status().message().find("the peer has no key: start it with --peer-key FILE"), std::string::npos)
      << result.status();
  EXPECT_EQ(receiver_.offers(), 0u);
  EXPECT_EQ(sender_failures(), 1);
}

// Of whoever plays a receiver, the dialer reads an answer at most; it says a challenge and not a byte more.
TEST_F(PeerAuthTest, APlayedReceiverGetsAChallengeAndNoOffer) {
  const auto sender = Sender(kKey);
  for (int play = 0; play < 4; ++play) {
    RawSocket listener = RawSocket::Listen();
    Outcome outcome = SendAll(*sender, RequestOf(pages_, listener.address()), PagesOf(pages_));
    RawSocket played = listener.Accept();
    const std::string challenge = played.Read(kChallengeBytes);
    ASSERT_EQ(challenge.size(), kChallengeBytes);
    Nonce nonce;
    std::copy_n(challenge.begin() + kAuthHeadBytes, kNonceBytes, nonce.begin());
    if (play == 0) played.Write(EncodeHello({}));
    if (play == 1) played.Write(challenge + challenge.substr(kAuthHeadBytes));  // sent back
    if (play == 2) {  // what the receiver proves to whoever asks with the same nonce is for another nonce of its own
      RawSocket relay = RawSocket::Connect(address());
      relay.Write(challenge);
      const std::string answer = relay.Read(kAnswerBytes);
      played.Write(challenge + answer.substr(kChallengeBytes));
    }
    if (play == 3) played.Write(std::string(4096, 'x'));
    EXPECT_EQ(played.ReadToEnd(), "") << play;
    EXPECT_TRUE(absl::IsUnauthenticated(outcome.done.get().status())) << play;
  }
  EXPECT_EQ(sender_failures(), 4);
  EXPECT_EQ(receiver_.offers(), 0u);
}

TEST_F(PeerAuthTest, NoFrameOfAStrangerIsRead) {
  const Token open = kToken;
  RawSocket honest = Prove();
  honest.Write(OfferOf(pages_, open));
  honest.Expect<HelloFrame>();
  honest.Expect<AcceptFrame>();
  ASSERT_EQ(receiver_.offers(), 1u);
  Token other = kToken;
  other[0] ^= 1;
  int strangers = 0;
  for (const std::string& said :
       {OfferOf(pages_, other), JoinOf(1, open), JoinOf(0, open), DataStreamOf(pages_),
        EncodeHello({}) + EncodeEmpty(FrameType::kProbe), EncodeHello({}) + EncodeEmpty(FrameType::kPing),
        std::string(100000, 'x'), EncodeChallenge({}) + std::string(kProofBytes, 'x') + OfferOf(pages_, other)}) {
    RawSocket stranger = RawSocket::Connect(address());
    stranger.Write(said);
    std::string heard = stranger.ReadToEnd();
    if (IsAuthMagic(RawSocket::Span(said))) heard.erase(0, kAnswerBytes);
    // Beyond what is read after a refusal, a reset may overtake it.
    if (said.size() < kAuthDrainBytes) {
      EXPECT_EQ(heard, EncodeRefusal()) << strangers;
    }
    stranger.Close();
    WaitForFailures(++strangers);
  }
  EXPECT_EQ(receiver_.offers(), 1u);
  EXPECT_EQ(receiver_.arrivals().size(), 0u);
  EXPECT_EQ(metrics_.protocol_errors.Value(), 0);
  // The honest hand-off goes on, on a data connection that has proved the key too.
  RawSocket data = Prove();
  data.Write(DataStreamOf(pages_));
  receiver_.WaitForArrivals(pages_.size());
}

TEST_F(PeerAuthTest, WhoIsSlowIsLetGoAfterTheDeadline) {
  const auto begun = std::chrono::steady_clock::now();
  RawSocket silent = RawSocket::Connect(address()), half = RawSocket::Connect(address()),
            unproven = RawSocket::Connect(address());
  half.Write(EncodeChallenge({}).substr(0, kChallengeBytes - 1));
  unproven.Write(EncodeChallenge({}));
  EXPECT_EQ(silent.ReadToEnd(), "");
  EXPECT_EQ(half.ReadToEnd(), "");
  EXPECT_EQ(unproven.ReadToEnd().size(), kAnswerBytes);
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begun).count();
  EXPECT_GE(ms, kAuthMs - 100);
  EXPECT_LT(ms, kAuthMs + 8000);
  WaitForFailures(3);
}

TEST_F(PeerAuthTest, StrangersTakeABoundedShare) {
  std::vector<RawSocket> silent;
  for (size_t i = 0; i < kAuthenticatingOfHostMax; ++i) silent.push_back(RawSocket::Connect(address()));
  RawSocket one_more = RawSocket::Connect(address());
  EXPECT_EQ(one_more.ReadToEnd(), "");
  EXPECT_GE(metrics_.connections_refused.Value(), 1);
  // Another host has its share.
  RawSocket honest = Prove(2);
  honest.Write(OfferOf(pages_));
  honest.Expect<HelloFrame>();
  honest.Expect<AcceptFrame>();
  for (size_t i = 0; i < kAuthenticatingMax - kAuthenticatingOfHostMax; ++i) {
    silent.push_back(RawSocket::Connect(address(), 3));
  }
  RawSocket of_a_third = RawSocket::Connect(address(), 4);
  EXPECT_EQ(of_a_third.ReadToEnd(), "");
  // All of them are gone after the deadline.
  WaitForFailures(static_cast<double>(kAuthenticatingMax));
  EXPECT_TRUE(Send(kKey, address()).ok());
}

TEST_F(PeerAuthTest, EndsWithConnectionsInTheExchange) {
  RawSocket silent = RawSocket::Connect(address()), unproven = RawSocket::Connect(address());
  unproven.Write(EncodeChallenge({}));
  EXPECT_EQ(unproven.Read(kAnswerBytes).size(), kAnswerBytes);
  RawSocket listener = RawSocket::Listen();
  auto sender = Sender(kKey);
  Outcome outcome = SendAll(*sender, RequestOf(pages_, listener.address()), PagesOf(pages_));
  RawSocket played = listener.Accept();
  EXPECT_EQ(played.Read(kChallengeBytes).size(), kChallengeBytes);
  receiving_.reset();
  sender.reset();
  EXPECT_EQ(silent.ReadToEnd(), "");
  EXPECT_EQ(unproven.ReadToEnd(), "");
  EXPECT_EQ(played.ReadToEnd(), "");
  EXPECT_TRUE(absl::IsCancelled(outcome.done.get().status()));
}

TEST_F(PeerAuthTest, AKeyHasItsLengths) {
  for (const size_t bytes : {size_t{1}, kPeerKeyBytesMin - 1, kPeerKeyBytesMax + 1}) {
    TcpTransport::Options options;
    options.metrics = &sender_metrics_;
    options.peer_key = std::string(bytes, 'k');
    EXPECT_TRUE(absl::IsInvalidArgument(TcpTransport::Create(options).status())) << bytes;
  }
}

}  // namespace
}  // namespace kvmanager::tcp
