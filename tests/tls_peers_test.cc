// Hand-offs between daemons over mutual TLS: the same bits arrive, links that break are made again, and whoever reads
// along or comes without a certificate gets nothing.
#include <signal.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "kvmanager/base/tls_testing.h"
#include "tests/daemon_pair.h"
#include "tests/matchers.h"

namespace kvmanager::testing {
namespace {

using client::ClaimedSequence;
using client::CreatedSequence;
using client::HandOffOutcome;

constexpr int kTokens = 12 * 64 + 5;
constexpr char kFailures[] = "kvmanager_transport_authentication_failures_total";

class TlsPeersTest : public DaemonPairTest {
 protected:
  std::string PathOf(absl::string_view name) const { return absl::StrCat(directory_.path(), "/", name); }
  DaemonOptions With(const std::string& name, const PemPair& own, const std::string& authority,
                     const std::vector<std::string>& more = {}) {
    WriteSecret(PathOf(name + ".crt"), own.certificate);
    WriteSecret(PathOf(name + ".key"), own.key);
    WriteSecret(PathOf(name + ".ca"), authority);
    DaemonOptions options;
    options.more_flags = {"--tls-cert", PathOf(name + ".crt"), "--tls-key",         PathOf(name + ".key"),
                          "--tls-ca",   PathOf(name + ".ca"),  "--peer-local-copy", "off"};
    options.more_flags.insert(options.more_flags.end(), more.begin(), more.end());
    return options;
  }
  DaemonOptions Good(const std::string& name, const std::vector<std::string>& more = {}) {
    return With(name, authority_.Daemon(), authority_.certificate(), more);
  }
  /// What stays and what goes read on alike.
  void ExpectSameBits(CreatedSequence& made, const HandOffOutcome& sent) {
    ASSERT_OK_AND_ASSIGN(ClaimedSequence claimed, other_->Claim(sent.ticket));
    EXPECT_EQ(claimed.tokens, uint64_t{kTokens});
    ASSERT_OK_AND_ASSIGN(const std::vector<float> stayed, Feed(*cache_, made.sequence->id(), more_, kTokens, 70, 70));
    ASSERT_OK_AND_ASSIGN(const std::vector<float> went, Feed(*other_, claimed.sequence->id(), more_, kTokens, 70, 70));
    EXPECT_EQ(stayed, went);
  }
  CreatedSequence Make() {
    absl::StatusOr<CreatedSequence> made = cache_->CreateSequence();
    EXPECT_OK(made);
    EXPECT_OK(Load(*cache_, made->sequence->id(), source_, 0, kTokens, 512));
    return *std::move(made);
  }

  TestAuthority authority_, other_authority_{"another authority"};
  const TempDir directory_;
  const Source source_{71, Kind::kNormal, options_}, more_{72, Kind::kNormal, options_};
};

TEST_F(TlsPeersTest, TheSameBitsArriveAndNobodyReadsAlong) {
  ASSERT_NO_FATAL_FAILURE(Start(Good("a"), Good("b")));
  CreatedSequence made = Make();
  Proxy proxy(receiver_->peer());
  proxy.Record();
  const std::string blob = "a text that nobody else is to see";
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made.sequence->HandOff(proxy.address(), blob));
  const std::string seen = proxy.Recorded();
  EXPECT_GT(seen.size(), sent.bytes_sent);
  EXPECT_FALSE(absl::StrContains(seen, blob));
  EXPECT_FALSE(absl::StrContains(seen, options_.model));
  ExpectSameBits(made, sent);
  EXPECT_EQ(Metric(*receiver_, kFailures), 0);
}

TEST_F(TlsPeersTest, ALinkThatBreaksIsMadeAgain) {
  ASSERT_NO_FATAL_FAILURE(Start(Good("a", {"--peer-rate-bytes", "8MiB"}), Good("b")));
  for (const Proxy::Fault fault : {Proxy::Fault::kCut, Proxy::Fault::kFlip}) {
    CreatedSequence made = Make();
    Proxy proxy(receiver_->peer());
    proxy.Spoil(fault, 300000);
    ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made.sequence->HandOff(proxy.address(), ""));
    EXPECT_EQ(proxy.faults(), 1);
    ExpectSameBits(made, sent);
  }
}

TEST_F(TlsPeersTest, WhoIsNotADaemonOfTheAuthorityGetsNothing) {
  ASSERT_NO_FATAL_FAILURE(Start(With("a", other_authority_.Daemon(), authority_.certificate()), Good("b")));
  CreatedSequence made = Make();
  const auto refused = made.sequence->HandOff(receiver_->peer(), "");
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kUnauthenticated) << refused.status();
  EXPECT_TRUE(absl::StrContains(refused.status().message(), "does not know the authority")) << refused.status();
  EXPECT_TRUE(Eventually([&] { return Metric(*receiver_, kFailures) >= 1; }));
  ExpectNothingAt(*there_);
  // The files as they should have been, without a restart.
  Good("a");
  sender_->process().Signal(SIGHUP);
  absl::StatusOr<HandOffOutcome> sent = absl::UnavailableError("");
  EXPECT_TRUE(Eventually([&] { return (sent = made.sequence->HandOff(receiver_->peer(), "")).ok(); }));
  ASSERT_OK(sent);
  ExpectSameBits(made, *sent);
}

}  // namespace
}  // namespace kvmanager::testing
