// Two daemons: a sequence that was handed over reads on exactly as the one that stayed.
#include <signal.h>

#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "gtest/gtest.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::ClaimedSequence;
using client::Client;
using client::CreatedSequence;
using client::HandOffOutcome;

constexpr char kHack[] = "hack:k_bits=3,v_bits=2";

class HandOffTest : public ::testing::Test {
 protected:
  void SetUp() override {
    DaemonOptions options;
    options.more_flags = {"--threads", "2"};
    ASSERT_OK_AND_ASSIGN(sender_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(receiver_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(here_, Client::Connect(sender_->listen(), {}));
    ASSERT_OK_AND_ASSIGN(there_, Client::Connect(receiver_->listen(), {}));
  }
  void TearDown() override {
    here_.reset();
    there_.reset();
  }
  static uint64_t UsedBytes(Client& client) {
    absl::StatusOr<client::DaemonDescription> status = client.Status();
    EXPECT_OK(status);
    return status.ok() ? status->pools.at(0).used_bytes : UINT64_MAX;
  }

  std::unique_ptr<DaemonProcess> sender_, receiver_;
  std::unique_ptr<Client> here_, there_;
};

struct Case {
  std::string codec;
  int lag = 2;
  bool publish = true;
  int tokens = 64 * 5 + 13;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.codec << " lag " << c.lag << (c.publish ? " published " : " unpublished ") << c.tokens << " tokens";
}

class HandOffCodecTest : public HandOffTest, public ::testing::WithParamInterface<Case> {};

TEST_P(HandOffCodecTest, TheClaimedSequenceReadsTheSameBits) {
  const Case& c = GetParam();
  const CacheOptions options = SmallCache(c.codec, c.lag);
  const Source source{81, Kind::kOutliers, options};
  ASSERT_OK_AND_ASSIGN(auto cache, here_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, c.tokens, 48));
  if (c.publish && c.tokens >= 64) {
    ASSERT_OK(made.sequence->Publish(Names(*cache, source, c.tokens / 64)));
  }
  const std::string blob("first token\0\xff", 13);
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made.sequence->HandOff(receiver_->peer(), blob));
  EXPECT_EQ(sent.pages_skipped, 0u);
  const client::CacheDescription& d = cache->description();
  const int full = c.tokens / 64;
  if (c.tokens > 0) {
    EXPECT_GE(sent.pages_sent, uint64_t(options.layers) * (full + (c.tokens % 64 != 0)));
    EXPECT_GT(sent.bytes_sent, 0u);
    EXPECT_LE(sent.bytes_sent, (full * (d.encoded_page_bytes + d.raw_page_bytes) + d.raw_page_bytes) * options.layers);
  }

  ASSERT_OK_AND_ASSIGN(auto other_cache, there_->OpenCache(options));
  EXPECT_TRUE(other_cache->description().digest == d.digest);
  ASSERT_OK_AND_ASSIGN(ClaimedSequence claimed, other_cache->Claim(sent.ticket));
  EXPECT_EQ(claimed.tokens, uint64_t(c.tokens));
  EXPECT_EQ(claimed.blob, blob);
  ASSERT_OK_AND_ASSIGN(const client::SequenceDescription info, claimed.sequence->Info());
  EXPECT_EQ(info.tokens, uint64_t(c.tokens));

  // Decode past two page boundaries, then prefill; the same calls on both sides.
  const Source more{82, Kind::kNormal, options};
  uint64_t at = c.tokens;
  for (const int chunk : {1, 1, 70, 64, 5}) {
    client::StepResult counts_here, counts_there;
    ASSERT_OK_AND_ASSIGN(const std::vector<float> stayed,
                         Feed(*cache, made.sequence->id(), more, at, chunk, chunk, &counts_here));
    ASSERT_OK_AND_ASSIGN(const std::vector<float> went,
                         Feed(*other_cache, claimed.sequence->id(), more, at, chunk, chunk, &counts_there));
    EXPECT_EQ(stayed, went) << "tokens " << at << " and on";
    EXPECT_EQ(counts_here.encoded_pairs, counts_there.encoded_pairs);
    EXPECT_EQ(counts_here.raw_pairs, counts_there.raw_pairs);
    at += chunk;
  }
  // Cropping has the same bounds on both sides.
  for (const uint64_t to : {at - 1, at - 70, uint64_t(c.tokens), uint64_t(c.tokens) / 2 + 1}) {
    EXPECT_EQ(made.sequence->Crop(to).code(), claimed.sequence->Crop(to).code()) << "crop to " << to;
  }

