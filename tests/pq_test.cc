// PQ through daemons: what queries read, prompts said and found, forks, crops and hand-offs.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/client.h"
#include "codecs/pq/pq_parameters.h"
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
using client::StepResult;

constexpr char kPq[] = "pq:m=4,bits=4,ratio=0.2,sinks=8,iterations=3";
constexpr int kPrompt = 150, kTokens = 330;

class PqTest : public ::testing::Test {
 protected:
  void SetUp() override {
    DaemonOptions options;
    options.more_flags = {"--threads", "2"};
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(peer_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(client_, Client::Connect(daemon_->listen(), {}));
    ASSERT_OK_AND_ASSIGN(peer_client_, Client::Connect(peer_->listen(), {}));
  }
  void TearDown() override {
    client_.reset();
    peer_client_.reset();
  }

  /// Outputs of tokens kPrompt .. kTokens - 1 of a sequence whose prompt was said.
  std::vector<float> Reference(client::Cache& cache, const Source& source, StepResult* counts = nullptr) {
    auto made = cache.CreateSequence({}, kPrompt);
    EXPECT_OK(made);
    EXPECT_OK(Load(cache, made->sequence->id(), source, 0, kPrompt, 64));
    auto out = Feed(cache, made->sequence->id(), source, kPrompt, kTokens - kPrompt, 48, counts);
    EXPECT_OK(out);
    return *out;
  }

  std::unique_ptr<DaemonProcess> daemon_, peer_;
  std::unique_ptr<Client> client_, peer_client_;
};

TEST_F(PqTest, AFullRatioReadsAllAndEqualsRaw) {
  const CacheOptions options = SmallCache("pq:m=4,bits=4,ratio=1,sinks=8,iterations=2");
  const Source source{7, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  StepResult counts, raw_counts;
  const std::vector<float> out = Reference(*cache, source, &counts);
  ASSERT_OK_AND_ASSIGN(auto raw, client_->OpenCache(SmallCache("raw")));
  const std::vector<float> exact = Reference(*raw, source, &raw_counts);
  // An odd number of tokens behind the sinks leaves one out: the halves are rounded down.
  const size_t row = options.query_heads * options.head_dim, tokens = kTokens - kPrompt;
  for (int layer = 0; layer < options.layers; ++layer) {
    for (size_t t = (kPrompt + 1) % 2; t < tokens; t += 2) {
      const size_t at = (layer * tokens + t) * row;
      EXPECT_LT(LargestDifference(absl::MakeConstSpan(&out[at], row), absl::MakeConstSpan(&exact[at], row)), 1e-5);
    }
  }
  EXPECT_EQ(counts.encoded_pairs, 0u);
  EXPECT_LE(counts.raw_pairs, raw_counts.raw_pairs);
  EXPECT_GE(counts.raw_pairs + 2 * (kTokens - kPrompt), raw_counts.raw_pairs);
}

TEST_F(PqTest, QueriesBehindThePromptReadWhatTheBudgetSays) {
  const CacheOptions options = SmallCache(kPq);
  const Source source{8, Kind::kOutliers, options};
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence({}, kPrompt));
  StepResult counts;
  // One chunk goes across the end of the prompt.
  ASSERT_OK(Feed(*cache, made.sequence->id(), source, 0, kTokens, 100, &counts));
  ASSERT_OK_AND_ASSIGN(const CodecSpec spec, ParseCodecSpec(kPq));
  PageLayout layout;
  layout.head_dim = 64;
  ASSERT_OK_AND_ASSIGN(const pq::Parameters parameters, pq::ParseParameters(layout, spec.parameters));
  uint64_t pairs = 0;
  for (uint64_t p = 0; p < kTokens; ++p) pairs += p < kPrompt ? p + 1 : parameters.ReadsOf(p).total(p);
  EXPECT_EQ(counts.raw_pairs, pairs * options.layers);
  EXPECT_EQ(counts.encoded_pairs, 0u);
}

TEST_F(PqTest, ChunksAndAPromptThatIsFoundReadTheSameBits) {
  for (const char* const more : {"", ",rebuild=64", ",cache_blocks=1", ",scores=exact"}) {
    const CacheOptions options = SmallCache(absl::StrCat(kPq, more));
    const Source source{9, Kind::kNormal, options};
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    const std::vector<float> wanted = Reference(*cache, source);
    // Not said: the first single token ends the prompt.
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
    ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, kPrompt, kPrompt));
    ASSERT_OK_AND_ASSIGN(const std::vector<float> first, Feed(*cache, made.sequence->id(), source, kPrompt, 40, 1));
    ASSERT_OK_AND_ASSIGN(const std::vector<float> rest,
                         Feed(*cache, made.sequence->id(), source, kPrompt + 40, kTokens - kPrompt - 40, 7));
    const size_t row = options.query_heads * options.head_dim, tokens = kTokens - kPrompt;
    for (int layer = 0; layer < options.layers; ++layer) {
      for (size_t t = 0; t < tokens; ++t) {
        const float* got = t < 40 ? &first[(layer * 40 + t) * row] : &rest[(layer * (tokens - 40) + t - 40) * row];
        ASSERT_TRUE(std::equal(got, got + row, &wanted[(layer * tokens + t) * row]))
            << more << " layer " << layer << " token " << t;
      }
    }
  }
}

