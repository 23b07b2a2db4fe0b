// One daemon, its client library, and everything between: what is appended is what attention reads.
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "client/client.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"
#include "tests/harness.h"
#include "tests/matchers.h"
#include "tests/model.h"

namespace kvmanager::testing {
namespace {

using client::Cache;
using client::CacheOptions;
using client::Client;
using client::CreatedSequence;
using client::StepBatch;
using client::StepEntry;
using client::StepResult;
using client::TensorView;

constexpr char kHack[] = "hack:k_bits=3,v_bits=2";
constexpr char kHackToken[] = "hack:k_axis=token,k_bits=2,v_bits=2,part=64,meta=16";
constexpr char kHackEight[] = "hack:k_bits=8,v_bits=8";
// Raw pages differ from doubles by fp32 accumulation; HACK also by q and P in 8 bits.
constexpr double kRawError = 2e-4;
constexpr double kHackError = 0.04;

double ErrorBound(const std::string& codec) { return codec == "raw" ? kRawError : kHackError; }

class IntegrationTest : public ::testing::Test {
 protected:
  void SetUp() override {
    DaemonOptions options;
    options.more_flags = {"--threads", "2"};
    ASSERT_OK_AND_ASSIGN(daemon_, DaemonProcess::Start(options));
    ASSERT_OK_AND_ASSIGN(client_, Client::Connect(daemon_->listen(), {}));
  }
  void TearDown() override { client_.reset(); }

  uint64_t UsedBytes() {
    absl::StatusOr<client::DaemonDescription> status = client_->Status();
    EXPECT_OK(status);
    uint64_t used = 0;
    if (status.ok()) {
      for (const client::PoolDescription& pool : status->pools) used += pool.used_bytes;
    }
    return used;
  }
  /// The pool's use once encoding has settled: raw forms go when a worker is done.
  uint64_t SettledBytes(Cache& cache, uint64_t raw_pages_left) {
    EXPECT_TRUE(Eventually([&] {
      absl::StatusOr<client::CacheDescription> now = cache.Refresh();
      return now.ok() && now->resident_raw_bytes <= raw_pages_left * now->raw_page_bytes;
    })) << "raw pages stay: "
        << cache.Refresh()->resident_raw_bytes << " bytes, expected at most " << raw_pages_left << " pages";
    return UsedBytes();
  }

