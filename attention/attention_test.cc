#include "attention/attention.h"

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <future>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "attention/exact_attention.h"
#include "codecs/hack/hack.h"
#include "codecs/raw/raw_attention.h"
#include "codecs/registry.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/reading_rule.h"

namespace kvmanager {
namespace {

// Instrumented builds check a sample of the shapes: they look for bad accesses and races, not for wrong numbers.
#if defined(KVMANAGER_SANITIZED)
constexpr int kSample = 5;
#else
constexpr int kSample = 1;
#endif

struct Free {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Bytes = std::unique_ptr<uint8_t[], Free>;

Bytes MakeBytes(size_t n) {
  uint8_t* data = static_cast<uint8_t*>(std::aligned_alloc(64, (n + 127) / 64 * 64));
  std::memset(data, 0xff, n);  // fp16 and bf16 NaN: whoever reads what was never written shows it
  return Bytes(data);
}

PageLayout MakeLayout(int kv_heads, int head_dim, int page_tokens = 64, DType dtype = DType::kFloat16) {
  PageLayout layout;
  layout.dtype = dtype;
  layout.kv_heads = kv_heads;
  layout.head_dim = head_dim;
  layout.page_tokens = page_tokens;
  return layout;
}

/// One sequence: its raw pages, encoded forms where a codec is given, and queries for every token.
class Context {
 public:
  Context(const PageLayout& layout, int query_heads, int tokens, double score_std, uint64_t seed,
          const std::string& codec_spec = "", int hit_pages = 0)
      : layout_(layout), query_heads_(query_heads), tokens_(tokens), raw_attention_(MakeRawAttention(layout)) {
    if (!codec_spec.empty()) {
      CodecRegistry registry;
      RegisterHack(registry);
      codec_ = registry.Create(codec_spec, layout).value();
    }
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(0, 1);
    const int pages = (tokens + layout.page_tokens - 1) / layout.page_tokens;
    for (int i = 0; i < pages; ++i) {
      raw_.push_back(MakeBytes(layout.raw_bytes()));
      const int filled = std::min<int>(layout.page_tokens, tokens - i * layout.page_tokens);
      for (int side = 0; side < 2; ++side) {
        for (int h = 0; h < layout.kv_heads; ++h) {
          for (int t = 0; t < filled; ++t) {
            for (int c = 0; c < layout.head_dim; ++c) {
              StoreElement(raw_[i].get(), layout.dtype, layout.raw_offset(side, h, t) / 2 + c, normal(random));
            }
          }
        }
      }
      raw_values_.push_back(Values(raw_[i].get()));
      AttentionPage page;
      page.raw = raw_[i].get();
      page.lag_applies = i >= hit_pages;
      if (codec_ != nullptr && filled == layout.page_tokens) Encode(i, &page);
      if (page.encoded != nullptr && i < hit_pages) page.raw = nullptr;
      pages_.push_back(page);
    }
    q_.resize(size_t(tokens) * query_heads * layout.head_dim);
    for (float& x : q_) x = float(score_std) * normal(random);
  }

  struct Result {
    std::vector<double> out, lse;
    AttentionCounts counts;
  };

  AttentionSequence Sequence(int first, int tokens, DType dtype, std::vector<uint8_t>* q, std::vector<uint8_t>* out,
                             std::vector<float>* lse) const {
    const size_t row = size_t(query_heads_) * layout_.head_dim;
    q->resize(tokens * row * DTypeBytes(dtype));
    out->assign(q->size(), 0xff);
    lse->assign(size_t(tokens) * query_heads_, NAN);
    for (size_t i = 0; i < tokens * row; ++i) StoreElement(q->data(), dtype, i, q_[first * row + i]);
    AttentionSequence sequence;
    sequence.pages = absl::MakeConstSpan(pages_).first((first + tokens - 1) / layout_.page_tokens + 1);
    sequence.first_position = first;
    sequence.tokens = tokens;
    sequence.q = q->data();
    sequence.out = out->data();
    sequence.lse = lse->data();
    return sequence;
  }