TEST_F(PqTest, ForksCropsPrefixHitsAndHandOffsReadTheSameBits) {
  const CacheOptions options = SmallCache(kPq);
  const Source source{10, Kind::kNormal, options}, other{11, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  const std::vector<float> wanted = Reference(*cache, source);
  const int rest = kTokens - kPrompt;

  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence({}, kPrompt));
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, kPrompt, 64));
  ASSERT_OK_AND_ASSIGN(auto fork, made.sequence->Fork());
  ASSERT_OK_AND_ASSIGN(const std::vector<float> forked, Feed(*cache, fork->id(), source, kPrompt, rest, 48));
  EXPECT_EQ(forked, wanted);

  // Tokens that are taken back leave nothing: neither behind the prompt nor in it.
  ASSERT_OK(Feed(*cache, made.sequence->id(), other, kPrompt, 70, 10));
  ASSERT_OK(made.sequence->Crop(kPrompt));
  ASSERT_OK_AND_ASSIGN(const std::vector<float> cropped, Feed(*cache, made.sequence->id(), source, kPrompt, rest, 48));
  EXPECT_EQ(cropped, wanted);
  ASSERT_OK(made.sequence->Crop(100));
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 100, kPrompt - 100, 64));
  ASSERT_OK(made.sequence->Publish(Names(*cache, source, kPrompt / 64)));
  ASSERT_OK_AND_ASSIGN(const std::vector<float> refilled, Feed(*cache, made.sequence->id(), source, kPrompt, rest, 48));
  EXPECT_EQ(refilled, wanted);

  ASSERT_OK_AND_ASSIGN(CreatedSequence hit, cache->CreateSequence(Names(*cache, source, kPrompt / 64), kPrompt));
  EXPECT_EQ(hit.match.hit_blocks, kPrompt / 64);
  const int at = kPrompt / 64 * 64;
  ASSERT_OK(Load(*cache, hit.sequence->id(), source, at, kPrompt - at, 64));
  ASSERT_OK_AND_ASSIGN(const HandOffOutcome sent, hit.sequence->HandOff(peer_->peer(), ""));
  ASSERT_OK_AND_ASSIGN(const std::vector<float> shared, Feed(*cache, hit.sequence->id(), source, kPrompt, rest, 48));
  EXPECT_EQ(shared, wanted);

  ASSERT_OK_AND_ASSIGN(auto peer_cache, peer_client_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(ClaimedSequence claimed, peer_cache->Claim(sent.ticket));
  ASSERT_OK_AND_ASSIGN(const std::vector<float> there,
                       Feed(*peer_cache, claimed.sequence->id(), source, kPrompt, rest, 48));
  EXPECT_EQ(there, wanted);
}

TEST_F(PqTest, APromptBeyondASequenceIsRefused) {
  const CacheOptions options = SmallCache(kPq);
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  EXPECT_TRUE(absl::IsInvalidArgument(cache->CreateSequence({}, UINT64_MAX).status()));
  EXPECT_OK(cache->CreateSequence({}, kPrompt));
}

TEST_F(PqTest, SequencesThatGoWhileTheyAreTrainedLeaveNothing) {
  const CacheOptions options = SmallCache("pq:m=4,bits=6,iterations=300");
  const Source source{12, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  for (int i = 0; i < 10; ++i) {
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence({}, 500));
    ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 500, 500));
    if (i % 2 == 0) {
      ASSERT_OK(made.sequence->Crop(200));
    }
  }
  EXPECT_TRUE(Eventually([&] {
    const auto status = client_->Status();
    return status.ok() && status->pools.at(0).used_bytes == 0;
  }));
}

}  // namespace
}  // namespace kvmanager::testing
