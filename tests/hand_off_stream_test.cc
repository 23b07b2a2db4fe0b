// Two daemons and a sequence that is handed over while it grows: what arrives reads as what stayed, can be read before
// all of it is there, and either end may go at any time.
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "gtest/gtest.h"
#include "kvmanager/base/status.h"
#include "tests/daemon_pair.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::CacheOptions;
using client::ClaimedSequence;
using client::Client;
using client::CreatedSequence;
using client::HandOff;
using client::HandOffOutcome;
using client::Pending;
using client::Sequence;

constexpr char kHack[] = "hack:k_bits=3,v_bits=2";

class StreamTest : public DaemonPairTest {
 protected:
  // A sender that takes two seconds for 8 MiB, and a sequence of that much in each of two layers, handed over but for
  // its finish. (The transport writes frames of up to 2 MiB on each of four connections; what comes later waits for
  // them.)
  void StartSlow() {
    Start({.more_flags = {"--peer-rate-bytes", std::to_string(4 << 20)}});
    ASSERT_OK_AND_ASSIGN(made_, cache_->CreateSequence());
    ASSERT_OK_AND_ASSIGN(hand_off_, made_.sequence->BeginHandOff(receiver_->peer(), kTokens));
    for (int layer = 0; layer < options_.layers; ++layer) {
      ASSERT_OK(LoadLayer(*cache_, made_.sequence->id(), source_, layer, 0, kTokens));
    }
  }
  void TearDown() override {
    hand_off_.reset();
    made_.sequence.reset();
    claimed_.sequence.reset();
    DaemonPairTest::TearDown();
  }

  static constexpr int kTokens = 256 * 64 + 5;
  const Source source_{71, Kind::kNormal, options_};
  CreatedSequence made_;
  std::unique_ptr<HandOff> hand_off_;
  ClaimedSequence claimed_;
};

struct Case {
  std::string codec;
  int lag = 1;
  int tokens = 64 * 5 + 13;
  int chunk = 1000;  // of a layer's appends
  bool publish = true;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.codec << " lag " << c.lag << ", " << c.tokens << " tokens by " << c.chunk
       << (c.publish ? ", published" : "");
}

class StreamCodecTest : public StreamTest, public ::testing::WithParamInterface<Case> {};