  AttentionBatch Batch(int lag_pages, DType dtype) const {
    AttentionBatch batch;
    batch.codec = codec_.get();
    batch.raw_attention = raw_attention_.get();
    batch.layout = layout_;
    batch.query_heads = query_heads_;
    batch.lag_pages = lag_pages;
    batch.q_dtype = dtype;
    return batch;
  }

  /// Tokens first .. first + tokens - 1 in one call; with a pool where threads > 1.
  Result Run(int first, int tokens, int lag_pages, int threads = 1, DType dtype = DType::kFloat32) const {
    std::vector<uint8_t> q, out;
    std::vector<float> lse;
    const AttentionSequence sequence = Sequence(first, tokens, dtype, &q, &out, &lse);
    AttentionBatch batch = Batch(lag_pages, dtype);
    batch.sequences = absl::MakeConstSpan(&sequence, 1);
    const auto plan = AttentionPlan::Make(batch, threads);
    if (threads == 1) {
      plan->RunHere();
    } else {
      // Every other plan in turns as short as may be: each worker leaves its item behind every call, and goes on later.
      WorkerPool pool(threads, tokens % 2 == 0 ? Turn::kLength : std::chrono::microseconds(0));
      std::promise<void> done;
      plan->Run(pool, [&] { done.set_value(); });
      done.get_future().wait();
    }
    return Collect(out, lse, dtype, plan->counts());
  }

  Result Collect(const std::vector<uint8_t>& out, const std::vector<float>& lse, DType dtype,
                 AttentionCounts counts) const {
    Result result;
    for (size_t i = 0; i < out.size() / DTypeBytes(dtype); ++i) result.out.push_back(LoadElement(out.data(), dtype, i));
    result.lse.assign(lse.begin(), lse.end());
    result.counts = counts;
    return result;
  }

  bool ReadsRaw(int page, int own, int lag_pages) const {
    const AttentionPage& of = pages_[page];
    return ReadingRule::ReadsRaw(of.raw != nullptr, of.encoded != nullptr, of.lag_applies, uint32_t(own - page),
                                 uint32_t(lag_pages));
  }

  /// Doubles over what each query token reads: raw values, or decoded ones.
  ExactResult Exact(int first, int tokens, int lag_pages, DType dtype = DType::kFloat32) const {
    const size_t row = size_t(query_heads_) * layout_.head_dim;
    std::vector<double> q(tokens * row);
    for (size_t i = 0; i < q.size(); ++i) {
      uint32_t rounded = 0;
      StoreElement(&rounded, dtype, 0, q_[first * row + i]);
      q[i] = LoadElement(&rounded, dtype, 0);
    }
    return ExactAttention(layout_, query_heads_, 1 / std::sqrt(double(layout_.head_dim)), first, tokens, q,
                          [&](int side, int head, uint64_t t, uint64_t query) -> const float* {
                            const int page = int(t / layout_.page_tokens);
                            const bool raw = ReadsRaw(page, int(query / layout_.page_tokens), lag_pages);
                            const std::vector<float>& values = raw ? raw_values_[page] : decoded_values_[page];
                            return values.data() + layout_.raw_offset(side, head, t % layout_.page_tokens) / 2;
                          });
  }

  AttentionCounts ExactCounts(int first, int tokens, int lag_pages) const {
    AttentionCounts counts;
    for (int i = first; i < first + tokens; ++i) {
      for (int t = 0; t <= i; ++t) {
        const bool raw = ReadsRaw(t / layout_.page_tokens, i / layout_.page_tokens, lag_pages);
        ++(raw ? counts.raw_pairs : counts.encoded_pairs);
      }
    }
    return counts;
  }