  std::unique_ptr<DaemonProcess> daemon_;
  std::unique_ptr<Client> client_;
};

TEST_F(IntegrationTest, HelloTellsWhoAnswers) {
  EXPECT_NE(client_->boot_epoch(), 0u);
  EXPECT_TRUE(client_->connected());
  EXPECT_EQ(client_->peer_address(), daemon_->peer());
  EXPECT_OK(client_->Ping());
}

TEST_F(IntegrationTest, OpeningTwiceFindsTheSameCache) {
  ASSERT_OK_AND_ASSIGN(auto a, client_->OpenCache(SmallCache(kHack)));
  ASSERT_OK_AND_ASSIGN(auto b, client_->OpenCache(SmallCache("hack:v_bits=2,k_bits=3")));
  EXPECT_EQ(a->description().id, b->description().id);
  EXPECT_TRUE(a->description().digest == b->description().digest);
  CacheOptions other = SmallCache(kHack);
  other.tenant = "another";
  ASSERT_OK_AND_ASSIGN(auto c, client_->OpenCache(other));
  EXPECT_NE(a->description().id, c->description().id);
  EXPECT_FALSE(a->description().digest == c->description().digest);
  EXPECT_LT(a->description().payload_page_bytes, a->description().raw_page_bytes / 4);
}

struct Case {
  std::string codec;
  int lag = 2;
  Kind kind = Kind::kNormal;
  DType dtype = DType::kFloat16;
  int head_dim = 64;
};

void PrintTo(const Case& c, std::ostream* out) {
  *out << c.codec << " lag " << c.lag << " kind " << int(c.kind) << " dtype " << int(c.dtype);
}

class AttentionTest : public IntegrationTest, public ::testing::WithParamInterface<Case> {};

TEST_P(AttentionTest, DecodeAndPrefillAgreeWithTheModelHoweverTheyAreChunked) {
  const Case& c = GetParam();
  CacheOptions options = SmallCache(c.codec, c.lag, 64, c.head_dim);
  options.dtype = c.dtype;
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  const Source source{7, c.kind, options};
  constexpr int kTokens = 64 * 5 + 23;
  ModelSequence model(options);
  StepResult expected_counts;
  const std::vector<double> expected = FeedModel(model, source, 0, kTokens, 61, &expected_counts);
  std::vector<float> first;
  for (const int chunk : {kTokens, 1, 64, 37}) {
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
    StepResult counts;
    ASSERT_OK_AND_ASSIGN(const std::vector<float> out,
                         Feed(*cache, made.sequence->id(), source, 0, kTokens, chunk, &counts));
    EXPECT_LT(RelativeError(out, expected), ErrorBound(c.codec)) << "chunk " << chunk;
    EXPECT_EQ(counts.encoded_pairs, expected_counts.encoded_pairs) << "chunk " << chunk;
    EXPECT_EQ(counts.raw_pairs, expected_counts.raw_pairs) << "chunk " << chunk;
    if (first.empty()) first = out;
    // Splits and merges may round differently; what is read may not differ.
    double norm = 0;
    for (const double x : expected) norm = std::max(norm, std::abs(x));
    EXPECT_LT(LargestDifference(out, first), (c.codec == "raw" ? 1e-4 : 2e-2) * norm) << "chunk " << chunk;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Codecs, AttentionTest,
    ::testing::Values(Case{"raw"}, Case{"raw", 0}, Case{"raw", 2, Kind::kOutliers}, Case{"raw", 2, Kind::kTiny},
                      Case{"raw", 2, Kind::kHuge}, Case{"raw", 2, Kind::kRepeated},
                      Case{"raw", 2, Kind::kNormal, DType::kBFloat16},
                      Case{"raw", 2, Kind::kNormal, DType::kFloat16, 128}, Case{kHack}, Case{kHack, 0},
                      Case{kHack, 1, Kind::kOutliers}, Case{kHack, 2, Kind::kConstant}, Case{kHack, 1, Kind::kRepeated},
                      Case{kHack, 2, Kind::kNormal, DType::kBFloat16},
                      Case{kHack, 2, Kind::kOutliers, DType::kFloat16, 128}, Case{kHackEight, 0}, Case{kHackToken, 0},
                      Case{"hack:k_bits=2,v_bits=1", 2}, Case{"hack:k_bits=4,v_bits=3,rotation=none", 1},
                      Case{"hack:k_axis=token,k_bits=4,v_bits=4,part=32,meta=16,q=asymmetric", 1}));

TEST_F(IntegrationTest, ArenaAndInlineTensorsGiveTheSameBits) {
  const CacheOptions options = SmallCache(kHack, 1);
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  ASSERT_OK_AND_ASSIGN(auto arena, client_->CreateArena(4 << 20));
  ASSERT_EQ(arena->data().size(), size_t{4} << 20);
  const Source source{11, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(CreatedSequence inline_made, cache->CreateSequence());
  ASSERT_OK_AND_ASSIGN(CreatedSequence arena_made, cache->CreateSequence());
  constexpr int kTokens = 64 * 3 + 9, kChunk = 50;
  ASSERT_OK_AND_ASSIGN(const std::vector<float> expected,
                       Feed(*cache, inline_made.sequence->id(), source, 0, kTokens, kChunk));
  const size_t row = size_t(options.query_heads) * options.head_dim;
  for (int done = 0; done < kTokens; done += kChunk) {
    const int n = std::min(kChunk, kTokens - done);
    for (int layer = 0; layer < options.layers; ++layer) {
      size_t used = 0;
      auto place = [&](const void* bytes, size_t size) {
        const size_t offset = used;
        used = (used + size + 63) / 64 * 64;
        if (bytes != nullptr) memcpy(arena->data().data() + offset, bytes, size);
        return arena->View(offset, size);
      };
      const std::vector<uint8_t> k = source.K(layer, done, n), v = source.V(layer, done, n);
      const std::vector<float> q = source.Q(layer, done, n);
      const StepEntry entry{arena_made.sequence->id(), uint64_t(done), n};
      StepBatch batch;
      batch.layer = layer;
      batch.entries = absl::MakeConstSpan(&entry, 1);
      batch.k = place(k.data(), k.size());
      batch.v = place(v.data(), v.size());
      batch.q = place(q.data(), q.size() * 4);
      batch.out = place(nullptr, q.size() * 4);
      batch.lse = place(nullptr, size_t(n) * options.query_heads * 4);
      ASSERT_OK(cache->Step(batch));
      const float* const want = expected.data() + (size_t(layer) * kTokens + done) * row;
      EXPECT_EQ(memcmp(batch.out.data, want, n * row * 4), 0) << "layer " << layer << " token " << done;
      const float* const lse = static_cast<const float*>(batch.lse.data);
      for (int i = 0; i < n * options.query_heads; ++i) ASSERT_TRUE(std::isfinite(lse[i]));
    }
  }
}

TEST_F(IntegrationTest, ABatchIsItsSequencesOneByOne) {
  for (const std::string codec : {"raw", kHack}) {
    const CacheOptions options = SmallCache(codec, 1);
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    std::vector<std::unique_ptr<client::Sequence>> sequences;
    std::vector<Source> sources;
    std::vector<ModelSequence> models;
    const std::vector<int> context = {0, 1, 63, 64, 200, 330};
    for (size_t i = 0; i < context.size(); ++i) {
      ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
      sources.push_back({100 + i, Kind::kNormal, options});
      models.emplace_back(options);
      ASSERT_OK(Load(*cache, made.sequence->id(), sources[i], 0, context[i], 48));
      LoadModel(models[i], sources[i], 0, context[i], 48);
      sequences.push_back(std::move(made.sequence));
    }
    const std::vector<int> tokens = {5, 1, 1, 70, 1, 3};
    for (int layer = 0; layer < options.layers; ++layer) {
      std::vector<StepEntry> entries;
      std::vector<uint8_t> k, v;
      std::vector<float> q;
      for (size_t i = 0; i < context.size(); ++i) {
        entries.push_back({sequences[i]->id(), uint64_t(context[i]), tokens[i]});
        const std::vector<uint8_t> ki = sources[i].K(layer, context[i], tokens[i]);
        const std::vector<uint8_t> vi = sources[i].V(layer, context[i], tokens[i]);
        const std::vector<float> qi = sources[i].Q(layer, context[i], tokens[i]);
        k.insert(k.end(), ki.begin(), ki.end());
        v.insert(v.end(), vi.begin(), vi.end());
        q.insert(q.end(), qi.begin(), qi.end());
        models[i].Append(layer, ki, vi);
      }
      std::vector<float> out(q.size()), lse(q.size() / options.head_dim);
      StepBatch batch;
      batch.layer = layer;
      batch.entries = entries;
      batch.k = TensorView::Inline(k.data(), k.size());
      batch.v = TensorView::Inline(v.data(), v.size());
      batch.q = TensorView::Inline(q.data(), q.size() * 4);
      batch.out = TensorView::Inline(out.data(), out.size() * 4);
      batch.lse = TensorView::Inline(lse.data(), lse.size() * 4);
      ASSERT_OK(cache->Step(batch));
      size_t at = 0, lse_at = 0;
      for (size_t i = 0; i < context.size(); ++i) {
        const ModelSequence::Output want =
            models[i].Attend(layer, context[i], tokens[i], sources[i].Q(layer, context[i], tokens[i]));
        const absl::Span<const float> got = absl::MakeConstSpan(out).subspan(at, want.out.size());
        EXPECT_LT(RelativeError(got, want.out), ErrorBound(codec)) << codec << " entry " << i;
        for (const double x : want.lse) EXPECT_NEAR(lse[lse_at++], x, codec == "raw" ? 1e-3 : 0.1);
        at += want.out.size();
      }
    }
  }
}

TEST_F(IntegrationTest, QueriesAndOutputsInHalfPrecision) {
  const CacheOptions options = SmallCache("raw");
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  const Source source{3, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 150, 150));
  ModelSequence model(options);
  LoadModel(model, source, 0, 150, 150);
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    std::vector<float> q = source.Q(0, 149, 1);
    std::vector<uint16_t> half(q.size()), out(q.size());
    for (size_t i = 0; i < q.size(); ++i) {
      StoreElement(half.data(), dtype, i, q[i]);
      q[i] = LoadElement(half.data(), dtype, i);
    }
    const StepEntry entry{made.sequence->id(), 149, 1};
    StepBatch batch;
    batch.entries = absl::MakeConstSpan(&entry, 1);
    batch.q_dtype = dtype;
    batch.q = TensorView::Inline(half.data(), half.size() * 2);
    batch.out = TensorView::Inline(out.data(), out.size() * 2);
    ASSERT_OK(cache->Step(batch));
    std::vector<float> got(out.size());
    for (size_t i = 0; i < out.size(); ++i) got[i] = LoadElement(out.data(), dtype, i);
    EXPECT_LT(RelativeError(got, model.Attend(0, 149, 1, q).out), dtype == DType::kFloat16 ? 2e-3 : 1e-2);
  }
}

TEST_F(IntegrationTest, ARetriedAppendCannotAppendTwice) {
  const CacheOptions options = SmallCache("raw");
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  const Source source{3, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 10, 10));
  EXPECT_CODE(Load(*cache, made.sequence->id(), source, 0, 10, 10), kFailedPrecondition);
  ASSERT_OK_AND_ASSIGN(const client::SequenceDescription info, made.sequence->Info());
  EXPECT_EQ(info.tokens, 10u);
}

TEST_F(IntegrationTest, AnEqualPrefixIsComputedAndKeptOnce) {
  for (const std::string codec : {"raw", kHack}) {
    constexpr int kPrefix = 2048, kBlocks = kPrefix / 64;
    const CacheOptions options = SmallCache(codec, 2);
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    const Source source{21, Kind::kNormal, options};
    ASSERT_OK_AND_ASSIGN(CreatedSequence first, cache->CreateSequence());
    ASSERT_OK(Load(*cache, first.sequence->id(), source, 0, kPrefix, 64));
    const std::vector<BlockName> names = Names(*cache, source, kBlocks);
    ASSERT_OK_AND_ASSIGN(const client::PublishOutcome published, first.sequence->Publish(names));
    EXPECT_EQ(published.published, kBlocks);

    // Another client, and so perhaps another engine, finds it.
    ASSERT_OK_AND_ASSIGN(auto other_client, Client::Connect(daemon_->listen(), {}));
    ASSERT_OK_AND_ASSIGN(auto other_cache, other_client->OpenCache(options));
    EXPECT_EQ(other_cache->description().id, cache->description().id);
    const absl::Span<const BlockName> all = names;
    ASSERT_OK_AND_ASSIGN(const std::vector<client::PrefixMatch> match,
                         other_cache->Match(absl::MakeConstSpan(&all, 1)));
    ASSERT_EQ(match.size(), 1u);
    EXPECT_EQ(match[0].hit_blocks, kBlocks);
    ASSERT_OK_AND_ASSIGN(CreatedSequence second, other_cache->CreateSequence(names));
    ASSERT_EQ(second.match.hit_blocks, kBlocks);
    EXPECT_EQ(second.match.reason, client::Miss::kNone);
    ASSERT_OK_AND_ASSIGN(const client::SequenceDescription info, second.sequence->Info());
    EXPECT_EQ(info.tokens, uint64_t{kPrefix});
    EXPECT_EQ(info.hit_blocks, kBlocks);

    // Only the suffix is computed, and it reads what the first sequence wrote.
    ModelSequence model(options);
    LoadModel(model, source, 0, kPrefix, 64);
    model.MarkShared(kPrefix);
    const std::vector<double> expected = FeedModel(model, source, kPrefix, 40, 40);
    ASSERT_OK_AND_ASSIGN(const std::vector<float> got,
                         Feed(*other_cache, second.sequence->id(), source, kPrefix, 40, 40));
    EXPECT_LT(RelativeError(got, expected), ErrorBound(codec)) << codec;

    // The prefix once (its last pages raw and encoded), and two open pages at most.
    const uint64_t pages = uint64_t{kBlocks} * options.layers;
    const client::CacheDescription& d = cache->description();
    const uint64_t open_pages = options.layers;
    // The first page is a sink; the last three are read raw.
    const uint64_t raw_left = codec == "raw" ? pages + open_pages : 4 * options.layers + open_pages;
    SettledBytes(*cache, raw_left);
    ASSERT_OK_AND_ASSIGN(const client::CacheDescription now, cache->Refresh());
    EXPECT_EQ(now.published_blocks, uint64_t{kBlocks});
    EXPECT_EQ(now.sequences, 2u);
    if (codec == "raw") {
      EXPECT_LE(now.resident_raw_bytes + now.resident_encoded_bytes, (pages + open_pages) * d.raw_page_bytes);
    } else {
      EXPECT_LE(now.resident_encoded_bytes, pages * d.encoded_page_bytes);
    }
    ASSERT_OK_AND_ASSIGN(const MetricsPage page, Scrape(*daemon_));
    const double on_page = page.Sum("kvmanager_page_bytes");
    EXPECT_GT(on_page, 0);
    EXPECT_LE(on_page, double(now.resident_raw_bytes + now.resident_encoded_bytes) + 1) << "shared bytes count once";

    // A third sequence with another 17th block hits 16.
    std::vector<BlockName> differs(names.begin(), names.end());
    for (size_t i = 16; i < differs.size(); ++i) differs[i].key.bytes[5] ^= 1;
    ASSERT_OK_AND_ASSIGN(CreatedSequence third, cache->CreateSequence(differs));
    EXPECT_EQ(third.match.hit_blocks, 16);
    EXPECT_EQ(third.match.reason, client::Miss::kNotFound);
    // A key with other tokens behind it is a miss with its reason, never an answer.
    std::vector<BlockName> lies(names.begin(), names.begin() + 4);
    lies[2].tokens.bytes[0] ^= 1;
    ASSERT_OK_AND_ASSIGN(CreatedSequence fourth, cache->CreateSequence(lies));
    EXPECT_EQ(fourth.match.hit_blocks, 2);
    EXPECT_EQ(fourth.match.reason, client::Miss::kTokenMismatch);

    first.sequence.reset();
    second.sequence.reset();
    third.sequence.reset();
    fourth.sequence.reset();
    ASSERT_OK_AND_ASSIGN(const uint64_t purged, client_->Purge(cache->description().id));
    EXPECT_EQ(purged, uint64_t{kBlocks});
    EXPECT_TRUE(Eventually([&] { return UsedBytes() == 0; })) << UsedBytes();
  }
}

TEST_F(IntegrationTest, ForksDivergeAndBothAreRight) {
  for (const std::string codec : {"raw", kHack}) {
    const CacheOptions options = SmallCache(codec, 1);
    ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
    const Source common{31, Kind::kNormal, options}, left{32, Kind::kNormal, options},
        right{33, Kind::kOutliers, options};
    constexpr int kCommon = 64 * 4 + 30;
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
    ASSERT_OK(Load(*cache, made.sequence->id(), common, 0, kCommon, 40));
    ModelSequence model_left(options);
    LoadModel(model_left, common, 0, kCommon, 40);
    ModelSequence model_right = model_left;
    const uint64_t before = UsedBytes();
    ASSERT_OK_AND_ASSIGN(auto fork, made.sequence->Fork());
    EXPECT_LE(UsedBytes(), before + 2 * cache->description().raw_page_bytes) << "only open pages are copied";
    for (int step = 0; step < 3; ++step) {
      const int at = kCommon + step * 50;
      ASSERT_OK_AND_ASSIGN(const std::vector<float> l, Feed(*cache, made.sequence->id(), left, at, 50, 50));
      ASSERT_OK_AND_ASSIGN(const std::vector<float> r, Feed(*cache, fork->id(), right, at, 50, 7));
      EXPECT_LT(RelativeError(l, FeedModel(model_left, left, at, 50, 50)), ErrorBound(codec)) << codec;
      EXPECT_LT(RelativeError(r, FeedModel(model_right, right, at, 50, 7)), ErrorBound(codec)) << codec;
    }
    // The parent's end does not touch the fork.
    made.sequence.reset();
    ASSERT_OK_AND_ASSIGN(const std::vector<float> r, Feed(*cache, fork->id(), right, kCommon + 150, 5, 5));
    EXPECT_LT(RelativeError(r, FeedModel(model_right, right, kCommon + 150, 5, 5)), ErrorBound(codec)) << codec;
  }
}

TEST_F(IntegrationTest, CropGivesBackTokensDownToTheEncodedPages) {
  const CacheOptions raw = SmallCache("raw");
  ASSERT_OK_AND_ASSIGN(auto raw_cache, client_->OpenCache(raw));
  const Source source{41, Kind::kNormal, raw}, again{42, Kind::kNormal, raw};
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, raw_cache->CreateSequence());
  ASSERT_OK(Load(*raw_cache, made.sequence->id(), source, 0, 400, 30));
  ModelSequence model(raw);
  LoadModel(model, source, 0, 400, 30);
  for (const int to : {399, 384, 130, 128, 5, 0}) {
    ASSERT_OK(made.sequence->Crop(to)) << to;
    model.Crop(to);
    ASSERT_OK_AND_ASSIGN(const std::vector<float> got, Feed(*raw_cache, made.sequence->id(), again, to, 3, 3));
    EXPECT_LT(RelativeError(got, FeedModel(model, again, to, 3, 3)), kRawError) << to;
  }
  EXPECT_TRUE(NamesField(made.sequence->Crop(1000), absl::StatusCode::kInvalidArgument, "tokens"));