TEST_P(StreamCodecTest, ReadsTheSameBitsAsWhatStayedAndWhatWentAtOnce) {
  const Case& c = GetParam();
  Start();
  const CacheOptions options = SmallCache(c.codec, c.lag);
  const Source source{72, Kind::kOutliers, options};
  ASSERT_OK_AND_ASSIGN(auto cache, here_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(auto other, there_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK_AND_ASSIGN(auto hand_off, made.sequence->BeginHandOff(receiver_->peer(), c.tokens));
  // The ticket is claimed before there is anything.
  auto claim = other->ClaimAsync(hand_off->ticket(), 20000);
  for (int layer = 0; layer < options.layers; ++layer) {
    EXPECT_FALSE(claim.ready());
    for (int at = 0; at < c.tokens; at += c.chunk) {
      const int tokens = std::min(c.chunk, c.tokens - at);
      ASSERT_OK(LoadLayer(*cache, made.sequence->id(), source, layer, at, tokens));
    }
    if (layer + 1 < options.layers) {
      EXPECT_TRUE(NamesField(hand_off->Finish("").status(), absl::StatusCode::kFailedPrecondition, "tokens"));
    }
  }
  EXPECT_CODE(Load(*cache, made.sequence->id(), source, c.tokens, 1, 1), kFailedPrecondition);
  EXPECT_CODE(made.sequence->Crop(c.tokens - 1), kFailedPrecondition);
  if (c.publish) {
    ASSERT_OK(made.sequence->Publish(Names(*cache, source, c.tokens / 64)));
  }
  const std::string blob("first token\0\xff", 13);
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, hand_off->Finish(blob));
  EXPECT_EQ(sent.ticket, hand_off->ticket());
  EXPECT_GT(sent.bytes_sent, 0u);
  EXPECT_CODE(hand_off->Finish(blob), kFailedPrecondition);
  ASSERT_OK_AND_ASSIGN(const ClaimedSequence streamed, claim.Wait());
  EXPECT_EQ(streamed.tokens, uint64_t(c.tokens));
  EXPECT_EQ(streamed.blob, blob);
  EXPECT_CODE(other->Claim(hand_off->ticket()), kNotFound);

  ASSERT_OK_AND_ASSIGN(const HandOffOutcome at_once, made.sequence->HandOff(receiver_->peer(), blob));
  EXPECT_LE(at_once.bytes_sent, sent.bytes_sent);
  EXPECT_EQ(at_once.pages_skipped > 0, c.publish && c.lag < c.tokens / 64);
  ASSERT_OK_AND_ASSIGN(const ClaimedSequence whole, other->Claim(at_once.ticket));

  const Source more{73, Kind::kNormal, options};
  uint64_t at = c.tokens;
  for (const int chunk : {1, 70, 64, 5}) {
    client::StepResult counts[3];
    ASSERT_OK_AND_ASSIGN(const std::vector<float> stayed,
                         Feed(*cache, made.sequence->id(), more, at, chunk, chunk, &counts[0]));
    ASSERT_OK_AND_ASSIGN(const std::vector<float> went,
                         Feed(*other, streamed.sequence->id(), more, at, chunk, chunk, &counts[1]));
    ASSERT_OK_AND_ASSIGN(const std::vector<float> once,
                         Feed(*other, whole.sequence->id(), more, at, chunk, chunk, &counts[2]));
    EXPECT_EQ(stayed, went) << "tokens " << at << " and on";
    EXPECT_EQ(stayed, once) << "tokens " << at << " and on";
    EXPECT_EQ(counts[0].encoded_pairs, counts[1].encoded_pairs);
    EXPECT_EQ(counts[0].raw_pairs, counts[1].raw_pairs);
    at += chunk;
  }
  for (const uint64_t to : {at - 1, at - 70, uint64_t(c.tokens), uint64_t(c.tokens) / 2 + 1}) {
    EXPECT_EQ(made.sequence->Crop(to).code(), streamed.sequence->Crop(to).code()) << "crop to " << to;
  }
}

INSTANTIATE_TEST_SUITE_P(Codecs, StreamCodecTest,
                         ::testing::Values(Case{"raw"}, Case{kHack}, Case{kHack, 0, 64 * 5 + 13, 64},
                                           Case{kHack, 2, 64 * 4, 50, false}, Case{kHack, 1, 20},
                                           Case{"hack:k_bits=3,v_bits=2;0=raw;sinks=100", 1}));

TEST_F(StreamTest, WhoGoesOnGetsThePageThatTheLastTokenFilledEncoded) {
  Start();
  constexpr int kFull = 64 * 4;
  const CacheOptions options = SmallCache(kHack, 0);
  const Source source{74, Kind::kOutliers, options};
  ASSERT_OK_AND_ASSIGN(auto cache, here_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(auto other, there_->OpenCache(options));
  const uint64_t encoded = cache->description().encoded_page_bytes, raw = cache->description().raw_page_bytes;
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK_AND_ASSIGN(auto hand_off, made.sequence->BeginHandOff(receiver_->peer(), kFull,
                                                                  client::HandOffOptions{.will_append = true}));
  for (int layer = 0; layer < options.layers; ++layer) {
    ASSERT_OK(LoadLayer(*cache, made.sequence->id(), source, layer, 0, kFull));
  }
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome streamed, hand_off->Finish(""));
  EXPECT_EQ(streamed.bytes_sent, (3 * encoded + raw) * options.layers);  // the first page is a sink
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome at_once,
                       made.sequence->HandOff(receiver_->peer(), "", client::HandOffOptions{.will_append = true}));
  EXPECT_EQ(at_once.bytes_sent, streamed.bytes_sent);
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome cropped, made.sequence->HandOff(receiver_->peer(), ""));
  EXPECT_EQ(cropped.bytes_sent, (2 * encoded + 2 * raw) * options.layers);

  ASSERT_OK_AND_ASSIGN(const ClaimedSequence a, other->Claim(streamed.ticket));
  ASSERT_OK_AND_ASSIGN(const ClaimedSequence b, other->Claim(at_once.ticket));
  ASSERT_OK_AND_ASSIGN(const ClaimedSequence c, other->Claim(cropped.ticket));
  const absl::Status inside = a.sequence->Crop(kFull - 1);
  EXPECT_CODE(inside, kFailedPrecondition);
  EXPECT_OK(c.sequence->Crop(kFull - 1));
  ASSERT_OK(Load(*other, c.sequence->id(), source, kFull - 1, 1, 1));
  ASSERT_OK_AND_ASSIGN(const std::vector<float> stayed, Feed(*cache, made.sequence->id(), source, kFull, 70, 7));
  for (const ClaimedSequence* each : {&a, &b, &c}) {
    ASSERT_OK_AND_ASSIGN(const std::vector<float> went, Feed(*other, each->sequence->id(), source, kFull, 70, 7));
    EXPECT_EQ(stayed, went);
  }
}

