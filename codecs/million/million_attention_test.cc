#include "codecs/million/million_attention.h"

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "codecs/million/million_lookup.h"
#include "codecs/million/million_reference.h"
#include "codecs/million/million_testing.h"
#include "gtest/gtest.h"

namespace kvmanager::million {
namespace {

constexpr double kTolerance = 1e-3;  // relative L2 of a row's output, against the same rounding

// Instrumented builds check a sample of the shapes: they look for bad accesses, not for wrong numbers.
#if defined(KVMANAGER_SANITIZED)
constexpr int kSample = 7;
#else
constexpr int kSample = 1;
#endif

struct State {
  State(int rows, int d) : rows(rows), d(d), max(MakeAligned<float>(rows)), sum(MakeAligned<float>(rows)) {
    acc = MakeAligned<float>(size_t(rows) * d);
    std::fill_n(max.get(), rows, -std::numeric_limits<float>::infinity());
  }
  SoftmaxRows Rows() const { return {max.get(), sum.get(), acc.get()}; }
  int rows, d;
  AlignedArray<float> max, sum, acc;
};

struct Path {
  Isa isa;
  LookUps look_ups;
};

std::vector<Path> Paths() {
  std::vector<Path> paths;
  for (Isa isa : SupportedIsas()) paths.push_back({isa, LookUps::kByAddress});
  paths.push_back({BestIsa(), LookUps::kBest});
  return paths;
}

/// Pages of random indices, or of given ones, and query rows.
using Index = std::function<int(int side, int token, int subspace)>;

struct Case {
  Case(const MillionFormat& format_in, int pages_count, int rows, float q_std, uint64_t seed,
       const Component& component = nullptr, const Index& index = nullptr)
      : format(format_in),
        books(format, 2, seed, component),
        rows(rows),
        q(MakeAligned<float>(size_t(rows) * format.layout.head_dim)) {
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(0, 1);
    const int tokens = format.layout.page_tokens;
    for (int i = 0; i < pages_count; ++i) {
      uint8_t* page = pages.emplace_back(MakeAligned<uint8_t>(format.page_bytes)).get();
      for (int h = 0; h < format.layout.kv_heads; ++h) {
        for (int side = 0; side < 2; ++side) {
          const SideLayout& s = format.side[side];
          uint8_t* strips = page + h * format.record_bytes + s.offset;
          for (int t = 0; t < tokens; ++t) {
            for (int m = 0; m < s.subspaces; ++m) {
              const int at = index ? index(side, i * tokens + t, m) : int(random() % s.centroids);
              PutIndex(s, strips + t / kStripTokens * s.strip_bytes, m, t % kStripTokens, at);
            }
          }
        }
      }
      pointers.push_back(page);
    }
    // A page table is in no order of memory.
    std::shuffle(pointers.begin(), pointers.end(), random);
    for (int i = 0; i < rows * format.layout.head_dim; ++i) q[i] = q_std * normal(random);
  }

  PageAttentionTask Task(int first_row, int row_count, size_t first_page, size_t page_count) const {
    PageAttentionTask task;
    task.q = q.get() + size_t(first_row) * format.layout.head_dim;
    task.rows = row_count;
    task.scale = 1 / std::sqrt(float(format.layout.head_dim));
    task.layer = 1;
    task.kv_head = format.layout.kv_heads - 1;
    task.pages = absl::MakeConstSpan(pointers).subspan(first_page, page_count);
    return task;
  }

  void Attend(Path path, const PageAttentionTask& task, const State& state) const {
    const auto attention = MakeMillionAttention(&format, books.tables.get(), path.isa, path.look_ups);
    const size_t bytes = attention->workspace_bytes(task.rows);
    AlignedArray<uint8_t> workspace = MakeAligned<uint8_t>(bytes);
    std::memset(workspace.get(), 0xff, bytes);
    attention->Attend(task, state.Rows(), absl::MakeSpan(workspace.get(), bytes));
  }

