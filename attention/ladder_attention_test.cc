// Plans over pages of several rungs of a ladder, against exact attention on what each page decodes to.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <future>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "attention/attention.h"
#include "attention/exact_attention.h"
#include "codecs/builtin.h"
#include "codecs/calibrate/synthetic.h"
#include "codecs/raw/raw_attention.h"
#include "codecs/registry.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"

namespace kvmanager {
namespace {

#if defined(KVMANAGER_SANITIZED)
constexpr int kSample = 5;
#else
constexpr int kSample = 1;
#endif

constexpr PageLayout kLayout{DType::kFloat16, 2, 64, 64};
constexpr int kQueryHeads = 8, kLayers = 2, kLayer = 1, kDim = kLayout.head_dim, kPageTokens = kLayout.page_tokens;
constexpr size_t kRow = size_t{kQueryHeads} * kDim;

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Bytes = std::unique_ptr<uint8_t[], Free>;
Bytes MakeBytes(size_t n) {
  uint8_t* data = static_cast<uint8_t*>(std::aligned_alloc(64, (n + 127) / 64 * 64));
  std::memset(data, 0xff, n);  // NaN: whoever reads what was never written shows it
  return Bytes(data);
}

class Artifact final : public CalibrationSource {
 public:
  absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view) override { return made_; }

 private:
  const std::shared_ptr<const Calibration> made_ =
      SyntheticCalibration({"model", "", kLayers, kLayout.kv_heads, kQueryHeads, kLayout.head_dim}, 1, {});
};

enum class Like { kNormal, kTiny, kEqual, kLarge };

/// Where each page is: raw alone (-1), or encoded alone, on that rung.
using Places = std::vector<int>;

struct Output {
  std::vector<float> out, lse;
};

void Append(const Output& from, Output* to) {
  to->out.insert(to->out.end(), from.out.begin(), from.out.end());
  to->lse.insert(to->lse.end(), from.lse.begin(), from.lse.end());
}

void ExpectSameBits(const Output& a, const Output& b) {
  ASSERT_EQ(a.out.size(), b.out.size());
  EXPECT_EQ(std::memcmp(a.out.data(), b.out.data(), a.out.size() * sizeof(float)), 0);
  EXPECT_EQ(std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)), 0);
}

