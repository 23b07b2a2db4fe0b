// ZACK through the plan: raw and encoded pages meet, outputs expanded or folded, heads of unequal ranks shared out.
#include <cmath>
#include <future>
#include <random>
#include <vector>

#include "attention/attention.h"
#include "codecs/raw/raw_attention.h"
#include "codecs/zack/zack_codec.h"
#include "codecs/zack/zack_reference.h"
#include "codecs/zack/zack_testing.h"
#include "gtest/gtest.h"

namespace kvmanager {
namespace {

using zack::Bytes;
using zack::MakeBytes;

constexpr int kPageTokens = 64;
// Instrumented builds check a sample of the shapes: they look for bad accesses and races, not for wrong numbers.
#if defined(KVMANAGER_SANITIZED)
constexpr int kSample = 5;
#else
constexpr int kSample = 1;
#endif

/// One sequence of `tokens` tokens, full pages encoded, and queries for its last tokens.
class Context {
 public:
  Context(int kv_heads, int group, int head_dim, int tokens, bool fold, std::vector<int32_t> ranks, uint64_t seed)
      : context_(zack::MakeContext(zack::MakeLayout(kv_heads, head_dim, kPageTokens), 1, kv_heads * group)),
        codec_(zack::MakeFormat(context_, "balanced", fold, ranks), nullptr),
        raw_attention_(MakeRawAttention(context_.layout)),
        tokens_(tokens) {
    std::mt19937_64 random(seed);
    const PageLayout& layout = context_.layout;
    const Bytes workspace = MakeBytes(codec_.encode_workspace_bytes());
    for (int first = 0; first < tokens; first += kPageTokens) {
      raw_.push_back(zack::RandomPage(layout, random));
      AttentionPage page;
      page.raw = raw_.back().get();
      if (first + kPageTokens <= tokens) {
        encoded_.push_back(MakeBytes(codec_.info().page_bytes(0)));
        EncodeItem item;
        item.raw = page.raw;
        item.encoded = encoded_.back().get();
        codec_.Encode(absl::MakeSpan(&item, 1), absl::MakeSpan(workspace.get(), codec_.encode_workspace_bytes()));
        KV_CHECK(!item.declined);
        page.encoded = item.encoded;
      } else {
        // An open page holds its appended tokens only.
        for (int side = 0; side < 2; ++side) {
          for (int h = 0; h < kv_heads; ++h) {
            for (int t = tokens - first; t < kPageTokens; ++t) {
              for (int c = 0; c < head_dim; ++c) {
                StoreElement(raw_.back().get() + layout.raw_offset(side, h, t), layout.dtype, c, NAN);
              }
            }
          }
        }
      }
      pages_.push_back(page);
    }
    std::normal_distribution<float> normal(0, 1);
    q_.resize(size_t(tokens) * context_.query_heads * head_dim);
    for (float& x : q_) x = normal(random);
  }

  std::vector<AttentionPage>& pages() { return pages_; }
  const zack::ZackCodec& codec() const { return codec_; }

  struct Result {
    std::vector<float> out, lse;
  };
  /// The last `count` tokens.
  Result Run(int count, int lag_pages, int threads) const {
    const size_t row = size_t(context_.query_heads) * context_.layout.head_dim;
    Result result;
    result.out.assign(count * row, NAN);
    result.lse.assign(size_t(count) * context_.query_heads, NAN);
    AttentionSequence sequence;
    sequence.pages = pages_;
    sequence.first_position = tokens_ - count;
    sequence.tokens = count;
    sequence.q = q_.data() + (tokens_ - count) * row;
    sequence.out = result.out.data();
    sequence.lse = result.lse.data();
    AttentionBatch batch;
    batch.codec = &codec_;
    batch.raw_attention = raw_attention_.get();
    batch.layout = context_.layout;
    batch.query_heads = context_.query_heads;
    batch.lag_pages = lag_pages;
    batch.sequences = absl::MakeConstSpan(&sequence, 1);
    const auto plan = AttentionPlan::Make(batch, threads);
    if (threads == 1) {
      plan->RunHere();
    } else {
      WorkerPool pool(threads);
      std::promise<void> done;
      plan->Run(pool, [&] { done.set_value(); });
      done.get_future().wait();
    }
    return result;
  }

