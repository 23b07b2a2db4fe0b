#include "codecs/zack/zack_attention.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "codecs/zack/zack_reference.h"
#include "codecs/zack/zack_testing.h"
#include "gtest/gtest.h"

namespace kvmanager::zack {
namespace {

// Instrumented builds check a sample of the shapes: they look for bad accesses, not for wrong numbers.
#if defined(KVMANAGER_SANITIZED)
constexpr int kSample = 5;
#else
constexpr int kSample = 1;
#endif

struct State {
  State(int rows, int d)
      : max(rows, -std::numeric_limits<float>::infinity()), sum(rows, 0), acc(MakeBytes(size_t(rows) * d * 4)) {
    std::fill_n(values(), size_t(rows) * d, 0.0f);
  }
  float* values() { return reinterpret_cast<float*>(acc.get()); }
  SoftmaxRows rows() { return {max.data(), sum.data(), values()}; }
  std::vector<float> max, sum;
  Bytes acc;
};

/// Rows of queries over encoded pages, mapped there and back.
class Case {
 public:
  Case(const PageLayout& layout, const std::string& mode, const std::vector<int32_t>& ranks, int pages, int rows,
       float q_std, uint64_t seed)
      : context_(MakeContext(layout, 1, layout.kv_heads)),
        format_(MakeFormat(context_, mode, false, ranks)),
        rows_(rows),
        q_(MakeBytes(size_t(rows) * layout.head_dim * 4)) {
    std::mt19937_64 random(seed);
    for (int i = 0; i < pages; ++i) {
      const Bytes raw = RandomPage(layout, random);
      pages_.push_back(MakeBytes(format_.page_bytes[0]));
      KV_CHECK(ReferenceEncode(format_, 0, raw.get(), pages_.back().get()));
      pointers_.push_back(pages_.back().get());
    }
    std::normal_distribution<float> normal(0, q_std);
    for (int i = 0; i < rows * layout.head_dim; ++i) q()[i] = normal(random);
  }

  float* q() { return reinterpret_cast<float*>(q_.get()); }
  uint8_t* page(int i) { return pages_[i].get(); }
  const ZackFormat& format() const { return format_; }

  void Check(Isa isa, int kv_head, double tolerance) {
    const PageLayout& layout = format_.layout;
    const int d = layout.head_dim;
    const auto attention = MakeZackAttention(&format_, isa);
    ASSERT_TRUE(attention->maps(0));
    const Bytes mapped = MakeBytes(size_t(rows_) * d * 4), out = MakeBytes(size_t(rows_) * d * 4);
    float* mapped_q = reinterpret_cast<float*>(mapped.get());
    float* outputs = reinterpret_cast<float*>(out.get());
    attention->MapQueries(0, kv_head, rows_, q(), mapped_q);
    State state(rows_, d);
    PageAttentionTask task;
    task.q = mapped_q;
    task.rows = rows_;
    task.scale = 1 / std::sqrt(float(d));
    task.kv_head = kv_head;
    task.pages = pointers_;
    attention->Attend(task, state.rows(), {});
    attention->ExpandOutput(0, kv_head, rows_, state.values(), outputs);
    std::vector<ReferencePage> pages;
    for (const Bytes& page : pages_) pages.push_back({nullptr, page.get(), layout.page_tokens});
    const int n = format_.head(0, kv_head).rank[1];
    for (int r = 0; r < rows_; ++r) {
      const ReferenceOutput wanted = ReferenceAttend(format_, 0, kv_head, q() + r * d, task.scale, pages);
      double error = 0, norm = 0, folded_error = 0, folded_norm = 0;
      for (int c = 0; c < d; ++c) {
        error += std::pow(outputs[r * d + c] / state.sum[r] - wanted.out[c], 2);
        norm += std::pow(wanted.out[c], 2);
        folded_error += std::pow(state.values()[r * d + c] / state.sum[r] - wanted.folded[c], 2);
        folded_norm += std::pow(wanted.folded[c], 2);
      }
      for (int c = n; c < d; ++c) ASSERT_EQ(state.values()[r * d + c], 0);
      ASSERT_LE(std::sqrt(error), tolerance * std::sqrt(norm) + 1e-30) << IsaName(isa) << " row " << r;
      ASSERT_LE(std::sqrt(folded_error), tolerance * std::sqrt(folded_norm) + 1e-30) << IsaName(isa) << " row " << r;
      ASSERT_NEAR(state.max[r] + std::log(state.sum[r]), wanted.lse, 1e-5 * (1 + std::abs(wanted.lse)));
    }
  }