/// A sequence whose pages have every form: raw and that of each rung. Which one a plan sees is up to the test.
class Context {
 public:
  Context(const Codec& codec, int tokens, uint64_t seed, Like like = Like::kNormal, float q_std = 1)
      : codec_(codec), tokens_(tokens), raw_attention_(MakeRawAttention(kLayout)) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal;
    const Bytes decoded = MakeBytes(kLayout.raw_bytes());
    for (int i = 0; i * kPageTokens < tokens; ++i) {
      pages_.emplace_back();
      Page& page = pages_.back();
      page.raw = MakeBytes(kLayout.raw_bytes());
      const int filled = std::min(kPageTokens, tokens - i * kPageTokens);
      for (int side = 0; side < 2; ++side) {
        for (int h = 0; h < kLayout.kv_heads; ++h) {
          for (int t = 0; t < filled; ++t) {
            for (int c = 0; c < kDim; ++c) {
              float x = normal(random);
              if (like == Like::kTiny) x *= 1e-4f;
              if (like == Like::kEqual) x = side == 0 ? 0.5f : float(i + 1);
              if (like == Like::kLarge && side == 1) x *= 5000;
              StoreElement(page.raw.get(), kLayout.dtype, kLayout.raw_offset(side, h, t) / 2 + c, x);
            }
          }
        }
      }
      page.values.push_back(ValuesOf(page.raw.get()));
      if (filled < kPageTokens) continue;
      for (int rung = 0; rung < codec.rungs(); ++rung) {
        const Codec& of = codec.rung(rung);
        page.encoded.push_back(MakeBytes(of.info().page_bytes(kLayer)));
        const Bytes workspace = MakeBytes(of.encode_workspace_bytes());
        EncodeItem item{page.raw.get(), page.encoded.back().get(), kLayer, uint64_t(i) * kPageTokens};
        of.Encode(absl::MakeSpan(&item, 1), absl::MakeSpan(workspace.get(), of.encode_workspace_bytes()));
        EXPECT_FALSE(item.declined);
        const DecodeItem decode{item.encoded, decoded.get(), kLayer};
        of.Decode(absl::MakeConstSpan(&decode, 1));
        page.values.push_back(ValuesOf(decoded.get()));
      }
    }
    q_.resize(tokens * kRow);
    for (float& x : q_) x = q_std * normal(random);
  }

  int pages() const { return int(pages_.size()); }
  int tokens() const { return tokens_; }

  /// Random places; the newest two pages raw, and some others.
  Places RandomPlaces(uint64_t seed) const {
    std::mt19937_64 random(seed);
    Places places(pages());
    for (int i = 0; i < pages(); ++i) places[i] = i + 2 >= pages() ? -1 : int(random() % (codec_.rungs() + 1)) - 1;
    return places;
  }

  std::vector<AttentionPage> Table(const Places& places) const {
    std::vector<AttentionPage> table(pages());
    for (int i = 0; i < pages(); ++i) {
      table[i].lag_applies = i % 2 == 0;
      if (places[i] < 0) {
        table[i].raw = pages_[i].raw.get();
        continue;
      }
      table[i].encoded = pages_[i].encoded[places[i]].get();
      table[i].rung = uint8_t(places[i]);
    }
    return table;
  }

  AttentionSequence Sequence(absl::Span<const AttentionPage> table, int first, int tokens, Output* output) const {
    output->out.assign(tokens * kRow, NAN);
    output->lse.assign(size_t(tokens) * kQueryHeads, NAN);
    AttentionSequence sequence;
    sequence.pages = table.first((first + tokens - 1) / kPageTokens + 1);
    sequence.first_position = first;
    sequence.tokens = tokens;
    sequence.q = q_.data() + first * kRow;
    sequence.out = output->out.data();
    sequence.lse = output->lse.data();
    return sequence;
  }

  void RunAll(const Codec& codec, absl::Span<const AttentionSequence> sequences, int threads) const {
    AttentionBatch batch;
    batch.codec = &codec;
    batch.raw_attention = raw_attention_.get();
    batch.layout = kLayout;
    batch.layer = kLayer;
    batch.query_heads = kQueryHeads;
    batch.lag_pages = 2;
    batch.sequences = sequences;
    const auto plan = AttentionPlan::Make(batch, threads);
    if (threads == 1) return plan->RunHere();
    // Turns as short as may be: each worker leaves its item behind every call, and goes on later.
    WorkerPool pool(threads, std::chrono::microseconds(0));
    std::promise<void> done;
    plan->Run(pool, [&] { done.set_value(); });
    done.get_future().wait();
  }

  Output Run(const Codec& codec, absl::Span<const AttentionPage> table, int first, int tokens, int threads = 1) const {
    Output output;
    const AttentionSequence sequence = Sequence(table, first, tokens, &output);
    RunAll(codec, absl::MakeConstSpan(&sequence, 1), threads);
    return output;
  }
  Output Run(const Places& places, int first, int tokens, int threads = 1) const {
    return Run(codec_, Table(places), first, tokens, threads);
  }

  void Check(const Places& places, int first, int tokens, double tolerance, int threads = 1) const {
    SCOPED_TRACE(testing::Message() << "tokens " << first << " + " << tokens << " threads " << threads);
    const Output got = Run(places, first, tokens, threads);
    const std::vector<double> q(q_.begin() + first * kRow, q_.begin() + (first + tokens) * kRow);
    const ExactResult expected = ExactAttention(kLayout, kQueryHeads, 1 / std::sqrt(double(kDim)), first, tokens, q,
                                                [&](int side, int head, uint64_t t, uint64_t) {
                                                  const Page& page = pages_[t / kPageTokens];
                                                  return page.values[places[t / kPageTokens] + 1].data() +
                                                         kLayout.raw_offset(side, head, int(t % kPageTokens)) / 2;
                                                });
    // 8-bit queries and probabilities are judged over all rows together, as for one codec.
    EXPECT_LE(LargestRowError(expected.out, {got.out.begin(), got.out.end()}, int(expected.out.size())), tolerance);
    for (size_t i = 0; i < got.lse.size(); ++i) ASSERT_NEAR(expected.lse[i], got.lse[i], tolerance * 3);
  }

 private:
  struct Page {
    Bytes raw;
    std::vector<Bytes> encoded;              // [rungs]
    std::vector<std::vector<float>> values;  // raw, then of each rung
  };

  static std::vector<float> ValuesOf(const uint8_t* page) {
    std::vector<float> values(kLayout.raw_bytes() / 2);
    ConvertToFloat(page, kLayout.dtype, values.size(), values.data());
    return values;
  }

  const Codec& codec_;
  const int tokens_;
  const std::unique_ptr<PageAttention> raw_attention_;
  std::vector<Page> pages_;
  std::vector<float> q_;
};

