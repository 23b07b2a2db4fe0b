// Transports over mutual TLS, with strangers: who gets to say a frame, and that bytes arrive as they were sent.
#include "transport/tcp/tls_relay.h"

#include <poll.h>

#include <thread>

#include "absl/strings/match.h"
#include "kvmanager/base/tls_testing.h"
#include "transport/tcp/peer_key.h"
#include "transport/tcp/test_util.h"

namespace kvmanager::tcp {
namespace {

using kvmanager::testing::AcceptContext;
using kvmanager::testing::DialContext;
using kvmanager::testing::PeerContexts;
using kvmanager::testing::PemPair;
using kvmanager::testing::TestAuthority;

class TlsPeersTest : public ::testing::Test {
 protected:
  void SetUp() override {
    switch_.Set(PeerContexts(authority_.Daemon(), authority_.certificate()));
    Listen(&switch_);
  }
  void Listen(const TlsSwitch* tls, const std::string& key = "") {
    TcpTransport::Options options;
    options.listen = "127.0.0.1:0";
    options.receiver = &receiver_;
    options.metrics = &metrics_;
    options.tls = tls;
    options.peer_key = key;
    receiving_ = Make(options);
  }
  static std::unique_ptr<TcpTransport> Make(const TcpTransport::Options& options) {
    auto made = TcpTransport::Create(options);
    EXPECT_TRUE(made.ok()) << made.status();
    return made.ok() ? *std::move(made) : nullptr;
  }
  absl::StatusOr<SendResult> Send(const TlsSwitch* tls, const std::string& peer, const std::string& key = "") {
    TcpTransport::Options options;
    options.metrics = &sender_metrics_;
    options.tls = tls;
    options.peer_key = key;
    options.zero_copy = ZeroCopyUse::kAlways;  // where there is a TCP socket
    const auto sender = Make(options);
    return SendAll(*sender, RequestOf(pages_, peer), PagesOf(pages_)).done.get();
  }
  /// What a daemon with these certificates is told, and that the receiver counts it.
  void ExpectRefused(const TlsSwitch* tls, absl::StatusCode code, const std::string& words) {
    const double before = failures();
    const auto refused = Send(tls, address());
    EXPECT_EQ(refused.status().code(), code) << refused.status();
    EXPECT_TRUE(absl::StrContains(refused.status().message(), words)) << refused.status();
    WaitForFailures(before + 1);
    EXPECT_EQ(receiver_.completed().size(), 0u);
  }
  std::string address() const { return receiving_->listen_address(); }
  double failures() { return metrics_.received.authentication_failures.Value(); }
  void WaitForFailures(double n) {
    while (failures() < n) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  static bool Shake(TlsLink& link, int fd) {
    for (;;) {
      const TlsLink::Step step = link.Handshake();
      if (step == TlsLink::Step::kDone || step == TlsLink::Step::kFailed) return step == TlsLink::Step::kDone;
      pollfd waiting{fd, POLLIN, 0};
      if (::poll(&waiting, 1, 20000) <= 0) return false;
    }
  }

  TestAuthority authority_, other_{"another authority"};
  TlsSwitch switch_;
  Metrics text_, sender_text_;
  TransportMetrics metrics_{&text_}, sender_metrics_{&sender_text_};
  TestReceiver receiver_;
  const std::vector<Page> pages_ = RandomPages({8, 4096, 100000, 300000, 1 << 20, 40, 2 << 20, 65536}, 3);
  std::unique_ptr<TcpTransport> receiving_;
};

TEST_F(TlsPeersTest, DaemonsOfOneAuthorityHandOffAndProbe) {
  for (const std::string& key : {std::string(), std::string(32, 'k')}) {
    Listen(&switch_, key);
    const auto result = Send(&switch_, address(), key);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_TRUE(receiver_.newest() == pages_);
    TcpTransport::Options options;
    options.metrics = &sender_metrics_;
    options.tls = &switch_;
    options.peer_key = key;
    const auto sender = Make(options);
    std::promise<absl::StatusOr<ReceiverLoad>> load;
    sender->Probe(address(), [&](absl::StatusOr<ReceiverLoad> got) { load.set_value(std::move(got)); });
    const auto got = load.get_future().get();
    EXPECT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(failures() + sender_metrics_.sent.authentication_failures.Value(), 0);
    EXPECT_EQ(metrics_.protocol_errors.Value(), 0);
  }
}

TEST_F(TlsPeersTest, EachSideRefusesWhatItMust) {
  TlsSwitch of_other, client, expired, nothing;
  of_other.Set(PeerContexts(other_.Daemon(), authority_.certificate()));
  ExpectRefused(&of_other, absl::StatusCode::kUnauthenticated, "does not know the authority that signed it");
  const auto only = [&](const PemPair& own) {
    return TlsContexts{nullptr, AcceptContext(own, authority_.certificate()),
                       DialContext(own, authority_.certificate())};
  };
  client.Set(only(authority_.Client("a client")));
  ExpectRefused(&client, absl::StatusCode::kUnauthenticated, "refused this side's certificate");
  expired.Set(only(authority_.Sign({"daemon", {"IP:127.0.0.1"}, "serverAuth,clientAuth", -3600, -60})));
  ExpectRefused(&expired, absl::StatusCode::kUnauthenticated, "it has expired");
  nothing.Set(only({}));
  ExpectRefused(&nothing, absl::StatusCode::kUnauthenticated, "asks for a certificate, and this side showed none");
  ExpectRefused(nullptr, absl::StatusCode::kUnauthenticated, "the peer speaks TLS, and this daemon does not");

  // Whom this side dials, it refuses by itself.
  TlsSwitch unknown;
  unknown.Set(PeerContexts(authority_.Daemon(), other_.certificate()));
  ExpectRefused(&unknown, absl::StatusCode::kUnauthenticated, "not signed by an authority");
  switch_.Set(PeerContexts(authority_.Sign({"d", {"DNS:elsewhere"}}), authority_.certificate()));
  ExpectRefused(&switch_, absl::StatusCode::kUnauthenticated, "it is for elsewhere, not for 127.0.0.1");
  EXPECT_EQ(receiver_.offers(), 0u);
  switch_.Set(PeerContexts(authority_.Daemon(), authority_.certificate()));
  EXPECT_TRUE(Send(&switch_, address()).ok());
  EXPECT_TRUE(receiver_.newest() == pages_);
}

TEST_F(TlsPeersTest, NothingIsOfferedToAPlainPeer) {
  Listen(nullptr);
  const auto result = Send(&switch_, address());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kFailedPrecondition) << result.status();
  EXPECT_TRUE(absl::StrContains(result.status().message(), "127.0.0.1 does not speak TLS")) << result.status();
  EXPECT_EQ(receiver_.offers(), 0u);
}

// A well-formed offer, in plain or over TLS without a certificate, is not looked at.
TEST_F(TlsPeersTest, AStrangerGetsNothing) {
  RawSocket plain = RawSocket::Connect(address());
  plain.Write(EncodeHello({}) + OfferOf(pages_));
  const std::string heard = plain.ReadToEnd();
  EXPECT_LE(heard.size(), 7u);  // an alert
  RawSocket garbage = RawSocket::Connect(address());
  garbage.Write(std::string(100000, 'x'));
  EXPECT_LE(garbage.ReadToEnd().size(), 7u);
  WaitForFailures(2);

  RawSocket socket = RawSocket::Connect(address());
  TlsLink link(DialContext({}, authority_.certificate()), socket.fd(), "127.0.0.1");
  ASSERT_TRUE(Shake(link, socket.fd()));  // as far as it can know
  const std::string offer = EncodeHello({}) + OfferOf(pages_);
  ASSERT_GT(link.Write(offer.data(), offer.size()), 0);
  char byte;
  pollfd waiting{socket.fd(), POLLIN, 0};
  EXPECT_EQ(::poll(&waiting, 1, 20000), 1);
  EXPECT_EQ(link.Read(&byte, 1), -2);
  EXPECT_EQ(link.failure().code(), absl::StatusCode::kUnauthenticated) << link.failure();
  WaitForFailures(3);
  EXPECT_EQ(receiver_.offers(), 0u);
  EXPECT_EQ(metrics_.protocol_errors.Value(), 0);
}

TEST_F(TlsPeersTest, SilenceAndHalfHandshakesHaveADeadlineAndABoundedShare) {
  const auto begun = std::chrono::steady_clock::now();
  std::vector<RawSocket> silent;
  for (size_t i = 0; i < kAuthenticatingOfHostMax; ++i) {
    silent.push_back(RawSocket::Connect(address(), 3));
    if (i % 2 == 0) silent.back().Write(std::string("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11));
  }
  RawSocket one_more = RawSocket::Connect(address(), 3);
  EXPECT_EQ(one_more.ReadToEnd(), "");
  EXPECT_TRUE(Send(&switch_, address()).ok());  // of another host
  for (RawSocket& each : silent) EXPECT_LE(each.ReadToEnd().size(), 7u);
  const auto ms =
      std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now() - begun).count();
  EXPECT_GE(ms, kAuthMs - 100);
  WaitForFailures(double(kAuthenticatingOfHostMax));
}

// A peer that shows a good certificate and is cut off within a frame has sent no frame; nor has one that is cut off
// without TLS's own end.
TEST_F(TlsPeersTest, ATruncatedFrameIsNone) {
  for (const bool said : {true, false}) {
    RawSocket socket = RawSocket::Connect(address());
    auto link = std::make_unique<TlsLink>(switch_.Get().peers_out, socket.fd(), "127.0.0.1");
    ASSERT_TRUE(Shake(*link, socket.fd())) << link->failure();
    const std::string offer = EncodeHello({}) + OfferOf(pages_);
    ASSERT_EQ(link->Write(offer.data(), offer.size() - 1), int64_t(offer.size() - 1));
    if (said) link.reset();  // close_notify
    socket.EndWriting();
    char some[4096];
    while (::recv(socket.fd(), some, sizeof some, 0) > 0) {
    }
    EXPECT_EQ(receiver_.offers(), 0u);
  }
  EXPECT_TRUE(Send(&switch_, address()).ok());
}

TEST_F(TlsPeersTest, EndsWithHandshakesUnderWay) {
  RawSocket silent = RawSocket::Connect(address());
  RawSocket listener = RawSocket::Listen();
  TcpTransport::Options options;
  options.metrics = &sender_metrics_;
  options.tls = &switch_;
  auto sender = Make(options);
  Outcome outcome = SendAll(*sender, RequestOf(pages_, listener.address()), PagesOf(pages_));
  RawSocket played = listener.Accept();
  EXPECT_EQ(played.Read(1), "\x16");
  receiving_.reset();
  sender.reset();
  EXPECT_EQ(silent.ReadToEnd(), "");
  (void)played.ReadToEnd();
  EXPECT_TRUE(absl::IsCancelled(outcome.done.get().status()));
}

}  // namespace
}  // namespace kvmanager::tcp