  /// Against fp64, the same pages read in the same forms.
  void Check(int count, int lag_pages, int threads) const {
    SCOPED_TRACE(testing::Message() << tokens_ << " tokens, last " << count << ", lag " << lag_pages << ", threads "
                                    << threads);
    const Result got = Run(count, lag_pages, threads);
    const int d = context_.layout.head_dim, heads = context_.query_heads, group = heads / context_.layout.kv_heads;
    const bool fold = codec_.format().parameters.fold;
    // Of many tokens some: the reference takes its time.
    for (int i = 0; i<count; i += count> 5 ? 13 : 1) {
      const int position = tokens_ - count + i, own = position / kPageTokens;
      std::vector<zack::ReferencePage> pages;
      for (int j = 0; j <= own; ++j) {
        const AttentionPage& page = pages_[j];
        const bool near = own - j <= lag_pages;
        const bool raw = page.encoded == nullptr || (near && page.raw != nullptr);
        pages.push_back({page.raw, raw ? nullptr : page.encoded, j == own ? position % kPageTokens + 1 : kPageTokens});
      }
      for (int h = 0; h < heads; ++h) {
        const size_t row = size_t(i) * heads + h;
        const zack::ReferenceOutput wanted =
            ReferenceAttend(codec_.format(), 0, h / group, q_.data() + (size_t(position) * heads + h) * d,
                            1 / std::sqrt(double(d)), pages);
        const std::vector<double>& out = fold ? wanted.folded : wanted.out;
        double error = 0, norm = 0;
        for (int c = 0; c < d; ++c) {
          error += std::pow(got.out[row * d + c] - out[c], 2);
          norm += out[c] * out[c];
        }
        ASSERT_LE(std::sqrt(error), 2e-5 * std::sqrt(norm)) << "token " << i << " head " << h;
        ASSERT_NEAR(got.lse[row], wanted.lse, 1e-4);
      }
    }
  }

 private:
  CodecContext context_;
  zack::ZackCodec codec_;
  std::unique_ptr<PageAttention> raw_attention_;
  int tokens_;
  std::vector<Bytes> raw_, encoded_;
  std::vector<AttentionPage> pages_;
  std::vector<float> q_;
};

TEST(ZackPlan, RawAndEncodedPagesMeet) {
  for (bool fold : {false, true}) {
    for (int tokens : {1, 63, 64, 65, 127, 128, 300}) {
      Context context(2, 3, 32, tokens, fold, {16, 32, 32, 16}, tokens);
      for (int lag : {0, 1, 2}) context.Check(std::min(tokens, 5), lag, 1);
      context.Check(std::min(tokens, 70), 1, 2);
    }
  }
}

TEST(ZackPlan, EveryGroupSizeAndManyThreads) {
  for (int group = 1; group <= 16; group += kSample) {
    Context context(2, group, 32, 200, group % 2 == 1, {32, 16, 16, 32}, group);
    context.Check(1, 1, 1 + group % 4);
  }
}

TEST(ZackPlan, LengthIsSplitAndHeadsOfUnequalRanksSharedOut) {
  for (bool fold : {false, true}) {
    Context context(5, 2, 64, 64 * (kSample > 1 ? 20 : 40) + 1, fold, {64, 64, 16, 16, 16, 16, 48, 32, 16, 64}, 7);
    for (int threads : {1, 2, 3, 8}) {
      context.Check(1, 2, threads);
      const Context::Result once = context.Run(1, 2, threads), again = context.Run(1, 2, threads);
      EXPECT_EQ(once.out, again.out) << "who computed a part must not matter";
    }
    context.Check(40, 1, 3);
  }
}

TEST(ZackPlan, DeclinedPagesStayRaw) {
  Context context(2, 2, 32, 64 * 6 + 3, false, {16, 16, 32, 16}, 8);
  context.pages()[1].encoded = nullptr;
  context.pages()[3].encoded = nullptr;
  context.Check(3, 1, 1);
  context.Check(3, 1, 2);
}

TEST(ZackPlan, FoldedOutputsTimesTheFactorAreTheUnfoldedOnes) {
  constexpr int kDim = 64, kHeads = 2, kGroup = 2;
  Context plain(kHeads, kGroup, kDim, 64 * 4, false, {32, 48, 64, 16}, 9);
  Context folding(kHeads, kGroup, kDim, 64 * 4, true, {32, 48, 64, 16}, 9);
  for (Context* context : {&plain, &folding}) {
    for (AttentionPage& page : context->pages()) page.raw = nullptr;
  }
  const Context::Result wanted = plain.Run(1, 0, 1), folded = folding.Run(1, 0, 1);
  std::vector<float> factor(kDim * kDim);
  for (int h = 0; h < kHeads * kGroup; ++h) {
    ASSERT_TRUE(folding.codec().OutputFactor(0, h / kGroup, absl::MakeSpan(factor)));
    double error = 0, norm = 0;
    for (int r = 0; r < kDim; ++r) {
      double sum = 0;
      for (int c = 0; c < kDim; ++c) sum += double(factor[r * kDim + c]) * folded.out[h * kDim + c];
      error += std::pow(sum - wanted.out[h * kDim + r], 2);
      norm += std::pow(wanted.out[h * kDim + r], 2);
    }
    EXPECT_LE(std::sqrt(error), 1e-5 * std::sqrt(norm));
  }
  EXPECT_EQ(wanted.lse, folded.lse);
}

}  // namespace
}  // namespace kvmanager