class LadderAttentionTest : public ::testing::TestWithParam<const char*> {
 protected:
  LadderAttentionTest() {
    RegisterBuiltinCodecs(registry_);
    registry_.SetCalibrations(&artifact_);
    CodecContext context;
    context.layout = kLayout;
    context.layers = kLayers;
    context.query_heads = kQueryHeads;
    auto made = registry_.Create(GetParam(), context);
    EXPECT_TRUE(made.ok()) << made.status();
    codec_ = *std::move(made);
  }

  /// Of 8-bit queries and probabilities; of rotated channels of unequal size they lose more.
  double tolerance() const { return absl::StrContains(GetParam(), "zack") ? 5e-2 : 3e-2; }

  Artifact artifact_;
  CodecRegistry registry_;
  std::unique_ptr<Codec> codec_;
};

TEST_P(LadderAttentionTest, EqualsAttentionOnWhatPagesDecodeTo) {
  const Context context(*codec_, 64 * 9 + 20, 1);
  for (int i = 0; i < 12; i += kSample) {
    SCOPED_TRACE(testing::Message() << "places " << i);
    const Places places = context.RandomPlaces(i);
    context.Check(places, context.tokens() - 1, 1, tolerance(), 1 + i % 3);
    context.Check(places, 64 * 8 + 3, 50, tolerance(), 1 + i % 2);
  }
  for (int rung = 0; rung < codec_->rungs(); ++rung) {
    Places places(context.pages(), rung);
    places.back() = -1;
    context.Check(places, context.tokens() - 1, 1, tolerance());
    // Every second page, and a prefix.
    for (size_t i = 0; i + 1 < places.size(); i += 2) places[i] = 0;
    context.Check(places, context.tokens() - 1, 1, tolerance());
    for (size_t i = 0; i < 4; ++i) places[i] = codec_->rungs() - 1 - rung;
    context.Check(places, context.tokens() - 1, 1, tolerance());
  }
}

TEST_P(LadderAttentionTest, AdversarialValues) {
  const struct {
    Like like;
    float q_std;
    double tolerance;
  } kCases[] = {{Like::kTiny, 1, tolerance()},   {Like::kEqual, 1, tolerance()}, {Like::kLarge, 1, tolerance()},
                {Like::kNormal, 0, tolerance()}, {Like::kNormal, 4, 1e-1},       {Like::kNormal, 0.1f, tolerance()}};
  for (const auto& each : kCases) {
    SCOPED_TRACE(testing::Message() << int(each.like) << " " << each.q_std);
    const Context context(*codec_, 64 * 7 + 1, 3, each.like, each.q_std);
    for (int i = 0; i < 3; i += kSample) {
      context.Check(context.RandomPlaces(i), context.tokens() - 1, 1, each.tolerance, 1 + i);
    }
  }
}