TEST_F(StreamTest, ALayerIsReadBeforeTheNextHasCome) {
  ASSERT_NO_FATAL_FAILURE(StartSlow());
  auto claim = other_->ClaimAsync(hand_off_->ticket(), 20000);
  auto finished = hand_off_->FinishAsync("blob");
  ASSERT_OK_AND_ASSIGN(claimed_, claim.Wait());
  const uint64_t id = claimed_.sequence->id();
  ASSERT_OK_AND_ASSIGN(const std::vector<float> first, AskLayer(*other_, id, source_, 0, kTokens - 1));
  EXPECT_FALSE(finished.ready()) << "the last layer was there as early as the first";
  ASSERT_OK_AND_ASSIGN(const std::vector<float> expected_first,
                       AskLayer(*cache_, made_.sequence->id(), source_, 0, kTokens - 1));
  EXPECT_EQ(first, expected_first);
  // A decoded token goes on top at once; what needs the whole sequence waits for it.
  ASSERT_OK_AND_ASSIGN(const std::vector<float> went, Feed(*other_, id, source_, kTokens, 1, 1));
  ASSERT_OK_AND_ASSIGN(auto fork, claimed_.sequence->Fork());
  ASSERT_OK(finished.Wait());
  ASSERT_OK_AND_ASSIGN(const std::vector<float> stayed, Feed(*cache_, made_.sequence->id(), source_, kTokens, 1, 1));
  EXPECT_EQ(stayed, went);
}

TEST_F(StreamTest, ASenderThatDiesBeforeTheEndIsToldToWhoClaims) {
  ASSERT_NO_FATAL_FAILURE(StartSlow());
  auto claim = other_->ClaimAsync(hand_off_->ticket(), 20000);
  const std::string ticket = hand_off_->ticket();
  sender_->Kill();
  const int64_t start = NowMs();
  EXPECT_CODE(claim.Wait(), kUnavailable);
  EXPECT_LT(NowMs() - start, kPeerMs * kSlowdown);
  EXPECT_CODE(other_->Claim(ticket), kUnavailable);
  ExpectNothingAt(*there_);
}

TEST_F(StreamTest, ASenderThatDiesWhileItsSequenceIsReadBreaksIt) {
  ASSERT_NO_FATAL_FAILURE(StartSlow());
  auto finished = hand_off_->FinishAsync("blob");
  ASSERT_OK_AND_ASSIGN(claimed_, other_->ClaimAsync(hand_off_->ticket(), 20000).Wait());
  const uint64_t id = claimed_.sequence->id();
  sender_->Kill();
  const int64_t start = NowMs();
  EXPECT_CODE(AskLayer(*other_, id, source_, 1, kTokens - 1), kUnavailable);
  EXPECT_LT(NowMs() - start, kPeerMs * kSlowdown);
  EXPECT_CODE(Load(*other_, id, source_, kTokens, 1, 1), kUnavailable);
  EXPECT_CODE(claimed_.sequence->Fork(), kUnavailable);
  EXPECT_CODE(claimed_.sequence->Publish(Names(*other_, source_, 1)), kUnavailable);
  EXPECT_OK(claimed_.sequence->Info());
  claimed_.sequence.reset();
  ExpectNothingAt(*there_);
}

