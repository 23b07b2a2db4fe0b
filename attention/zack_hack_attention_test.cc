#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "attention/attention.h"
#include "codecs/hack/hack_codec.h"
#include "codecs/hack/hack_reference.h"
#include "codecs/raw/raw_attention.h"
#include "codecs/zack_hack/rotated_codec.h"
#include "codecs/zack_hack/stack_testing.h"
#include "codecs/zack_hack/zack_hack.h"
#include "gtest/gtest.h"

namespace kvmanager::zack_hack {
namespace {

using zack::EncodeOne;
using zack::MakeMemory;
using zack::Memory;
using zack::SyntheticContext;

/// Output and log-sum-exp of one row, fp64.
struct Wanted {
  std::vector<double> out;
  double lse = -std::numeric_limits<double>::infinity();
};

/// A sequence of one layer: pages, raw and encoded, and one codec.
class Sequence {
 public:
  Sequence(const CodecContext& context, const CodecParameters& parameters, int layer, int pages, uint64_t seed)
      : layout_(context.layout), layer_(layer), random_(seed) {
    auto made = MakeCodec(context, parameters);
    KV_CHECK(made.ok());
    codec_ = *std::move(made);
    for (int i = 0; i < pages; ++i) {
      raw_.push_back(zack::RandomRawPage(layout_, random_, 0.5f));
      Encode(i);
    }
  }

  const zack::RotatedCodec& rotated() const { return dynamic_cast<const zack::RotatedCodec&>(*codec_); }
  const Codec& encoder() const { return *codec_; }
  uint8_t* raw(int i) { return raw_[i].get(); }
  void Encode(int i) {
    if (int(encoded_.size()) <= i) encoded_.resize(i + 1);
    auto page = EncodeOne(*codec_, layer_, raw_[i].get(), uint64_t(i) * layout_.page_tokens);
    KV_CHECK(!page.declined);
    encoded_[i] = std::move(page.bytes);
  }
  std::vector<float> Queries(int rows, float std) {
    std::normal_distribution<float> normal(0, std);
    std::vector<float> q(size_t(rows) * layout_.head_dim);
    for (float& x : q) x = normal(random_);
    return q;
  }

