#include "codecs/raw/raw_attention.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"

namespace kvmanager {
namespace {

template <typename T>
struct Aligned {
  explicit Aligned(size_t n) : data(static_cast<T*>(std::aligned_alloc(64, (n * sizeof(T) + 127) / 64 * 64))), size(n) {
    std::memset(static_cast<void*>(data), 0, n * sizeof(T));
  }
  ~Aligned() { std::free(data); }
  Aligned(const Aligned&) = delete;
  Aligned(Aligned&& other) : data(std::exchange(other.data, nullptr)), size(other.size) {}
  T* data;
  size_t size;
};

/// Random pages and rows, and the state of attending to them.
struct Case {
  Case(const PageLayout& layout, int pages_count, int rows, double std_dev, uint64_t seed)
      : layout(layout), rows(rows), q(size_t(rows) * layout.head_dim) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(0, 1);
    for (int i = 0; i < pages_count; ++i) {
      pages.emplace_back(layout.raw_bytes());
      for (size_t e = 0; e < layout.raw_bytes() / 2; ++e)
        StoreElement(pages.back().data, layout.dtype, e, normal(random));
      pointers.push_back(pages.back().data);
    }
    for (size_t i = 0; i < q.size; ++i) q.data[i] = float(std_dev) * normal(random);
  }

  struct State {
    State(int rows, int d) : max(rows), sum(rows), acc(size_t(rows) * d) {
      std::fill_n(max.data, rows, -std::numeric_limits<float>::infinity());
    }
    SoftmaxRows rows() const { return {max.data, sum.data, acc.data}; }
    Aligned<float> max, sum, acc;
  };

  State Attend(Isa isa, int head, const int* visible, int first_row = 0, int row_count = -1) const {
    if (row_count < 0) row_count = rows;
    const auto attention = MakeRawAttention(layout, isa);
    State state(row_count, layout.head_dim);
    PageAttentionTask task;
    task.q = q.data + size_t(first_row) * layout.head_dim;
    task.rows = row_count;
    task.scale = 1 / std::sqrt(float(layout.head_dim));
    task.kv_head = head;
    task.pages = pointers;
    task.visible = visible == nullptr ? nullptr : visible + first_row;
    Aligned<uint8_t> workspace(attention->workspace_bytes(row_count) + 64);
    attention->Attend(task, state.rows(), absl::MakeSpan(workspace.data, workspace.size));
    return state;
  }

  /// Relative L2 error of every row's output, and its log-sum-exp, against doubles.
  void Compare(const State& state, int head, const int* visible, double tolerance) const {
    const int d = layout.head_dim;
    for (int r = 0; r < rows; ++r) {
      const int tokens = visible == nullptr ? int(pages.size()) * layout.page_tokens : visible[r];
      std::vector<double> score(tokens), out(d);
      double max = -INFINITY, sum = 0;
      auto element = [&](int side, int t, int c) {
        const size_t offset = layout.raw_offset(side, head, t % layout.page_tokens) / 2 + c;
        return double(LoadElement(pages[t / layout.page_tokens].data, layout.dtype, offset));
      };
      for (int t = 0; t < tokens; ++t) {
        for (int c = 0; c < d; ++c) score[t] += q.data[r * d + c] * element(0, t, c) / std::sqrt(double(d));
        max = std::max(max, score[t]);
      }
      for (int t = 0; t < tokens; ++t) {
        const double p = std::exp(score[t] - max);
        sum += p;
        for (int c = 0; c < d; ++c) out[c] += p * element(1, t, c);
      }
      double error = 0, norm = 0;
      for (int c = 0; c < d; ++c) {
        const double got = state.acc.data[r * d + c] / state.sum.data[r];
        error += (got - out[c] / sum) * (got - out[c] / sum);
        norm += out[c] / sum * (out[c] / sum);
      }
      ASSERT_LE(std::sqrt(error), tolerance * std::sqrt(norm)) << "row " << r;
      ASSERT_NEAR(state.max.data[r] + std::log(state.sum.data[r]), max + std::log(sum), 1e-5 * (1 + std::abs(max)));
    }
  }

  PageLayout layout;
  int rows;
  Aligned<float> q;
  std::vector<Aligned<uint8_t>> pages;
  std::vector<const uint8_t*> pointers;
};

PageLayout MakeLayout(DType dtype, int heads, int d, int page_tokens) {
  PageLayout layout;
  layout.dtype = dtype;
  layout.kv_heads = heads;
  layout.head_dim = d;
  layout.page_tokens = page_tokens;
  return layout;
}

TEST(RawAttention, EveryShapeOnEveryInstructionSet) {
  uint64_t seed = 1;
  for (Isa isa : SupportedIsas()) {
    SCOPED_TRACE(IsaName(isa));
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (int d : {16, 48, 64, 80, 128, 256}) {
        for (int rows : {1, 2, 3, 4, 5, 7}) {
          SCOPED_TRACE(testing::Message() << "d " << d << " rows " << rows);
          Case c(MakeLayout(dtype, 2, d, d == 48 ? 16 : 64), 3, rows, 1.0, seed++);
          c.Compare(c.Attend(isa, 1, nullptr), 1, nullptr, 3e-6);
          std::vector<int> visible(rows);
          std::mt19937 random(seed);
          for (int& v : visible) v = 1 + random() % (3 * c.layout.page_tokens);
          c.Compare(c.Attend(isa, 0, visible.data()), 0, visible.data(), 3e-6);
        }
      }
    }
  }
}