TEST_F(StreamTest, AReceiverThatDiesLeavesTheSenderAsItWas) {
  ASSERT_NO_FATAL_FAILURE(StartSlow());
  auto finished = hand_off_->FinishAsync("blob");
  receiver_->Kill();
  const int64_t start = NowMs();
  EXPECT_FALSE(finished.Wait().ok());
  EXPECT_LT(NowMs() - start, kPeerMs * kSlowdown);
  EXPECT_FALSE(hand_off_->Finish("again").ok());
  hand_off_.reset();
  EXPECT_OK(Feed(*cache_, made_.sequence->id(), source_, kTokens, 3, 1));
  EXPECT_OK(made_.sequence->Crop(kTokens));
  made_.sequence.reset();
  ExpectNothingAt(*here_);
}

TEST_F(StreamTest, DroppingItCancelsIt) {
  ASSERT_NO_FATAL_FAILURE(StartSlow());
  auto claim = other_->ClaimAsync(hand_off_->ticket(), 20000);
  hand_off_.reset();
  EXPECT_CODE(claim.Wait(), kUnavailable);
  ExpectNothingAt(*there_);
  EXPECT_TRUE(Eventually([&] { return made_.sequence->Crop(kTokens - 1).ok(); }));
  EXPECT_OK(Load(*cache_, made_.sequence->id(), source_, kTokens - 1, 3, 3));
}

TEST_F(StreamTest, BadRequestsAreNamed) {
  Start();
  ASSERT_OK_AND_ASSIGN(made_, cache_->CreateSequence());
  ASSERT_OK(Load(*cache_, made_.sequence->id(), source_, 0, 100, 100));
  const auto field = [&](const absl::Status& status, const char* name) {
    EXPECT_TRUE(NamesField(status, absl::StatusCode::kInvalidArgument, name)) << status;
  };
  field(made_.sequence->BeginHandOff("", 100).status(), "peer");
  field(made_.sequence->BeginHandOff("nowhere", 100).status(), "peer");
  field(made_.sequence->BeginHandOff(receiver_->peer(), 99).status(), "tokens");
  field(made_.sequence->BeginHandOff(receiver_->peer(), UINT64_MAX).status(), "tokens");
  EXPECT_CODE(made_.sequence->BeginHandOff("127.0.0.1:1", 100), kUnavailable);
  ASSERT_OK_AND_ASSIGN(hand_off_, made_.sequence->BeginHandOff(receiver_->peer(), 100));
  field(hand_off_->Finish(std::string((1 << 20) + 1, 'b')).status(), "blob");
  EXPECT_OK(hand_off_->Finish("good"));
  EXPECT_OK(other_->Claim(hand_off_->ticket()));
}