  void Check(int first, int tokens, int lag_pages, double tolerance, int threads = 1,
             DType dtype = DType::kFloat32) const {
    SCOPED_TRACE(testing::Message() << "tokens " << first << " + " << tokens << " lag " << lag_pages << " threads "
                                    << threads << " heads " << query_heads_ << "/" << layout_.kv_heads << " d "
                                    << layout_.head_dim);
    const Result got = Run(first, tokens, lag_pages, threads, dtype);
    const ExactResult expected = Exact(first, tokens, lag_pages, dtype);
    // Of raw pages every row must be right; 8-bit queries and probabilities are judged over all rows together.
    const int row = codec_ == nullptr ? layout_.head_dim : int(expected.out.size());
    EXPECT_LE(LargestRowError(expected.out, got.out, row), tolerance);
    for (size_t i = 0; i < got.lse.size(); ++i) ASSERT_NEAR(expected.lse[i], got.lse[i], std::max(1e-4, tolerance * 3));
    const AttentionCounts counts = ExactCounts(first, tokens, lag_pages);
    EXPECT_EQ(counts.raw_pairs, got.counts.raw_pairs);
    EXPECT_EQ(counts.encoded_pairs, got.counts.encoded_pairs);
  }

  int tokens() const { return tokens_; }

 private:
  void Encode(int i, AttentionPage* page) {
    encoded_.push_back(MakeBytes(codec_->info().encoded_bytes));
    Bytes workspace = MakeBytes(codec_->encode_workspace_bytes() + 64);
    EncodeItem item;
    item.raw = raw_[i].get();
    item.encoded = encoded_.back().get();
    item.first_token = uint64_t(i) * layout_.page_tokens;
    codec_->Encode(absl::MakeSpan(&item, 1), absl::MakeSpan(workspace.get(), codec_->encode_workspace_bytes()));
    ASSERT_FALSE(item.declined);
    page->encoded = item.encoded;
    const Bytes decoded = MakeBytes(layout_.raw_bytes());
    const DecodeItem decode{item.encoded, decoded.get()};
    codec_->Decode(absl::MakeConstSpan(&decode, 1));
    decoded_values_.resize(i + 1);
    decoded_values_[i] = Values(decoded.get());
  }

  std::vector<float> Values(const uint8_t* page) const {
    std::vector<float> values(layout_.raw_bytes() / 2);
    ConvertToFloat(page, layout_.dtype, values.size(), values.data());
    return values;
  }