  const CacheOptions hack = SmallCache(kHack, 1);
  ASSERT_OK_AND_ASSIGN(auto hack_cache, client_->OpenCache(hack));
  const Source hack_source{43, Kind::kNormal, hack};
  ASSERT_OK_AND_ASSIGN(CreatedSequence coded, hack_cache->CreateSequence());
  ModelSequence coded_model(hack);
  ASSERT_OK(Load(*hack_cache, coded.sequence->id(), hack_source, 0, 400, 16));
  LoadModel(coded_model, hack_source, 0, 400, 16);
  // The last append began in page 6: pages 0..4 have aged.
  ASSERT_EQ(coded_model.encoded_tokens(), 320u);
  // The encoder may still hold a raw form; what is refused does not depend on that.
  const absl::Status refused = coded.sequence->Crop(300);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition) << refused.ToString();
  EXPECT_NE(refused.ToString().find("256"), std::string::npos) << "the boundary below: " << refused.ToString();
  ASSERT_OK_AND_ASSIGN(const client::SequenceDescription info, coded.sequence->Info());
  EXPECT_EQ(info.tokens, 400u);
  ASSERT_OK(coded.sequence->Crop(330));
  coded_model.Crop(330);
  ASSERT_OK_AND_ASSIGN(const std::vector<float> got, Feed(*hack_cache, coded.sequence->id(), hack_source, 330, 9, 4));
  EXPECT_LT(RelativeError(got, FeedModel(coded_model, hack_source, 330, 9, 4)), kHackError);
  ASSERT_OK(coded.sequence->Crop(256));
  coded_model.Crop(256);
  StepResult counts, expected_counts;
  ASSERT_OK_AND_ASSIGN(const std::vector<float> after,
                       Feed(*hack_cache, coded.sequence->id(), hack_source, 256, 70, 70, &counts));
  EXPECT_LT(RelativeError(after, FeedModel(coded_model, hack_source, 256, 70, 70, &expected_counts)), kHackError);
  EXPECT_EQ(counts.encoded_pairs, expected_counts.encoded_pairs) << "aged pages stay encoded after a crop";
}

TEST_F(IntegrationTest, AQueryInsideAnEncodedPageIsRefused) {
  // Only raw pages are ever seen in part: a query whose own page is kept encoded would see tokens after it.
  const CacheOptions options = SmallCache(kHack, 1);
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  const Source source{45, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 400, 16));
  ModelSequence model(options);
  LoadModel(model, source, 0, 400, 16);
  ASSERT_EQ(model.encoded_tokens(), 320u);
  for (const uint64_t position : {64, 100, 126, 318}) {
    const absl::StatusOr<std::vector<float>> refused = Ask(*cache, made.sequence->id(), source, position);
    EXPECT_FALSE(refused.ok()) << "position " << position;
  }
  EXPECT_FALSE(Ask(*cache, made.sequence->id(), source, 310, 40).ok()) << "from an encoded page into raw ones";
  // The last token of an encoded page sees all of it.
  // The first page is a sink, and raw.
  for (const uint64_t position : {0, 62, 63, 127, 319, 320, 350, 384, 399}) {
    ASSERT_OK_AND_ASSIGN(const std::vector<float> got, Ask(*cache, made.sequence->id(), source, position));
    EXPECT_LT(RelativeError(got, AskModel(model, source, position)), kHackError) << "position " << position;
  }
}

TEST_F(IntegrationTest, EqualBlocksArePublishedOnceAndGivenUpOnceAged) {
  const CacheOptions options = SmallCache(kHack, 1);
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  const Source source{51, Kind::kNormal, options};
  constexpr int kBlocks = 6, kTokens = kBlocks * 64 + 10;
  ASSERT_OK_AND_ASSIGN(CreatedSequence a, cache->CreateSequence());
  ASSERT_OK_AND_ASSIGN(CreatedSequence b, cache->CreateSequence());
  ASSERT_OK(Load(*cache, a.sequence->id(), source, 0, kTokens, 16));
  ASSERT_OK(Load(*cache, b.sequence->id(), source, 0, kTokens, 16));
  const std::vector<BlockName> names = Names(*cache, source, kBlocks);
  ASSERT_OK_AND_ASSIGN(const client::PublishOutcome first, a.sequence->Publish(names));
  EXPECT_EQ(first.published, kBlocks);
  ASSERT_OK_AND_ASSIGN(const client::PublishOutcome second, b.sequence->Publish(names));
  EXPECT_EQ(second.published, 0);
  EXPECT_EQ(second.shared + second.deferred, kBlocks);
  EXPECT_EQ(second.deferred, 1) << "page 5 is inside the lag of an append that began in page 6";
  ASSERT_OK_AND_ASSIGN(const client::PublishOutcome repeated, a.sequence->Publish(names));
  EXPECT_EQ(repeated.published, 0) << "naming again is no change";
  // Both read on as they did before.
  ASSERT_OK_AND_ASSIGN(const std::vector<float> of_a, Feed(*cache, a.sequence->id(), source, kTokens, 100, 100));
  ASSERT_OK_AND_ASSIGN(const std::vector<float> of_b, Feed(*cache, b.sequence->id(), source, kTokens, 100, 100));
  EXPECT_EQ(of_a, of_b);
  ASSERT_OK_AND_ASSIGN(const client::CacheDescription now, cache->Refresh());
  EXPECT_EQ(now.published_blocks, uint64_t{kBlocks});

  EXPECT_CODE(a.sequence->Publish(Names(*cache, source, 30)), kFailedPrecondition);
  std::vector<BlockName> renamed = names;
  renamed[1].key.bytes[0] ^= 1;
  EXPECT_CODE(a.sequence->Publish(renamed), kFailedPrecondition);
  ASSERT_OK_AND_ASSIGN(CreatedSequence c, cache->CreateSequence());
  ASSERT_OK(Load(*cache, c.sequence->id(), Source{52, Kind::kNormal, options}, 0, 64, 64));
  std::vector<BlockName> lie(names.begin(), names.begin() + 1);
  lie[0].tokens.bytes[3] ^= 1;
  EXPECT_CODE(c.sequence->Publish(lie), kInvalidArgument);
}

TEST_F(IntegrationTest, AFullPoolEvictsWhatNobodyPinsAndThenSaysWhoHoldsIt) {
  DaemonOptions options;
  options.host_pool_bytes = 8 << 20;
  ASSERT_OK_AND_ASSIGN(auto daemon, DaemonProcess::Start(options));
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->listen(), {}));
  const CacheOptions shape = SmallCache("raw");
  ASSERT_OK_AND_ASSIGN(auto cache, client->OpenCache(shape));
  // 1 KiB per token: published contexts of 2 MiB each, dropped at once, are evicted in order of age.
  std::vector<std::vector<BlockName>> names;
  for (uint64_t i = 0; i < 8; ++i) {
    const Source source{200 + i, Kind::kNormal, shape};
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
    ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 2048, 1024)) << i;
    names.push_back(Names(*cache, source, 32));
    ASSERT_OK(made.sequence->Publish(names.back()));
  }
  ASSERT_OK_AND_ASSIGN(CreatedSequence oldest, cache->CreateSequence(names.front()));
  EXPECT_EQ(oldest.match.hit_blocks, 0);
  ASSERT_OK_AND_ASSIGN(CreatedSequence newest, cache->CreateSequence(names.back()));
  EXPECT_EQ(newest.match.hit_blocks, 32);
  ASSERT_OK_AND_ASSIGN(const MetricsPage page, Scrape(*daemon));
  EXPECT_GT(page.Sum("kvmanager_evicted_blocks_total"), 0);
  // Held sequences are never victims.
  std::vector<std::unique_ptr<client::Sequence>> held;
  absl::Status status;
  for (uint64_t i = 0; i < 8 && status.ok(); ++i) {
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
    status = Load(*cache, made.sequence->id(), Source{300 + i, Kind::kNormal, shape}, 0, 2048, 1024);
    held.push_back(std::move(made.sequence));
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status.ToString();
  EXPECT_NE(status.ToString().find("sequence"), std::string::npos) << "names holders: " << status.ToString();
  // Room again after a drop.
  held.clear();
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  EXPECT_OK(Load(*cache, made.sequence->id(), Source{400, Kind::kNormal, shape}, 0, 2048, 1024));
}