  /// One row over pages 0 .. tokens / page_tokens: those below `encoded_pages` by HACK's reference in the space, the
  /// others exactly. `q` as attention maps it, so that both round the same numbers.
  Wanted Attend(const float* q, int head, int encoded_pages, int tokens, bool folded) {
    const int d = layout_.head_dim, page_tokens = layout_.page_tokens;
    const double scale = 1 / std::sqrt(double(d));
    const Memory row = MakeMemory(d * 4), mapped = MakeMemory(d * 4);
    std::memcpy(row.get(), q, d * 4);
    rotated().attention().MapQueries(layer_, head, 1, reinterpret_cast<float*>(row.get()),
                                     reinterpret_cast<float*>(mapped.get()));
    // Mapping itself, in fp64.
    const zack::HeadRotation& rotation = rotated().rotation(layer_, head);
    double q_norm = 0, map_error = 0;
    for (int c = 0; c < d; ++c) {
      double sum = 0;
      for (int i = 0; i < d; ++i) sum += double(q[i]) * rotation.query[size_t(i) * d + c];
      map_error += std::pow(reinterpret_cast<float*>(mapped.get())[c] - sum, 2);
      q_norm += sum * sum;
    }
    EXPECT_LE(std::sqrt(map_error), 1e-5 * std::sqrt(q_norm));

    float max = -std::numeric_limits<float>::infinity(), sum = 0;
    const Memory acc = MakeMemory(d * 4);
    std::memset(acc.get(), 0, d * 4);
    PageAttentionTask task;
    task.q = reinterpret_cast<float*>(mapped.get());
    task.rows = 1;
    task.scale = float(scale);
    task.layer = layer_;
    task.kv_head = head;
    std::vector<const uint8_t*> pages;
    for (int i = 0; i < encoded_pages; ++i) pages.push_back(encoded_[i].get());
    task.pages = pages;
    if (encoded_pages > 0) {
      const auto& hack = dynamic_cast<const hack::HackCodec&>(rotated().inner(layer_));
      hack::ReferenceAttend(hack.format(), task, {&max, &sum, reinterpret_cast<float*>(acc.get())});
    }
    std::vector<double> scores;
    double most = max;
    for (int t = encoded_pages * page_tokens; t < tokens; ++t) {
      const uint8_t* k = raw_[t / page_tokens].get() + layout_.raw_offset(0, head, t % page_tokens);
      double score = 0;
      for (int c = 0; c < d; ++c) score += double(q[c]) * LoadElement(k, layout_.dtype, c);
      scores.push_back(score * scale);
      most = std::max(most, score * scale);
    }
    std::vector<double> raw_out(d), coded_out(d);
    double total = sum > 0 ? sum * std::exp(max - most) : 0;
    for (int c = 0; c < d; ++c)
      coded_out[c] = sum > 0 ? reinterpret_cast<float*>(acc.get())[c] * std::exp(max - most) : 0;
    for (size_t i = 0; i < scores.size(); ++i) {
      const int t = encoded_pages * page_tokens + int(i);
      const uint8_t* v = raw_[t / page_tokens].get() + layout_.raw_offset(1, head, t % page_tokens);
      const double p = std::exp(scores[i] - most);
      total += p;
      for (int c = 0; c < d; ++c) raw_out[c] += p * LoadElement(v, layout_.dtype, c);
    }
    const std::vector<float>& move = folded ? rotation.encode[1] : rotation.decode[1];
    std::vector<double>& stays = folded ? coded_out : raw_out;
    const std::vector<double>& moves = folded ? raw_out : coded_out;
    Wanted wanted;
    for (int c = 0; c < d; ++c) {
      double x = stays[c];
      for (int i = 0; i < d; ++i) x += moves[i] * move[size_t(i) * d + c];
      wanted.out.push_back(x / total);
    }
    wanted.lse = most + std::log(total);
    return wanted;
  }

  /// A plan for query tokens at the end of `tokens`, lag 2, against Attend.
  void Check(int tokens, int group, int query_tokens, float q_std, bool folded, double tolerance, int threads = 1,
             std::vector<float> q = {}) {
    const int d = layout_.head_dim, page_tokens = layout_.page_tokens, heads = layout_.kv_heads * group;
    if (q.empty()) q = Queries(query_tokens * heads, q_std);
    std::vector<float> out(q.size()), lse(query_tokens * heads);
    std::vector<AttentionPage> pages;
    for (int i = 0; i * page_tokens < tokens; ++i) {
      pages.push_back({raw_[i].get(), (i + 1) * page_tokens <= tokens ? encoded_[i].get() : nullptr, true});
    }
    AttentionSequence sequence;
    sequence.pages = pages;
    sequence.first_position = tokens - query_tokens;
    sequence.tokens = query_tokens;
    sequence.q = q.data();
    sequence.out = out.data();
    sequence.lse = lse.data();
    const auto raw_attention = MakeRawAttention(layout_);
    AttentionBatch batch;
    batch.codec = codec_.get();
    batch.raw_attention = raw_attention.get();
    batch.layout = layout_;
    batch.layer = layer_;
    batch.query_heads = heads;
    batch.lag_pages = 2;
    batch.sequences = absl::MakeConstSpan(&sequence, 1);
    AttentionPlan::Make(batch, threads)->RunHere();
    for (int i = 0; i < query_tokens; ++i) {
      const int position = tokens - query_tokens + i;
      const int coded = std::max(0, position / page_tokens - 2);
      for (int h = 0; h < heads; ++h) {
        const size_t row = size_t(i) * heads + h;
        const Wanted wanted = Attend(q.data() + row * d, h / group, coded, position + 1, folded);
        double error = 0, norm = 0;
        for (int c = 0; c < d; ++c) {
          error += std::pow(out[row * d + c] - wanted.out[c], 2);
          norm += std::pow(wanted.out[c], 2);
        }
        ASSERT_LE(std::sqrt(error), tolerance * std::sqrt(norm) + 1e-20)
            << "tokens " << tokens << " group " << group << " row " << row;
        ASSERT_NEAR(lse[row], wanted.lse, tolerance * (1 + std::abs(wanted.lse)));
      }
    }
  }