  const PageLayout layout_;
  const int query_heads_;
  const int tokens_;
  const std::unique_ptr<PageAttention> raw_attention_;
  std::unique_ptr<Codec> codec_;
  std::vector<Bytes> raw_, encoded_;
  std::vector<std::vector<float>> raw_values_, decoded_values_;  // as raw pages, widened
  std::vector<AttentionPage> pages_;
  std::vector<float> q_;
};

bool SameBits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

TEST(Attention, RawPagesOfEveryGroupSize) {
  for (int group = 1; group <= 16; group += kSample) {
    Context context(MakeLayout(2, 64), 2 * group, 150, 1, group);
    context.Check(149, 1, 2, 1e-5);
    context.Check(100, 50, 0, 1e-5);
  }
}

TEST(Attention, ContextsThatEndEverywhere) {
  for (int tokens : {1, 2, 63, 64, 65, 127, 128, 129, 191}) {
    Context context(MakeLayout(2, 128), 8, tokens, 2, tokens);
    context.Check(tokens - 1, 1, 2, 1e-5);
    context.Check(0, tokens, 1, 1e-5);
  }
}

TEST(Attention, HeadDimsPagesAndTypes) {
  for (int d : {16, 64, 80, 128, 256}) {
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (int page_tokens : {16, 48, 256}) {
        Context context(MakeLayout(3, d, page_tokens, dtype), 6, 70, 1, d);
        context.Check(40, 30, 0, 1e-5);
      }
    }
    Context context(MakeLayout(2, d), 4, 100, 1, d);
    context.Check(90, 10, 2, 1e-5, 1, DType::kFloat32);
    context.Check(90, 10, 2, 1e-3, 1, DType::kFloat16);
    context.Check(90, 10, 2, 8e-3, 1, DType::kBFloat16);
  }
}

TEST(Attention, EncodedPagesAndLag) {
  for (const char* spec : {"hack:k_bits=2,v_bits=2", "hack", "hack:k_bits=4,v_bits=3", "hack:k_axis=token,k_bits=2",
                           "hack:k_axis=token,k_bits=4,q=asymmetric,rotation=none,part=32"}) {
    SCOPED_TRACE(spec);
    for (int d : {64, 128, 256}) {
      Context context(MakeLayout(2, d), 8, 64 * 5 + 20, 1, 7, spec);
      for (int lag = 0; lag <= 3; lag += d == 128 ? kSample : 2) {
        context.Check(context.tokens() - 1, 1, lag, 3e-2);
        context.Check(64 * 4 - 2, 30, lag, 3e-2);
      }
    }
  }
}

TEST(Attention, ErrorOfEightBitQueriesGrowsWithTheScores) {
  for (auto [std_dev, tolerance] : {std::pair(0.1, 4e-3), std::pair(1.0, 3e-2), std::pair(4.0, 1e-1)}) {
    Context context(MakeLayout(2, 128), 8, 64 * 6, std_dev, 3, "hack");
    context.Check(64 * 6 - 1, 1, 0, tolerance);
  }
}

TEST(Attention, PrefixHitsAreReadEncodedWhateverTheDistance) {
  Context context(MakeLayout(2, 64), 4, 64 * 4 + 5, 1, 9, "hack:k_bits=8,v_bits=8", /*hit_pages=*/3);
  for (int lag = 0; lag <= 3; ++lag) {
    context.Check(64 * 3, 60, lag, 3e-2);
    context.Check(64 * 4 + 4, 1, lag, 3e-2);
  }
  // Two of the three pages before the query's own are hits; the lag does not reach them.
  EXPECT_EQ(context.Run(64 * 3 + 1, 1, 3).counts.encoded_pairs, 64u * 3);
}

TEST(Attention, ChunkingOfQueriesDoesNotChangeABit) {
  for (int threads : {1, 2, 3}) {
    for (const char* spec : {"", "hack:k_bits=3,v_bits=2", "hack:k_axis=token,k_bits=2"}) {
      Context context(MakeLayout(2, 64), 6, 200, 1, 11, spec);
      const Context::Result all = context.Run(0, 200, 1, threads);
      for (int chunk : {1, 7, 64, 100}) {
        std::vector<double> out, lse;
        for (int first = 0; first < 200; first += chunk) {
          const Context::Result part = context.Run(first, std::min(chunk, 200 - first), 1, threads);
          out.insert(out.end(), part.out.begin(), part.out.end());
          lse.insert(lse.end(), part.lse.begin(), part.lse.end());
        }
        EXPECT_TRUE(SameBits(all.out, out)) << chunk << spec;
        EXPECT_TRUE(SameBits(all.lse, lse)) << chunk << spec;
      }
    }
  }
}

TEST(Attention, SplitLengthAgreesWithWholeLength) {
  Context context(MakeLayout(2, 32), 4, 64 * 80 + 3, 2, 13, "hack:k_bits=4,v_bits=4");
  const int last = context.tokens() - 1;
  const Context::Result whole = context.Run(last, 1, 2, 1);
  for (int threads = 2; threads <= 5; ++threads) {
    const Context::Result split = context.Run(last, 1, 2, threads);
    EXPECT_LE(LargestRowError(whole.out, split.out, 32), 1e-5);
    EXPECT_TRUE(SameBits(split.out, context.Run(last, 1, 2, threads).out)) << "who computed a part must not matter";
    // 40 tokens make tiles enough that the parts are folded by one worker: the same merges, the same bits.
    const Context::Result chunk = context.Run(last - 39, 40, 2, threads);
    EXPECT_TRUE(SameBits(split.out, std::vector<double>(chunk.out.end() - 4 * 32, chunk.out.end())));
  }
}

TEST(Attention, RaggedBatchesAreTheirSequences) {
  const PageLayout layout = MakeLayout(4, 64);
  std::vector<std::unique_ptr<Context>> contexts;
  for (int tokens : {1, 64, 2000, 65, 130, 700}) {
    contexts.push_back(std::make_unique<Context>(layout, 8, tokens, 1, tokens));
  }
  for (int threads : {1, 2, 4}) {
    std::vector<AttentionSequence> sequences(contexts.size());
    std::vector<std::vector<uint8_t>> q(contexts.size()), out(contexts.size());
    std::vector<std::vector<float>> lse(contexts.size());
    std::vector<int> tokens;
    for (size_t i = 0; i < contexts.size(); ++i) {
      tokens.push_back(std::min<int>(1 + int(i) * 3, contexts[i]->tokens()));
      sequences[i] =
          contexts[i]->Sequence(contexts[i]->tokens() - tokens[i], tokens[i], DType::kFloat16, &q[i], &out[i], &lse[i]);
    }
    AttentionBatch batch = contexts[0]->Batch(2, DType::kFloat16);
    batch.sequences = sequences;
    const auto plan = AttentionPlan::Make(batch, threads);
    WorkerPool pool(threads);
    for (int repeat = 0; repeat < 2; ++repeat) {  // a plan may run again
      std::promise<void> done;
      plan->Run(pool, [&] { done.set_value(); });
      done.get_future().wait();
    }
    uint64_t pairs = 0;
    for (size_t i = 0; i < contexts.size(); ++i) {
      const int first = contexts[i]->tokens() - tokens[i];
      const Context::Result got = contexts[i]->Collect(out[i], lse[i], DType::kFloat16, {});
      EXPECT_LE(LargestRowError(contexts[i]->Exact(first, tokens[i], 2, DType::kFloat16).out, got.out, 64), 1e-3) << i;
      EXPECT_TRUE(SameBits(contexts[i]->Run(first, tokens[i], 2, threads, DType::kFloat16).out, got.out)) << i;
      pairs += contexts[i]->ExactCounts(first, tokens[i], 2).raw_pairs;
    }
    EXPECT_EQ(plan->counts().raw_pairs, pairs);
    EXPECT_EQ(plan->multiply_adds(), pairs * 8 * 64 * 2);
  }
}

TEST(Attention, ThePlanMayDieInItsCallback) {
  Context context(MakeLayout(2, 64), 4, 300, 1, 17);
  std::vector<uint8_t> q, out;
  std::vector<float> lse;
  const AttentionSequence sequence = context.Sequence(0, 300, DType::kFloat32, &q, &out, &lse);
  AttentionBatch batch = context.Batch(2, DType::kFloat32);
  batch.sequences = absl::MakeConstSpan(&sequence, 1);
  WorkerPool pool(3);
  for (int i = 0; i < 20; ++i) {
    std::promise<void> done;
    std::unique_ptr<AttentionPlan> plan = AttentionPlan::Make(batch, 3);
    AttentionPlan* raw = plan.get();
    raw->Run(pool, [plan = std::move(plan), &done]() mutable {
      plan.reset();
      done.set_value();
    });
    done.get_future().wait();
  }
}

// However far it came: `done` is called once, and what others run on the pool is right.
TEST(Attention, ACancelledPlanEnds) {
  Context context(MakeLayout(2, 64), 4, 3000, 1, 18, "hack:k_bits=3,v_bits=2"), other(MakeLayout(2, 64), 4, 300, 1, 19);
  std::vector<uint8_t> q, out;
  std::vector<float> lse;
  const AttentionSequence sequence = context.Sequence(0, 3000, DType::kFloat32, &q, &out, &lse);
  AttentionBatch batch = context.Batch(2, DType::kFloat32);
  batch.sequences = absl::MakeConstSpan(&sequence, 1);
  batch.owner = WorkerPool::OwnerOf("a");
  const Context::Result right = other.Run(0, 300, 1, 2);
  WorkerPool pool(2, std::chrono::microseconds(0));
  int cut = 0;
  for (int i = 0; i < 24; ++i) {
    std::fill(out.begin(), out.end(), 0xff);
    std::promise<void> done, done_other;
    const auto plan = AttentionPlan::Make(batch, 2);
    plan->Run(pool, [&] { done.set_value(); });
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(100 * i);
    while (std::chrono::steady_clock::now() < until) continue;
    plan->Cancel();
    std::vector<uint8_t> q_other, out_other;
    std::vector<float> lse_other;
    const AttentionSequence sequence_other = other.Sequence(0, 300, DType::kFloat32, &q_other, &out_other, &lse_other);
    AttentionBatch batch_other = other.Batch(1, DType::kFloat32);
    batch_other.sequences = absl::MakeConstSpan(&sequence_other, 1);
    const auto plan_other = AttentionPlan::Make(batch_other, 2);
    plan_other->Run(pool, [&] { done_other.set_value(); });
    done.get_future().get();
    done_other.get_future().get();
    EXPECT_TRUE(SameBits(right.out, other.Collect(out_other, lse_other, DType::kFloat32, plan_other->counts()).out));
    cut += std::isnan(LoadElement(out.data(), DType::kFloat32, out.size() / sizeof(float) - 1));
  }
  EXPECT_GT(cut, 0) << "no plan was cancelled before it was done";
}

TEST(MergeSoftmax, IsAssociativeAndIgnoresEmptyStates) {
  constexpr int kRows = 3, kDim = 16;
  struct State {
    std::vector<float> max, sum, acc;
    SoftmaxRows rows() { return {max.data(), sum.data(), acc.data()}; }
  };
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 1);
  auto make = [&](float level) {
    State s{std::vector<float>(kRows), std::vector<float>(kRows), std::vector<float>(kRows * kDim)};
    for (float& x : s.max) x = level + normal(random);
    for (float& x : s.sum) x = 1 + std::abs(normal(random));
    for (float& x : s.acc) x = normal(random);
    return s;
  };
  const State empty{std::vector<float>(kRows, -std::numeric_limits<float>::infinity()), std::vector<float>(kRows),
                    std::vector<float>(kRows * kDim)};
  for (float level : {0.0f, 5.0f, -200.0f, 80.0f}) {
    const State a = make(0), b = make(level), c = make(-level);
    State left = a, right = b, tail = c;
    MergeSoftmax(kRows, kDim, State(b).rows(), left.rows());
    MergeSoftmax(kRows, kDim, State(c).rows(), left.rows());
    MergeSoftmax(kRows, kDim, tail.rows(), right.rows());
    State whole = a;
    MergeSoftmax(kRows, kDim, right.rows(), whole.rows());
    for (int r = 0; r < kRows; ++r) {
      EXPECT_FLOAT_EQ(left.max[r], whole.max[r]);
      EXPECT_NEAR(left.sum[r], whole.sum[r], 1e-5 * left.sum[r]);
      for (int i = r * kDim; i < (r + 1) * kDim; ++i) EXPECT_NEAR(left.acc[i], whole.acc[i], 1e-5);
    }
    State from_empty = a, into_empty = empty;
    MergeSoftmax(kRows, kDim, State(empty).rows(), from_empty.rows());
    MergeSoftmax(kRows, kDim, State(a).rows(), into_empty.rows());
    EXPECT_EQ(from_empty.acc, a.acc);
    EXPECT_EQ(into_empty.acc, a.acc);
    EXPECT_EQ(into_empty.sum, a.sum);
    State nothing = empty;
    MergeSoftmax(kRows, kDim, State(empty).rows(), nothing.rows());
    EXPECT_EQ(nothing.sum, empty.sum);
  }
}

}  // namespace
}  // namespace kvmanager