TEST_F(IntegrationTest, AsynchronousCallsOverlap) {
  const CacheOptions options = SmallCache(kHack, 1);
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  std::vector<std::unique_ptr<client::Sequence>> sequences;
  const Source source{61, Kind::kNormal, options};
  std::vector<uint8_t> k = source.K(0, 0, 100), v = source.V(0, 0, 100);
  std::vector<StepEntry> entries;
  for (int i = 0; i < 8; ++i) {
    ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
    entries.push_back({made.sequence->id(), 0, 100});
    sequences.push_back(std::move(made.sequence));
  }
  std::vector<client::Pending<absl::StatusOr<StepResult>>> pending;
  for (const StepEntry& entry : entries) {
    StepBatch batch;
    batch.entries = absl::MakeConstSpan(&entry, 1);
    batch.k = TensorView::Inline(k.data(), k.size());
    batch.v = TensorView::Inline(v.data(), v.size());
    pending.push_back(cache->StepAsync(batch));
  }
  for (auto& p : pending) EXPECT_OK(p.Wait());
  // A call that is given up does no harm.
  {
    StepBatch batch;
    const StepEntry entry{sequences[0]->id(), 100, 100};
    batch.entries = absl::MakeConstSpan(&entry, 1);
    batch.k = TensorView::Inline(k.data(), k.size());
    batch.v = TensorView::Inline(v.data(), v.size());
    auto given_up = cache->StepAsync(batch);
  }
  EXPECT_OK(client_->Ping());
}