  /// Every path against the reference with the same rounding, and against exact attention on what the pages stand for.
  void Check(double exact_tolerance = std::numeric_limits<double>::infinity()) const {
    const int d = format.layout.head_dim;
    const PageAttentionTask task = Task(0, rows, 0, pointers.size());
    State same(rows, d), exact(rows, d);
    ReferenceAttend(format, *books.tables, task, Rounding::kCpu, same.Rows());
    ReferenceAttend(format, *books.tables, task, Rounding::kNothing, exact.Rows());
    for (const Path path : Paths()) {
      SCOPED_TRACE(testing::Message() << IsaName(path.isa) << " look-ups " << int(path.look_ups));
      State got(rows, d);
      Attend(path, task, got);
      Compare(same, got, kTolerance);
      // A score's error is that of q in 8 bits.
      Compare(exact, got, exact_tolerance, std::min(exact_tolerance, 1e-2));
    }
  }

  /// lse_tolerance: of the logarithm of the sum, relative to 1 + its size.
  void Compare(const State& expected, const State& got, double tolerance, double lse_tolerance = 3e-4) const {
    const int d = format.layout.head_dim;
    for (int r = 0; r < rows; ++r) {
      double error = 0, norm = 0;
      for (int c = 0; c < d; ++c) {
        const double e = double(expected.acc[r * d + c]) / expected.sum[r], g = double(got.acc[r * d + c]) / got.sum[r];
        ASSERT_TRUE(std::isfinite(g));
        error += (e - g) * (e - g);
        norm += e * e;
      }
      worst = std::max(worst, std::sqrt(error) / (std::sqrt(norm) + 1e-30));
      ASSERT_LE(std::sqrt(error), tolerance * std::sqrt(norm) + 1e-7) << "row " << r;
      const double lse = expected.max[r] + std::log(expected.sum[r]);
      ASSERT_NEAR(lse, got.max[r] + std::log(got.sum[r]), lse_tolerance * (1 + std::abs(lse))) << "row " << r;
    }
  }