TEST_P(LadderAttentionTest, ChunkingOfQueriesDoesNotChangeABit) {
  const Context context(*codec_, 64 * 5 + 30, 5);
  const int begin = 64 * 3, tokens = context.tokens() - begin;
  for (const int threads : {1, 2, 3}) {
    Places places = context.RandomPlaces(threads);
    for (int i = 3; i < context.pages(); ++i) places[i] = -1;  // queries' own pages
    const Output all = context.Run(places, begin, tokens, threads);
    for (const int chunk : {1, 7, 64, 100}) {
      if (kSample > 1 && chunk == 1) continue;
      Output parts;
      for (int first = begin; first < context.tokens(); first += chunk) {
        Append(context.Run(places, first, std::min(chunk, context.tokens() - first), threads), &parts);
      }
      ExpectSameBits(all, parts);
    }
  }
}

TEST_P(LadderAttentionTest, LongContextsInParts) {
  const Context context(*codec_, 64 * 80 + 3, 13);
  const int last = context.tokens() - 1;
  for (int i = 0; i < 3; i += kSample) {
    const Places places = context.RandomPlaces(20 + i);
    const Output whole = context.Run(places, last, 1, 1);
    for (const int threads : {2, 5}) {
      const Output split = context.Run(places, last, 1, threads);
      for (size_t j = 0; j < whole.out.size(); ++j) ASSERT_NEAR(whole.out[j], split.out[j], 1e-4);
      ExpectSameBits(split, context.Run(places, last, 1, threads));
      Output chunk = context.Run(places, last - 2, 3, threads);
      chunk.out.erase(chunk.out.begin(), chunk.out.end() - kRow);
      chunk.lse.erase(chunk.lse.begin(), chunk.lse.end() - kQueryHeads);
      ExpectSameBits(split, chunk);
    }
    context.Check(places, last, 1, tolerance(), 3);
  }
}

// Pages of one rung alone read as they do in a cache of that rung's codec alone, whatever else is in the batch.
TEST_P(LadderAttentionTest, OneRungAloneIsItsCodec) {
  const Context context(*codec_, 64 * 40 + 9, 7), other(*codec_, 64 * 6 + 9, 8);
  const int first = context.tokens() - 5;
  for (const int threads : {1, 2}) {
    for (int rung = 0; rung < codec_->rungs(); ++rung) {
      Places places = context.RandomPlaces(rung);
      for (int& place : places) place = place < 0 ? -1 : rung;
      std::vector<AttentionPage> table = context.Table(places);
      const Output in_ladder = context.Run(*codec_, table, first, 5, threads);
      for (AttentionPage& page : table) page.rung = 0;
      ExpectSameBits(context.Run(codec_->rung(rung), table, first, 5, threads), in_ladder);

      const Places mixed = other.RandomPlaces(9);
      const std::vector<AttentionPage> tables[] = {other.Table(mixed), context.Table(places)};
      Output outputs[2];
      const AttentionSequence sequences[] = {other.Sequence(tables[0], other.tokens() - 1, 1, &outputs[0]),
                                             context.Sequence(tables[1], first, 5, &outputs[1])};
      context.RunAll(*codec_, sequences, threads);
      ExpectSameBits(in_ladder, outputs[1]);
      ExpectSameBits(other.Run(mixed, other.tokens() - 1, 1, threads), outputs[0]);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Ladders, LadderAttentionTest,
    ::testing::Values("ladder=hack:k_bits=4,v_bits=3>hack:k_bits=2,v_bits=1",
                      "ladder=hack:k_bits=8,v_bits=8>hack:k_axis=token,k_bits=4,rotation=none>hack:k_bits=2,v_bits=2",
                      "ladder=zack+hack:bytes=28,calibration=m>zack+hack:bytes=16,calibration=m",
                      "ladder=zack+hack:bytes=32,calibration=m>hack:k_bits=2,v_bits=1",
                      "ladder=hack:k_bits=8,v_bits=8;1=hack:k_bits=4,v_bits=4>zack+hack:bytes=28,calibration=m"));

}  // namespace
}  // namespace kvmanager