 private:
  const PageLayout layout_;
  const int layer_;
  std::mt19937_64 random_;
  std::unique_ptr<Codec> codec_;
  std::vector<Memory> raw_, encoded_;
};

constexpr double kTolerance = 1e-3;
constexpr PageLayout kUsual = {DType::kFloat16, 2, 128, 64};

TEST(ZackHackAttentionTest, EveryAllocationAgainstTheReference) {
  const CodecContext context = SyntheticContext(kUsual, 2, 8);
  for (const CodecParameters& parameters : {CodecParameters{},
                                            {{"bytes", "32"}, {"allocation", "model"}},
                                            {{"k_bits", "4"}, {"v_bits", "3.5"}},
                                            {{"bytes", "10"}},  // means alone
                                            {{"k_bits", "0"}, {"v_bits", "2"}, {"mode", "joint"}}}) {
    Sequence sequence(context, parameters, 1, 6, 1);
    sequence.Check(6 * 64 - 5, 4, 1, 1, false, kTolerance);
    sequence.Check(6 * 64, 1, 3, 1, false, kTolerance, 3);
  }
}

TEST(ZackHackAttentionTest, QueriesInTwoBytesForDominantSegments) {
  for (const int d : {64, 128, 256}) {
    const PageLayout layout = {DType::kFloat16, 2, uint16_t(d), 64};
    const CodecContext context = zack::WithLoudKeys(SyntheticContext(layout, 2, 8));
    for (const double share : {38.0 / 64, 46.0 / 64}) {
      Sequence sequence(context, {{"bytes", absl::StrCat(share * d)}, {"allocation", "model"}}, 1, 6, 1);
      const auto& format = dynamic_cast<const hack::HackCodec&>(sequence.rotated().inner(1)).format();
      EXPECT_TRUE(format.heads[0].side[0].two_byte_q);
      sequence.Check(6 * 64 - 5, 4, 1, 1, false, kTolerance);
      sequence.Check(6 * 64, 1, 3, 1, false, kTolerance, 3);
      // The first rotated channel is a hundred times the others, as the artifact says, and in one where it does not.
      for (const int channel : {0, 40}) {
        for (int i = 0; i < 6; ++i) {
          for (int h = 0; h < 2; ++h) {
            const float* const direction = &sequence.rotated().rotation(1, h).decode[0][size_t(channel) * d];
            for (int t = 0; t < 64; ++t) {
              uint8_t* const k = sequence.raw(i) + layout.raw_offset(0, h, t);
              const float size = 100 * std::sin(float(i * 64 + t) * 0.7f);
              for (int c = 0; c < d; ++c) {
                StoreElement(k, layout.dtype, c, LoadElement(k, layout.dtype, c) + size * direction[c]);
              }
            }
          }
          sequence.Encode(i);
        }
        sequence.Check(6 * 64 - 5, 4, 1, 0.1f, false, kTolerance);
      }
    }
  }
}

TEST(ZackHackAttentionTest, EveryGroupSize) {
  const CodecContext context = SyntheticContext(kUsual, 1, 32);
  Sequence sequence(context, {{"bytes", "56"}}, 0, 5, 2);
  for (int group = 1; group <= 16; ++group) sequence.Check(5 * 64 - 1, group, 1, 1, false, kTolerance);
}

TEST(ZackHackAttentionTest, OpenPagesAndPageBoundaries) {
  const CodecContext context = SyntheticContext(kUsual, 1, 4);
  Sequence sequence(context, {}, 0, 5, 3);
  for (int tokens : {1, 2, 63, 64, 65, 128, 192, 193, 255, 256, 257, 319, 320}) {
    sequence.Check(tokens, 2, 1, 1, false, kTolerance);
  }
  sequence.Check(200, 2, 100, 1, false, kTolerance);
}

TEST(ZackHackAttentionTest, OtherShapes) {
  for (const PageLayout& layout : {PageLayout{DType::kBFloat16, 1, 64, 128}, PageLayout{DType::kFloat16, 1, 256, 64},
                                   PageLayout{DType::kFloat16, 2, 64, 64}, PageLayout{DType::kFloat16, 3, 96, 64},
                                   PageLayout{DType::kFloat16, 1, 32, 192}}) {
    const CodecContext context = SyntheticContext(layout, 1, layout.kv_heads * 2);
    for (const char* v_norm : {"0", "1"}) {
      Sequence sequence(context, {{"k_bits", "2"}, {"v_bits", "1"}, {"v_norm", v_norm}}, 0, 4, 4);
      sequence.Check(4 * layout.page_tokens - 3, 2, 1, 1, false, kTolerance);
    }
  }
}

TEST(ZackHackAttentionTest, FoldedOutputsAreTheSameBehindTheFactor) {
  const CodecContext context = SyntheticContext(kUsual, 2, 4);
  for (const char* mode : {"joint", "balanced"}) {
    Sequence folded(context, {{"fold", "1"}, {"mode", mode}}, 1, 5, 5);
    folded.Check(5 * 64 - 9, 2, 1, 1, true, kTolerance);
    folded.Check(100, 2, 1, 1, true, kTolerance);  // raw pages alone
    std::vector<float> factor(128 * 128);
    ASSERT_TRUE(folded.encoder().OutputFactor(1, 1, absl::MakeSpan(factor)));
    const std::vector<float>& decode = folded.rotated().rotation(1, 1).decode[1];
    for (int r = 0; r < 128; ++r) {
      for (int c = 0; c < 128; ++c) ASSERT_EQ(factor[r * 128 + c], decode[c * 128 + r]);
    }
    Sequence plain(context, {{"mode", mode}}, 1, 1, 5);
    EXPECT_FALSE(plain.encoder().OutputFactor(1, 1, absl::MakeSpan(factor)));
    EXPECT_FALSE(plain.encoder().attention().folds_output(1));
  }
}

TEST(ZackHackAttentionTest, Adversarial) {
  const CodecContext context = SyntheticContext(kUsual, 1, 4);
  Sequence sequence(context, {}, 0, 6, 6);
  sequence.Check(6 * 64, 2, 1, 0, false, kTolerance, 1, std::vector<float>(4 * 128, 0.0f));  // zero q
  sequence.Check(6 * 64, 2, 1, 40, false, kTolerance);                                       // one token takes all
  std::memset(sequence.raw(0), 0, kUsual.raw_bytes());                                       // zero K and V
  sequence.Encode(0);
  for (int side = 0; side < 2; ++side) {  // constant partitions
    for (int h = 0; h < 2; ++h) {
      for (int t = 0; t < 64; ++t) {
        for (int c = 0; c < 128; ++c)
          StoreElement(sequence.raw(1) + kUsual.raw_offset(side, h, t), DType::kFloat16, c, c % 7 - 3.f);
      }
    }
  }
  sequence.Encode(1);
  sequence.Check(6 * 64, 2, 1, 1, false, kTolerance);
  sequence.Check(6 * 64, 2, 1, 1, false, kTolerance, 4);
}

}  // namespace
}  // namespace kvmanager::zack_hack