TEST(RawAttention, SharpAndFlatScores) {
  for (Isa isa : SupportedIsas()) {
    for (double std_dev : {0.0, 0.01, 4.0, 30.0}) {
      Case c(MakeLayout(DType::kFloat16, 1, 128, 64), 4, 4, std_dev, 7);
      c.Compare(c.Attend(isa, 0, nullptr), 0, nullptr, 2e-5);
    }
  }
}

TEST(RawAttention, RowsDoNotDependOnTheirNeighbours) {
  for (Isa isa : SupportedIsas()) {
    Case c(MakeLayout(DType::kBFloat16, 1, 80, 64), 2, 64, 2.0, 11);
    std::vector<int> visible(64);
    for (int r = 0; r < 64; ++r) visible[r] = 64 + r + 1;
    const Case::State all = c.Attend(isa, 0, visible.data());
    for (int r = 0; r < 64; r += 3) {
      for (int count = 1; count <= 3 && r + count <= 64; ++count) {
        const Case::State part = c.Attend(isa, 0, visible.data(), r, count);
        EXPECT_EQ(0, std::memcmp(part.acc.data, all.acc.data + r * 80, sizeof(float) * 80 * count));
        EXPECT_EQ(0, std::memcmp(part.sum.data, all.sum.data + r, sizeof(float) * count));
        EXPECT_EQ(0, std::memcmp(part.max.data, all.max.data + r, sizeof(float) * count));
      }
    }
  }
}

TEST(RawAttention, NothingBeyondTheVisibleTokensIsRead) {
  for (Isa isa : SupportedIsas()) {
    for (int visible : {1, 2, 15, 17, 63}) {
      Case c(MakeLayout(DType::kFloat16, 2, 64, 64), 1, 3, 1.0, 13);
      for (int side = 0; side < 2; ++side) {
        for (int t = visible; t < 64; ++t)
          std::memset(c.pages[0].data + c.layout.raw_offset(side, 1, t), 0xff, 128);  // NaN
      }
      const std::vector<int> seen(3, visible);
      c.Compare(c.Attend(isa, 1, seen.data()), 1, seen.data(), 3e-6);
    }
  }
}

TEST(RawAttention, ConversionsAreExact) {
  std::vector<uint16_t> all(65536);
  for (int i = 0; i < 65536; ++i) all[i] = uint16_t(i);
  std::vector<float> hard;
  std::mt19937 random(3);
  for (int i = 0; i < 20000; ++i) hard.push_back(std::bit_cast<float>(uint32_t(random())));
  for (int i = 0; i < 65536; i += 7) {
    hard.push_back(std::bit_cast<float>(std::bit_cast<uint32_t>(HalfToFloat(i)) + 0x1000));  // halfway
  }
  for (float x : {0.0f, -0.0f, 65519.0f, 65520.0f, INFINITY, -INFINITY, 0x1p-25f, 0x1.8p-25f, 0x1p-14f})
    hard.push_back(x);
  while (hard.size() % 16 != 5) hard.push_back(1);
  for (Isa isa : SupportedIsas()) {
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      std::vector<float> wide(all.size());
      ConvertToFloat(all.data(), dtype, all.size(), wide.data(), isa);
      for (size_t i = 0; i < all.size(); ++i) {
        const float expected = LoadElement(all.data(), dtype, i);
        if (std::isnan(expected)) {
          ASSERT_TRUE(std::isnan(wide[i]));
        } else {
          ASSERT_EQ(std::bit_cast<uint32_t>(expected), std::bit_cast<uint32_t>(wide[i])) << i << IsaName(isa);
        }
      }
      std::vector<uint16_t> narrow(hard.size());
      ConvertFromFloat(hard.data(), dtype, hard.size(), narrow.data(), isa);
      for (size_t i = 0; i < hard.size(); ++i) {
        uint16_t expected[2];  // StoreElement knows 32 bits, too
        StoreElement(expected, dtype, 0, hard[i]);
        if (std::isnan(hard[i])) {
          ASSERT_TRUE(std::isnan(LoadElement(narrow.data(), dtype, i)));
        } else {
          ASSERT_EQ(expected[0], narrow[i]) << hard[i] << IsaName(isa);
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvmanager
