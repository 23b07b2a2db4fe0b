// Who may speak on a daemon's peer port, and bring what: daemons with a key, with another, without one, and sockets
// that have a well-formed offer and no key.
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/daemon_pair.h"
#include "tests/matchers.h"
#include "transport/tcp/peer_key.h"
#include "transport/tcp/wire.h"
#include "transport/tcp/wire_testing.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::Client;
using client::CreatedSequence;
using client::HandOffOutcome;

constexpr int kBlocks = 12;
constexpr int kTokens = kBlocks * 64;
constexpr char kFailures[] = "kvmanager_transport_authentication_failures_total";

class StrangerTest : public DaemonPairTest {
 protected:
  std::string KeyFile(const std::string& name, char byte, mode_t mode = 0600) {
    const std::string path = absl::StrCat(directory_.path(), "/", name);
    std::ofstream(path) << std::string(32, byte);
    EXPECT_EQ(chmod(path.c_str(), mode), 0);
    return path;
  }
  static DaemonOptions With(std::vector<std::string> flags) {
    DaemonOptions options;
    options.more_flags = std::move(flags);
    return options;
  }
  DaemonOptions Keyed() { return With({"--peer-key", KeyFile("key", 'k')}); }
  /// A sequence of this tenant at a daemon, with everything published.
  static CreatedSequence Publish(client::Cache& cache, const Source& source) {
    absl::StatusOr<CreatedSequence> made = cache.CreateSequence();
    EXPECT_OK(made);
    EXPECT_OK(Load(cache, made->sequence->id(), source, 0, kTokens, 512));
    EXPECT_OK(made->sequence->Publish(Names(cache, source, kBlocks)));
    return *std::move(made);
  }
  /// What the sender says on a control connection, up to the end of its offer.
  std::string RecordOffer(client::Sequence& sequence, const std::string& peer) {
    Proxy proxy(peer);
    proxy.Record();
    EXPECT_OK(sequence.HandOff(proxy.address(), ""));
    const std::string said = proxy.Recorded();
    const auto* const bytes = reinterpret_cast<const uint8_t*>(said.data());
    const absl::StatusOr<tcp::FrameHeader> header =
        tcp::ParseHeader(absl::MakeConstSpan(bytes + tcp::kHelloBytes, tcp::kHeaderBytes));
    EXPECT_OK(header);
    EXPECT_EQ(header->type, tcp::FrameType::kOffer);
    return said.substr(0, tcp::kHelloBytes + tcp::kHeaderBytes + header->body_bytes);
  }
  /// With another token: as a new offer.
  static std::string Anew(std::string offer, char token) {
    offer[tcp::kHelloBytes + tcp::kHeaderBytes] = token;
    return tcp::WithGoodChecks(offer);
  }
  /// What the peer port says to `bytes` until it closes, or has said so many.
  static std::string Say(const DaemonProcess& daemon, const std::string& bytes, size_t enough = SIZE_MAX) {
    const int fd = ConnectSocket(daemon.peer());
    EXPECT_GE(fd, 0);
    WriteAll(fd, bytes);
    std::string heard;
    char chunk[4096];
    for (ssize_t n; heard.size() < enough && (n = recv(fd, chunk, sizeof chunk, 0)) > 0;)
      heard.append(chunk, static_cast<size_t>(n));
    close(fd);
    return heard;
  }

  const TempDir directory_;
  const Source honest_{71, Kind::kNormal, options_};
};

TEST_F(StrangerTest, DaemonsWithOneKeyHandOffAndProbe) {
  for (const char* const local_copy : {"on", "off"}) {
    DaemonOptions options = Keyed();
    options.more_flags.insert(options.more_flags.end(), {"--peer-local-copy", local_copy});
    ASSERT_NO_FATAL_FAILURE(Start(options, options));
    CreatedSequence made = Publish(*cache_, honest_);
    ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made.sequence->HandOff(receiver_->peer(), "blob"));
    ASSERT_OK_AND_ASSIGN(const auto claimed, other_->Claim(sent.ticket));
    EXPECT_EQ(claimed.tokens, uint64_t{kTokens});
    ASSERT_OK_AND_ASSIGN(const auto peers, here_->Peers({receiver_->peer()}));
    bool asked = false;
    for (const auto& peer : peers) asked |= peer.load.ok();
    EXPECT_TRUE(asked);
    EXPECT_EQ(Metric(*receiver_, kFailures) + Metric(*sender_, kFailures), 0);
    TearDown();
  }
}