TEST_F(IntegrationTest, AdministrationListsDrainsAndPurges) {
  const CacheOptions options = SmallCache(kHack);
  ASSERT_OK_AND_ASSIGN(auto cache, client_->OpenCache(options));
  const Source source{71, Kind::kNormal, options};
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  ASSERT_OK(Load(*cache, made.sequence->id(), source, 0, 130, 130));
  ASSERT_OK(made.sequence->Publish(Names(*cache, source, 2)));

  ASSERT_OK_AND_ASSIGN(client::DaemonDescription status, client_->Status());
  EXPECT_EQ(status.boot_epoch, client_->boot_epoch());
  EXPECT_EQ(status.leases, 1u);
  EXPECT_EQ(status.caches, 1u);
  EXPECT_EQ(status.published_blocks, 2u);
  EXPECT_EQ(status.connections, 1u);
  EXPECT_FALSE(status.draining);
  EXPECT_EQ(status.peer_listen, daemon_->peer());
  EXPECT_EQ(status.metrics_listen, daemon_->metrics());
  ASSERT_EQ(status.pools.size(), 1u);
  EXPECT_EQ(status.pools[0].tier, "host");
  EXPECT_GT(status.pools[0].used_bytes, 0u);
  EXPECT_LE(status.pools[0].used_bytes, status.pools[0].capacity_bytes);
  ASSERT_OK_AND_ASSIGN(const std::vector<client::CacheDescription> caches, client_->Caches());
  ASSERT_EQ(caches.size(), 1u);
  EXPECT_EQ(caches[0].options.model, "test-model");
  EXPECT_EQ(caches[0].sequences, 1u);
  ASSERT_OK_AND_ASSIGN(const std::vector<client::SequenceDescription> sequences, client_->Sequences());
  ASSERT_EQ(sequences.size(), 1u);
  EXPECT_EQ(sequences[0].id, made.sequence->id());
  EXPECT_EQ(sequences[0].tokens, 130u);
  EXPECT_EQ(sequences[0].published_blocks, 2);

  // Draining refuses new sequences and lets old ones go on.
  ASSERT_OK(client_->Drain(true));
  ASSERT_OK_AND_ASSIGN(status, client_->Status());
  EXPECT_TRUE(status.draining);
  EXPECT_FALSE(cache->CreateSequence().ok());
  EXPECT_OK(Load(*cache, made.sequence->id(), source, 130, 5, 5));
  ASSERT_OK(client_->Drain(false));
  EXPECT_OK(cache->CreateSequence());

  // A purge spares what is held.
  ASSERT_OK_AND_ASSIGN(const uint64_t spared, client_->Purge(Client::kAllCaches));
  EXPECT_EQ(spared, 0u);
  ASSERT_OK_AND_ASSIGN(status, client_->Status());
  EXPECT_EQ(status.published_blocks, 2u);
  made.sequence.reset();
  ASSERT_OK_AND_ASSIGN(const uint64_t purged, client_->Purge(Client::kAllCaches));
  EXPECT_EQ(purged, 2u);
  EXPECT_TRUE(Eventually([&] { return UsedBytes() == 0; }));
}

TEST_F(IntegrationTest, SigtermEndsTheDaemonWithStatusZeroWhileLeasesAreHeld) {
  DaemonOptions options;
  options.more_flags = {"--drain-s", "0"};
  ASSERT_OK_AND_ASSIGN(auto daemon, DaemonProcess::Start(options));
  ASSERT_OK_AND_ASSIGN(auto client, Client::Connect(daemon->listen(), {}));
  ASSERT_OK_AND_ASSIGN(auto cache, client->OpenCache(SmallCache("raw")));
  ASSERT_OK_AND_ASSIGN(CreatedSequence made, cache->CreateSequence());
  const absl::StatusOr<int> status = daemon->Terminate();
  ASSERT_OK(status);
  EXPECT_EQ(*status, 0);
  EXPECT_CODE(client->Ping(), kUnavailable);
  EXPECT_CODE(made.sequence->Info(), kUnavailable);
}

}  // namespace
}  // namespace kvmanager::testing