  EXPECT_FALSE(other_cache->Claim(sent.ticket).ok()) << "a ticket is claimed once";
  made.sequence.reset();
  claimed.sequence.reset();
  for (Client* const client : {here_.get(), there_.get()}) {
    ASSERT_OK(client->Purge(Client::kAllCaches));
    EXPECT_TRUE(Eventually([&] { return UsedBytes(*client) == 0; })) << UsedBytes(*client);
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, HandOffCodecTest,
                         ::testing::Values(Case{"raw"}, Case{"raw", 2, false}, Case{kHack}, Case{kHack, 2, false},
                                           Case{kHack, 0}, Case{kHack, 4}, Case{kHack, 1, true, 64 * 4},
                                           Case{kHack, 2, true, 20}, Case{kHack, 2, false, 0},
                                           Case{"hack:k_axis=token,k_bits=2,v_bits=2,part=64,meta=16", 1},
                                           Case{"hack:k_bits=3,v_bits=2;0=raw;sinks=100", 1}));

TEST_F(HandOffTest, ASecondHandOffSkipsWhatIsThere) {
  const CacheOptions options = SmallCache(kHack, 1);
  const Source source{83, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(auto cache, here_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 64 * 10 + 5, 64));
  ASSERT_OK(made.sequence->Publish(Names(*cache, source, 10)));
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome first, made.sequence->HandOff(receiver_->peer(), "one"));
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome second, made.sequence->HandOff(receiver_->peer(), "two"));
  EXPECT_GE(second.pages_skipped, uint64_t(options.layers) * 8);
  EXPECT_LT(second.bytes_sent, first.bytes_sent);
  EXPECT_NE(first.ticket, second.ticket);

  // Both can be claimed, share their blocks, and read the same.
  ASSERT_OK_AND_ASSIGN(auto other, there_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(ClaimedSequence a, other->Claim(first.ticket));
  ASSERT_OK_AND_ASSIGN(ClaimedSequence b, other->Claim(second.ticket));
  EXPECT_EQ(a.blob, "one");
  EXPECT_EQ(b.blob, "two");
  const int at = 64 * 10 + 5;
  ASSERT_OK_AND_ASSIGN(const std::vector<float> stayed, Feed(*cache, made.sequence->id(), source, at, 80, 80));
  ASSERT_OK_AND_ASSIGN(const std::vector<float> of_a, Feed(*other, a.sequence->id(), source, at, 80, 80));
  ASSERT_OK_AND_ASSIGN(const std::vector<float> of_b, Feed(*other, b.sequence->id(), source, at, 80, 80));
  EXPECT_EQ(stayed, of_a);
  EXPECT_EQ(stayed, of_b);
  // A prompt with the same prefix finds the received blocks.
  ASSERT_OK_AND_ASSIGN(CreatedSequence hit, other->CreateSequence(Names(*cache, source, 10)));
  EXPECT_EQ(hit.match.hit_blocks, 10);
}

TEST_F(HandOffTest, ATicketIsForItsOwnCacheOnly) {
  const CacheOptions options = SmallCache(kHack, 1);
  CacheOptions stranger = options;
  stranger.tenant = "stranger";
  const Source source{84, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(auto cache, here_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 100, 100));
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made.sequence->HandOff(receiver_->peer(), ""));
  ASSERT_OK_AND_ASSIGN(auto wrong, there_->OpenCache(stranger));
  const absl::StatusOr<ClaimedSequence> refused = wrong->Claim(sent.ticket);
  EXPECT_FALSE(refused.ok());
  EXPECT_FALSE(wrong->Claim("no such ticket").ok());
  EXPECT_FALSE(wrong->Claim(std::string(100000, 'x')).ok());
  EXPECT_FALSE(wrong->Claim("").ok());
  ASSERT_OK_AND_ASSIGN(auto right, there_->OpenCache(options));
  EXPECT_OK(right->Claim(sent.ticket));
}

TEST_F(HandOffTest, ATicketThatNobodyClaimsExpires) {
  DaemonOptions daemon_options;
  daemon_options.more_flags = {"--hand-off-lease-ms", "100"};
  ASSERT_OK_AND_ASSIGN(auto impatient, DaemonProcess::Start(daemon_options));
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(impatient->listen(), {}));
  const CacheOptions options = SmallCache(kHack, 1);
  const Source source{85, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(auto cache, here_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 200, 200));
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made.sequence->HandOff(impatient->peer(), ""));
  EXPECT_TRUE(Eventually([&] { return UsedBytes(*client) == 0; }));
  ASSERT_OK_AND_ASSIGN(auto other, client->OpenCache(options));
  EXPECT_FALSE(other->Claim(sent.ticket).ok());
}