// The stranger is a daemon that works well: its client knows the tenant's name and the blocks' names.
TEST_F(StrangerTest, AStrangerPublishesAndEvictsNothing) {
  DaemonOptions receiver = Keyed();
  receiver.host_pool_bytes = 4 << 20;
  ASSERT_NO_FATAL_FAILURE(Start(With({"--peer-local-copy", "off"}), receiver));
  // Everything that the receiver has room for is published there, and can be evicted.
  const Source theirs{72, Kind::kNormal, options_};
  ASSERT_OK_AND_ASSIGN(CreatedSequence filler, other_->CreateSequence());
  const int most = 40;
  ASSERT_OK(Load(*other_, filler.sequence->id(), theirs, 0, most * 64, 512));
  ASSERT_OK(filler.sequence->Publish(Names(*other_, theirs, most)));
  filler.sequence.reset();
  ASSERT_TRUE(Eventually([&] { return Metric(*receiver_, "kvmanager_held_sequences") == 0; }));
  const auto before = Held(*receiver_);
  EXPECT_EQ(Metric(*receiver_, "kvmanager_published_blocks"), most);

  CreatedSequence poison = Publish(*cache_, honest_);
  const absl::Status refused = poison.sequence->HandOff(receiver_->peer(), "").status();
  EXPECT_CODE(refused, kUnauthenticated);
  EXPECT_TRUE(absl::StrContains(absl::string_view(refused.message()),
                                "the peer wants a key: start this daemon with --peer-key FILE"))
      << refused;
  EXPECT_CODE(poison.sequence->BeginHandOff(receiver_->peer(), kTokens).status(), kUnauthenticated);
  ASSERT_OK_AND_ASSIGN(const auto peers, here_->Peers({receiver_->peer()}));
  for (const auto& peer : peers) EXPECT_FALSE(peer.load.ok());

  // The same by bare sockets, with an offer that another daemon took.
  ASSERT_OK_AND_ASSIGN(auto open, DaemonProcess::Start(With({"--peer-local-copy", "off"})));
  const std::string offer = RecordOffer(*poison.sequence, open->peer());
  const std::string taken = Say(*open, Anew(offer, 'x'), tcp::kHelloBytes + tcp::kHeaderBytes);
  ASSERT_GT(taken.size(), tcp::kHelloBytes);
  EXPECT_EQ(taken[tcp::kHelloBytes], static_cast<char>(tcp::FrameType::kAccept));
  for (char token = '0'; token <= '9'; ++token) EXPECT_EQ(Say(*receiver_, Anew(offer, token)), tcp::EncodeRefusal());
  EXPECT_EQ(Say(*receiver_, tcp::EncodeHello({}) + tcp::EncodeEmpty(tcp::FrameType::kProbe)), tcp::EncodeRefusal());
  EXPECT_EQ(Say(*receiver_, tcp::EncodeChallenge({}) + std::string(tcp::kProofBytes, 'p') + Anew(offer, 'y'))
                .substr(tcp::kAnswerBytes),
            tcp::EncodeRefusal());

  EXPECT_EQ(Held(*receiver_), before);
  EXPECT_EQ(Metric(*receiver_, "kvmanager_evicted_blocks_total"), 0);
  EXPECT_EQ(Metric(*receiver_, "kvmanager_tickets_total"), 0);
  EXPECT_EQ(Metric(*receiver_, "kvmanager_hand_offs_total", {"direction=\"received\""}), 0);
  // Counted once a connection has ended, behind what it was told.
  EXPECT_TRUE(Eventually([&] { return Metric(*receiver_, kFailures, {"direction=\"received\""}) >= 15; }));
  EXPECT_TRUE(Eventually([&] { return Metric(*sender_, kFailures, {"direction=\"sent\""}) >= 3; }));
  const std::vector<BlockName> poisoned = Names(*other_, honest_, kBlocks);
  ASSERT_OK_AND_ASSIGN(const CreatedSequence none, other_->CreateSequence(poisoned));
  EXPECT_EQ(none.match.hit_blocks, 0);
  const std::vector<BlockName> kept = Names(*other_, theirs, most);
  ASSERT_OK_AND_ASSIGN(const CreatedSequence all, other_->CreateSequence(kept));
  EXPECT_EQ(all.match.hit_blocks, most);

  // It serves daemons that have the key on.
  ASSERT_OK_AND_ASSIGN(auto friend_daemon, DaemonProcess::Start(Keyed()));
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(friend_daemon->listen(), {}));
  ASSERT_OK_AND_ASSIGN(auto cache, client->OpenCache(options_));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), honest_, 0, 64, 64));
  EXPECT_OK(made.sequence->HandOff(receiver_->peer(), ""));
}