 private:
  CodecContext context_;
  ZackFormat format_;
  int rows_;
  Bytes q_;
  std::vector<Bytes> pages_;
  std::vector<const uint8_t*> pointers_;
};

TEST(ZackAttention, EveryRankOnEveryInstructionSet) {
  for (int n = 16; n <= 128; n += 16 * kSample) {
    const int other = 144 - n;
    Case test(MakeLayout(2, 128), n % 32 ? "joint" : "balanced", {n, other, other, n}, 3, 5, 1, n);
    for (Isa isa : SupportedIsas()) {
      test.Check(isa, 0, 2e-5);
      test.Check(isa, 1, 2e-5);
    }
  }
}

TEST(ZackAttention, OtherShapesAndEveryGroupSize) {
  for (const auto [d, page_tokens, k, v] : {std::array{16, 16, 16, 16}, {48, 32, 32, 48}, {256, 256, 240, 112}}) {
    Case test(MakeLayout(1, d, page_tokens), "balanced", {k, v}, 2, 3, 1, d);
    for (Isa isa : SupportedIsas()) test.Check(isa, 0, 2e-5);
  }
  for (int rows = 1; rows <= 16; rows += kSample) {
    Case test(MakeLayout(1, 64), "balanced", {48, 32}, 2, rows, 1, rows);
    test.Check(BestIsa(), 0, 2e-5);
  }
}

TEST(ZackAttention, AdversarialScores) {
  for (Isa isa : SupportedIsas()) {
    {
      Case zero_q(MakeLayout(1, 64), "balanced", {32, 48}, 2, 4, 1, 1);
      std::fill_n(zero_q.q(), 4 * 64, 0.0f);
      zero_q.Check(isa, 0, 2e-5);
    }
    {
      Case zero_pages(MakeLayout(1, 64), "joint", {32, 48}, 2, 4, 1, 2);
      std::fill_n(zero_pages.page(0), zero_pages.format().page_bytes[0], uint8_t{0});
      zero_pages.Check(isa, 0, 2e-5);
    }
    // One token takes all: scores of a standard deviation beyond 100.
    Case one_hot(MakeLayout(1, 64), "balanced", {64, 16}, 4, 4, 200, 3);
    one_hot.Check(isa, 0, 1e-3);
    {
      // The largest values that a page of a peer may hold.
      Case largest(MakeLayout(1, 64), "balanced", {32, 32}, 2, 2, 1e-6f, 4);
      for (int i = 0; i < 64 * (32 + 32); ++i)
        StoreElement(largest.page(1), DType::kFloat16, i, i % 3 ? 65504 : -65504);
      largest.Check(isa, 0, 1e-3);
    }
  }
}

TEST(ZackAttention, ProjectionAndExpansionAreTheFactors) {
  const CodecContext context = MakeContext(MakeLayout(2, 64), 1, 2);
  const ZackFormat format = MakeFormat(context, "balanced", true, {16, 32, 64, 48});
  const Factors factors = ReadFactors(context, "balanced").value();
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0, 1);
  constexpr int kRows = 3, kDim = 64;
  std::vector<float> x(kRows * kDim), out(kRows * kDim);
  for (float& f : x) f = normal(random);
  for (Isa isa : SupportedIsas()) {
    const auto attention = MakeZackAttention(&format, isa);
    for (int head = 0; head < 2; ++head) {
      const auto check = [&](const float* factor, int n) {
        for (int r = 0; r < kRows; ++r) {
          for (int c = 0; c < kDim; ++c) {
            double wanted = 0;
            for (int i = 0; i < kDim && c < n; ++i) wanted += double(x[r * kDim + i]) * factor[i * kDim + c];
            ASSERT_NEAR(out[r * kDim + c], wanted, c < n ? 1e-4 : 0);
          }
        }
      };
      attention->MapQueries(0, head, kRows, x.data(), out.data());
      check(factors.left_of(0, 0, head), format.head(0, head).rank[0]);
      attention->ProjectOutput(0, head, kRows, x.data(), out.data());
      check(factors.right_of(1, 0, head), format.head(0, head).rank[1]);
      EXPECT_EQ(attention->head_bytes(0, head), format.head_bytes(0, head));
    }
  }
}

}  // namespace
}  // namespace kvmanager::zack