  MillionFormat format;
  Books books;
  int rows;
  AlignedArray<float> q;
  std::vector<AlignedArray<uint8_t>> pages;
  std::vector<const uint8_t*> pointers;
  mutable double worst = 0;  // of the last Compare
};

TEST(MillionAttention, EveryNumberOfBitsAndWidthAgreesWithTheReference) {
  uint64_t seed = 1;
  for (int bits = kBitsMin; bits <= kBitsMax; ++bits) {
    for (int m : {64, 32, 16, 128, 1}) {
      if (++seed % kSample != 0 || (bits > 10 && m == 16)) continue;
      SCOPED_TRACE(testing::Message() << "m " << m << " bits " << bits);
      const int v_m = m == 64 ? 32 : 64, v_bits = kBitsMin + kBitsMax - bits;
      Case(MakeFormat(MakeLayout(1, 128, 64), {m, bits}, {v_m, v_bits}), 2, 3, 0.5, seed).Check();
    }
  }
}

TEST(MillionAttention, EveryShapeAgreesWithTheReference) {
  uint64_t seed = 100;
  for (int d : {16, 48, 80, 96, 256}) {
    for (int page_tokens : {64, 128, 256}) {
      for (int width : {1, 2, 3, 5, 8, d}) {
        if (d % width != 0 || ++seed % kSample != 0) continue;
        SCOPED_TRACE(testing::Message() << "d " << d << " tokens " << page_tokens << " width " << width);
        const int m = d / width;
        const SideParameters one = {m, 4 + int(seed % 6)}, other = {d / 2, 8};
        Case(MakeFormat(MakeLayout(2, d, page_tokens), seed % 2 ? one : other, seed % 2 ? other : one), 2, 1 + seed % 5,
             0.7, seed)
            .Check();
      }
    }
  }
}

TEST(MillionAttention, EveryGroupSizeAndTheLargestTile) {
  const MillionFormat format = MakeFormat(MakeLayout(1, 128, 64), {64, 8}, {64, 8});
  for (int rows = 1; rows <= 16; rows += kSample) Case(format, 2, rows, 0.5, rows).Check();
  Case(format, 1, PageAttentionTask::kRowsMax, 0.5, 17).Check();
}

/// Like a RoPE model's keys: a few channels 10 to 20 times as large as the others, and far from zero.
float OutlierComponent(int side, int channel, int index) {
  // About normal: the sum of twelve uniform numbers.
  uint64_t h = uint64_t(side) << 40 | uint64_t(channel) << 20 | uint64_t(index);
  float x = -6;
  for (int i = 0; i < 12; ++i) {
    h = h * 6364136223846793005u + 1442695040888963407u;
    x += float(h >> 40) * 0x1p-24f;
  }
  if (side == kSideV) return 0.5f * x;
  return channel % 40 == 7 ? 15.0f + 12.0f * x : channel % 40 == 23 ? -40.0f + 15.0f * x : x;
}

// The bounds of exact attention, by the standard deviation of the scores.
TEST(MillionAttention, IsNearExactAttentionOnWhatThePagesStandFor) {
  for (const bool outliers : {false, true}) {
    for (const auto& [m, bits] : {std::pair(64, 8), std::pair(64, 6), std::pair(32, 12)}) {
      const MillionFormat format = MakeFormat(MakeLayout(1, 128, 64), {m, bits}, {m, bits});
      for (const auto& [deviation, tolerance] : {std::pair(0.1, 4e-3), std::pair(1.0, 3e-2), std::pair(4.0, 1e-1)}) {
        SCOPED_TRACE(testing::Message() << "m " << m << " bits " << bits << " deviation " << deviation << " outliers "
                                        << outliers);
        // Scores have this deviation if all channels add alike; with outliers, measure and scale.
        Case c(format, 8, 4, 1, 7, outliers ? Component(OutlierComponent) : nullptr);
        double sum = 0, squares = 0;
        int count = 0;
        for (const uint8_t* page : c.pointers) {
          const std::vector<float> k = ReferenceValues(format, *c.books.tables, page, 1, 0, kSideK);
          for (int t = 0; t < 64; ++t, ++count) {
            double score = 0;
            for (int i = 0; i < 128; ++i) score += k[t * 128 + i] * c.q[i] / std::sqrt(128.0);
            sum += score;
            squares += score * score;
          }
        }
        const double measured = std::sqrt(squares / count - sum / count * (sum / count));
        for (int i = 0; i < 4 * 128; ++i) c.q[i] *= float(deviation / measured);
        c.Check(tolerance);
        testing::Test::RecordProperty(absl::StrCat("worst_", outliers ? "outliers_" : "", m, "_", bits, "_", deviation),
                                      absl::StrCat(c.worst));
      }
    }
  }
}

TEST(MillionAttention, AdversarialPages) {
  for (const auto& [m, bits] : {std::pair(64, 8), std::pair(64, 5), std::pair(32, 9), std::pair(128, 4)}) {
    SCOPED_TRACE(testing::Message() << "m " << m << " bits " << bits);
    const MillionFormat format = MakeFormat(MakeLayout(1, 128, 64), {m, bits}, {m, bits});
    Case(format, 2, 3, 0, 1).Check(4e-3);  // zero q
    Case(format, 2, 3, 1, 2, [](int side, int c, int i) {
      return side == kSideK ? 0.0f : float(i % 7) - 0.1f * c;
    }).Check(4e-3);  // zero K
    Case(format, 2, 3, 1, 3, [](int side, int c, int i) {
      return side == kSideV ? 0.0f : float((i * 31 + c) % 17) / 8;
    }).Check(4e-3);                                                                                       // zero V
    Case(format, 2, 3, 1, 4, nullptr, [](int, int, int subspace) { return subspace % 16; }).Check(4e-3);  // constant
    // The largest codes and queries everywhere: what would saturate 16-bit sums, or overflow 32-bit ones.
    Case extreme(
        format, 2, 3, 1, 5, [](int, int, int i) { return i % 2 ? 8.0f : -8.0f; },
        [](int, int t, int subspace) { return t % 3 == 0 ? 1 : (t + subspace) % 2; });
    for (int i = 0; i < 3 * 128; ++i) extreme.q[i] = i < 128 ? 1 : i < 256 ? -1 : (i % 2 ? 1 : -1);
    extreme.Check();
    // One token takes all the attention.
    Case one_hot(
        format, 3, 2, 0, 6,
        [](int side, int c, int i) {
          return side == kSideK ? (i == 1 ? 30.0f : -1.0f - 0.1f * i) : float((i * 13 + c) % 29) - 14;
        },
        [](int side, int t, int subspace) { return side == kSideK ? (t == 100) : (t + subspace) % 16; });
    for (int i = 0; i < 2 * 128; ++i) one_hot.q[i] = i < 128 ? 4 : 0.5f;
    one_hot.Check(4e-3);
    // Scores that fall, and rise, by page.
    for (const float q : {-4.0f, 4.0f}) {
      Case slope(
          format, 4, 1, 0, 7, [](int side, int c, int i) { return side == kSideK ? 0.5f * i : float(i % 5 + c % 3); },
          [](int side, int t, int subspace) { return side == kSideK ? t / 16 % 16 : (t * 7 + subspace) % 16; });
      for (int i = 0; i < 128; ++i) slope.q[i] = q;
      slope.Check();
    }
  }
}

TEST(MillionAttention, RowsDoNotDependOnTheirNeighbours) {
  for (const auto& [m, bits] : {std::pair(64, 8), std::pair(32, 6)}) {
    Case c(MakeFormat(MakeLayout(1, 80, 64), {m == 64 ? 40 : 20, bits}, {40, 8}), 3, 9, 1, 7);
    for (const Path path : Paths()) {
      State all(9, 80);
      c.Attend(path, c.Task(0, 9, 0, 3), all);
      for (int r = 0; r < 9; ++r) {
        for (int count = 1; count <= 5 && r + count <= 9; ++count) {
          State part(count, 80);
          c.Attend(path, c.Task(r, count, 0, 3), part);
          ASSERT_EQ(0, std::memcmp(part.acc.get(), all.acc.get() + r * 80, sizeof(float) * 80 * count));
          ASSERT_EQ(0, std::memcmp(part.sum.get(), all.sum.get() + r, sizeof(float) * count));
        }
      }
    }
  }
}

TEST(MillionAttention, PagesInSeveralCallsGiveTheSameBits) {
  Case c(MakeFormat(MakeLayout(2, 80, 128), {40, 8}, {20, 6}), 5, 4, 1, 9);
  for (const Path path : Paths()) {
    State all(4, 80), parts(4, 80);
    c.Attend(path, c.Task(0, 4, 0, 5), all);
    c.Attend(path, c.Task(0, 4, 0, 2), parts);
    PageAttentionTask rest = c.Task(0, 4, 2, 3);
    c.Attend(path, rest, parts);
    EXPECT_EQ(0, std::memcmp(parts.acc.get(), all.acc.get(), sizeof(float) * 4 * 80));
    // What to prefetch changes nothing.
    State hinted(4, 80);
    PageAttentionTask task = c.Task(0, 4, 0, 5);
    task.next_pages = absl::MakeConstSpan(c.pointers).first(2);
    c.Attend(path, task, hinted);
    EXPECT_EQ(0, std::memcmp(hinted.acc.get(), all.acc.get(), sizeof(float) * 4 * 80));
  }
}

// Both ways to look up give the same codes, so the same bits.
TEST(MillionAttention, PermutesAndAddressesAgreeToTheBit) {
  if (!PermutesServe(8)) GTEST_SKIP() << "no AVX-512 VBMI";
  for (int bits = kBitsMin; bits <= 9; ++bits) {
    for (int width : {1, 2, 3, 4, 6, 8, 16}) {
      SCOPED_TRACE(testing::Message() << "bits " << bits << " width " << width);
      Case c(MakeFormat(MakeLayout(1, 96, 64), {96 / (width == 16 ? 12 : width), bits}, {96 / width, bits}), 1, 2, 1,
             bits);
      State a(2, 96), b(2, 96);
      c.Attend({BestIsa(), LookUps::kByAddress}, c.Task(0, 2, 0, 1), a);
      c.Attend({BestIsa(), LookUps::kBest}, c.Task(0, 2, 0, 1), b);
      ASSERT_EQ(0, std::memcmp(a.acc.get(), b.acc.get(), sizeof(float) * 2 * 96));
    }
  }
}

}  // namespace
}  // namespace kvmanager::million