TEST_F(StreamTest, OffersWaitForRoomInTheirOrder) {
  Start({}, {.host_pool_bytes = 4 << 20});
  // The receiver is full of what somebody holds.
  ASSERT_OK_AND_ASSIGN(CreatedSequence holder, other_->CreateSequence());
  ASSERT_OK(Load(*other_, holder.sequence->id(), source_, 0, 48 * 64, 1024));
  ASSERT_OK_AND_ASSIGN(made_, cache_->CreateSequence());
  ASSERT_OK(Load(*cache_, made_.sequence->id(), source_, 0, 30 * 64, 1024));
  EXPECT_CODE(made_.sequence->HandOff(receiver_->peer(), ""), kResourceExhausted);
  EXPECT_CODE(made_.sequence->HandOff(receiver_->peer(), "", 10000, 100), kResourceExhausted);
  auto first = made_.sequence->HandOffAsync(receiver_->peer(), "first", 20000, 20000);
  const auto waiting = [&] {
    const auto page = Scrape(*receiver_);
    return page.ok() ? page->Sum("kvmanager_hand_offs_waiting") : -1;
  };
  EXPECT_TRUE(Eventually([&] { return waiting() == 1; }));
  ASSERT_OK_AND_ASSIGN(CreatedSequence small, cache_->CreateSequence());
  ASSERT_OK(Load(*cache_, small.sequence->id(), source_, 0, 10, 10));
  // A small one does not pass it.
  EXPECT_CODE(small.sequence->HandOff(receiver_->peer(), ""), kResourceExhausted);
  auto second = small.sequence->BeginHandOffAsync(receiver_->peer(), 64 * 64, 20000, 20000);
  EXPECT_TRUE(Eventually([&] { return waiting() == 2; }));
  EXPECT_FALSE(first.ready());
  EXPECT_FALSE(second.ready());
  holder.sequence.reset();
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, first.Wait());
  EXPECT_EQ(waiting(), 1);  // 64 pages in each layer do not fit beside 30
  EXPECT_FALSE(second.ready());
  ASSERT_OK(other_->Claim(sent.ticket));  // and dropped
  ASSERT_OK_AND_ASSIGN(hand_off_, second.Wait());
  EXPECT_EQ(waiting(), 0);
}

TEST_F(StreamTest, SixteenAtOnce) {
  Start();
  constexpr int kHandOffs = 16;
  std::vector<CreatedSequence> made(kHandOffs);
  std::vector<Pending<absl::StatusOr<std::unique_ptr<HandOff>>>> begun;
  std::vector<std::unique_ptr<HandOff>> hand_offs;
  std::vector<Pending<absl::StatusOr<ClaimedSequence>>> claims;
  std::vector<Pending<absl::StatusOr<HandOffOutcome>>> finished;
  const auto source = [&](int i) { return Source{uint64_t(100 + i), Kind::kNormal, options_}; };
  for (int i = 0; i < kHandOffs; ++i) {
    ASSERT_OK_AND_ASSIGN(made[i], cache_->CreateSequence());
    begun.push_back(made[i].sequence->BeginHandOffAsync(receiver_->peer(), 64 * 3 + i, 20000, 0));
  }
  for (auto& each : begun) {
    ASSERT_OK_AND_ASSIGN(auto hand_off, each.Wait());
    claims.push_back(other_->ClaimAsync(hand_off->ticket(), 20000));
    hand_offs.push_back(std::move(hand_off));
  }
  for (int layer = 0; layer < options_.layers; ++layer) {
    for (int i = 0; i < kHandOffs; ++i) {
      ASSERT_OK(LoadLayer(*cache_, made[i].sequence->id(), source(i), layer, 0, 64 * 3 + i));
    }
  }
  for (int i = 0; i < kHandOffs; ++i) finished.push_back(hand_offs[i]->FinishAsync(std::to_string(i)));
  for (int i = 0; i < kHandOffs; ++i) {
    ASSERT_OK(finished[i].Wait());
    ASSERT_OK_AND_ASSIGN(const ClaimedSequence claimed, claims[i].Wait());
    EXPECT_EQ(claimed.blob, std::to_string(i));
    EXPECT_EQ(claimed.tokens, uint64_t(64 * 3 + i));
    ASSERT_OK_AND_ASSIGN(const auto went, Ask(*other_, claimed.sequence->id(), source(i), 64 * 3 + i - 1));
    ASSERT_OK_AND_ASSIGN(const auto stayed, Ask(*cache_, made[i].sequence->id(), source(i), 64 * 3 + i - 1));
    EXPECT_EQ(went, stayed);
  }
  hand_offs.clear();
  made.clear();
  ExpectNothingAt(*there_);
}

}  // namespace
}  // namespace kvmanager::testing