// What a peer was told is accepted is not lost to a drain: it can be claimed, and the daemon waits for that.
TEST_F(HandOffTest, ADrainWaitsForClaims) {
  DaemonOptions daemon_options;
  daemon_options.more_flags = {"--drain-s", "600"};
  ASSERT_OK_AND_ASSIGN(auto leaving, DaemonProcess::Start(daemon_options));
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(leaving->listen(), {}));
  const CacheOptions options = SmallCache(kHack, 1);
  const Source source{89, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(auto cache, here_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 200, 200));
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made.sequence->HandOff(leaving->peer(), "blob"));
  ASSERT_OK_AND_ASSIGN(client::DaemonDescription status, client->Status());
  EXPECT_EQ(status.waiting_hand_offs, 1u);
  leaving->process().Signal(SIGTERM);
  ASSERT_TRUE(Eventually([&] {
    const auto now = client->Status();
    return now.ok() && now->draining;
  }));
  EXPECT_CODE(made.sequence->HandOff(leaving->peer(), ""), kUnavailable);
  ASSERT_OK_AND_ASSIGN(auto other, client->OpenCache(options));
  EXPECT_CODE(other->CreateSequence(), kUnavailable);
  ASSERT_OK_AND_ASSIGN(ClaimedSequence claimed, other->Claim(sent.ticket));
  EXPECT_EQ(claimed.blob, "blob");
  EXPECT_CODE(claimed.sequence->Fork(), kUnavailable);
  ASSERT_OK_AND_ASSIGN(status, client->Status());
  EXPECT_EQ(status.waiting_hand_offs, 0u);
  ASSERT_OK_AND_ASSIGN(const std::vector<float> stayed, Feed(*cache, made.sequence->id(), source, 200, 5, 5));
  ASSERT_OK_AND_ASSIGN(const std::vector<float> went, Feed(*other, claimed.sequence->id(), source, 200, 5, 5));
  EXPECT_EQ(stayed, went);
  EXPECT_TRUE(leaving->process().running());
  claimed.sequence.reset();
  ASSERT_OK_AND_ASSIGN(const int ended, leaving->process().Wait());
  EXPECT_EQ(ended, 0);
}

TEST_F(HandOffTest, PeersAreListedOnBothSides) {
  const CacheOptions options = SmallCache("raw");
  ASSERT_OK_AND_ASSIGN(auto cache, here_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), Source{86, Kind::kNormal, options}, 0, 70, 70));
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, made.sequence->HandOff(receiver_->peer(), ""));
  ASSERT_OK_AND_ASSIGN(const std::vector<client::PeerDescription> out, here_->Peers());
  ASSERT_EQ(out.size(), 1u);
  EXPECT_EQ(out[0].peer, receiver_->peer());
  EXPECT_FALSE(out[0].incoming);
  EXPECT_EQ(out[0].transfers, 1u);
  EXPECT_EQ(out[0].bytes, sent.bytes_sent);
  EXPECT_EQ(out[0].active, 0u);
  ASSERT_OK_AND_ASSIGN(const std::vector<client::PeerDescription> in, there_->Peers());
  ASSERT_EQ(in.size(), 1u);
  EXPECT_TRUE(in[0].incoming);
  EXPECT_EQ(in[0].transfers, 1u);
  EXPECT_EQ(in[0].bytes, sent.bytes_sent);
}

TEST_F(HandOffTest, RefusalsLeaveBothSidesAsTheyWere) {
  const CacheOptions options = SmallCache(kHack, 1);
  const Source source{87, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(auto cache, here_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 200, 40));
  ASSERT_OK_AND_ASSIGN(const std::vector<float> before, Ask(*cache, made.sequence->id(), source, 199));

  // Nobody listens there.
  EXPECT_CODE(made.sequence->HandOff("127.0.0.1:1", ""), kUnavailable);
  // No address at all.
  for (const char* const peer : {"", "nowhere", "127.0.0.1", "127.0.0.1:", "127.0.0.1:99999", ":", "127.0.0.1:-4"}) {
    EXPECT_TRUE(NamesField(made.sequence->HandOff(peer, "").status(), absl::StatusCode::kInvalidArgument, "peer"))
        << peer;
  }
  EXPECT_TRUE(NamesField(made.sequence->HandOff(receiver_->peer(), std::string((1 << 20) + 1, 'b')).status(),
                         absl::StatusCode::kInvalidArgument, "blob"));
  // A draining receiver.
  ASSERT_OK(there_->Drain(true));
  const absl::Status refused = made.sequence->HandOff(receiver_->peer(), "").status();
  EXPECT_CODE(refused, kUnavailable);
  EXPECT_EQ(std::string(refused.message()).find("peer " + receiver_->peer() + " answered: "), 0u) << refused;
  ASSERT_OK(there_->Drain(false));
  // A receiver without room.
  DaemonOptions tiny;
  tiny.host_pool_bytes = 2 << 20;
  ASSERT_OK_AND_ASSIGN(auto small, DaemonProcess::Start(tiny));
  {
    ASSERT_OK_AND_ASSIGN(auto raw, here_->OpenCache(SmallCache("raw")));
    ASSERT_OK_AND_ASSIGN(CreatedSequence large, raw->CreateSequence());
    ASSERT_OK(Load(*raw, large.sequence->id(), Source{88, Kind::kNormal, SmallCache("raw")}, 0, 4096, 1024));
    EXPECT_CODE(large.sequence->HandOff(small->peer(), ""), kResourceExhausted);
  }
  ASSERT_OK_AND_ASSIGN(auto small_client, Client::Connect(small->listen(), {}));
  EXPECT_EQ(UsedBytes(*small_client), 0u);
  EXPECT_EQ(UsedBytes(*there_), 0u);
  ASSERT_OK_AND_ASSIGN(const std::vector<float> after, Ask(*cache, made.sequence->id(), source, 199));
  EXPECT_EQ(before, after);
  EXPECT_OK(made.sequence->HandOff(receiver_->peer(), "at last"));
}

}  // namespace
}  // namespace kvmanager::testing