TEST_F(StrangerTest, AnotherKeyOnEitherSideIsSaid) {
  ASSERT_NO_FATAL_FAILURE(Start(Keyed(), With({"--peer-key", KeyFile("other", 'o')})));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache_->CreateSequence());
  ASSERT_OK(Load(*cache_, made.sequence->id(), honest_, 0, 64, 64));
  const absl::Status other = made.sequence->HandOff(receiver_->peer(), "").status();
  EXPECT_CODE(other, kUnauthenticated);
  EXPECT_TRUE(absl::StrContains(absl::string_view(other.message()), "did not prove the key")) << other;
  // To a daemon without a key nothing is offered.
  ASSERT_OK_AND_ASSIGN(auto open, DaemonProcess::Start({}));
  const absl::Status keyless = made.sequence->HandOff(open->peer(), "").status();
  EXPECT_CODE(keyless, kUnauthenticated);
  EXPECT_TRUE(
      absl::StrContains(absl::string_view(keyless.message()), "the peer has no key: start it with --peer-key FILE"))
      << keyless;
  EXPECT_EQ(Metric(*open, "kvmanager_hand_offs_total", {"direction=\"received\""}), 0);
}

TEST_F(StrangerTest, PeersBringSequencesOfTheTenantsThatWereSaid) {
  DaemonOptions receiver = Keyed();
  receiver.more_flags.insert(receiver.more_flags.end(), {"--peer-tenants", "a,b"});
  ASSERT_NO_FATAL_FAILURE(Start(Keyed(), receiver));
  for (const std::string tenant : {"", "c", "a", "b"}) {
    CacheOptions options = options_;
    options.tenant = tenant;
    ASSERT_OK_AND_ASSIGN(auto cache, here_->OpenCache(options));
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
    ASSERT_OK(Load(*cache, made.sequence->id(), {71, Kind::kNormal, options}, 0, 64, 64));
    const absl::Status status = made.sequence->HandOff(receiver_->peer(), "").status();
    if (tenant == "a" || tenant == "b") {
      EXPECT_OK(status);
      continue;
    }
    EXPECT_TRUE(NamesField(status, absl::StatusCode::kPermissionDenied, "tenant")) << status;
    EXPECT_EQ(UsedBytes(*there_), 0u);
  }
}

TEST_F(StrangerTest, AnOpenPortNeedsAKeyThatItsOwnerAloneReads) {
  const auto start = [&](std::vector<std::string> flags) {
    std::vector<std::string> argv = {DataPath("kvmanager/daemon/kvmanagerd"),
                                     "--listen",
                                     absl::StrCat("unix:", directory_.path(), "/s"),
                                     "--host-pool-bytes",
                                     "16MiB",
                                     "--log-level",
                                     "off"};
    argv.insert(argv.end(), flags.begin(), flags.end());
    const absl::StatusOr<CommandResult> result = RunCommand(argv);
    EXPECT_OK(result);
    return result.ok() ? result->status : -1;
  };
  EXPECT_EQ(start({"--peer-listen", "0.0.0.0:0"}), 2);
  EXPECT_EQ(start({"--listen", "tcp:0.0.0.0:0"}), 2);
  EXPECT_EQ(start({"--peer-listen", "0.0.0.0:0", "--peer-key", KeyFile("group", 'k', 0640)}), 2);
  EXPECT_EQ(start({"--peer-listen", "0.0.0.0:0", "--peer-key", KeyFile("world", 'k', 0604)}), 2);
  const std::string small = absl::StrCat(directory_.path(), "/small");
  std::ofstream(small) << "31 bytes, which are not enough.";
  ASSERT_EQ(chmod(small.c_str(), 0600), 0);
  EXPECT_EQ(start({"--peer-key", small}), 2);

  DaemonOptions options;
  options.peers = false;
  options.more_flags = {"--peer-listen", "0.0.0.0:0", "--peer-key", KeyFile("key", 'k')};
  ASSERT_OK_AND_ASSIGN(auto keyed, DaemonProcess::Start(options));
  EXPECT_TRUE(absl::StartsWith(keyed->peer(), "0.0.0.0:")) << keyed->peer();
  options.more_flags = {"--peer-listen", "0.0.0.0:0", "--insecure", "--peer-tenants", "a"};
  EXPECT_OK(DaemonProcess::Start(options));
}

}  // namespace
}  // namespace kvmanager::testing
