#include "codecs/hack/hack_attention.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "codecs/hack/hack_reference.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"

namespace kvmanager::hack {
namespace {

constexpr double kTolerance = 1e-3;  // relative L2 of a row's output

// Instrumented builds check a sample of the shapes: they look for bad accesses, not for wrong numbers.
#if defined(KVMANAGER_SANITIZED)
constexpr int kSample = 7, kShapeSample = 23;
#else
constexpr int kSample = 1, kShapeSample = 1;
#endif

struct Free {
  void operator()(void* p) const { std::free(p); }
};
template <typename T>
using AlignedArray = std::unique_ptr<T[], Free>;

template <typename T>
AlignedArray<T> MakeAligned(size_t n) {
  T* data = static_cast<T*>(std::aligned_alloc(64, (n * sizeof(T) + 127) / 64 * 64));
  std::memset(static_cast<void*>(data), 0, n * sizeof(T));
  return AlignedArray<T>(data);
}

struct State {
  State(int rows, int d) : rows(rows), d(d), max(MakeAligned<float>(rows)), sum(MakeAligned<float>(rows)) {
    acc = MakeAligned<float>(size_t(rows) * d);
    std::fill_n(max.get(), rows, -std::numeric_limits<float>::infinity());
  }
  SoftmaxRows Rows() const { return {max.get(), sum.get(), acc.get()}; }
  int rows, d;
  AlignedArray<float> max, sum, acc;
};

PageLayout MakeLayout(int heads, int d, int page_tokens) {
  PageLayout layout;
  layout.kv_heads = heads;
  layout.head_dim = d;
  layout.page_tokens = page_tokens;
  return layout;
}

using Value = std::function<float(int side, int token, int channel)>;

/// Encoded pages of random or given values, and query rows.
struct Case {
  Case(HackFormat format_in, int pages_count, int rows, float q_std, uint64_t seed, const Value& value = nullptr)
      : format(std::move(format_in)), rows(rows), q(MakeAligned<float>(size_t(rows) * format.layout.head_dim)) {
    const PageLayout& layout = format.layout;
    std::mt19937_64 random(seed);
    std::normal_distribution<float> normal(0, 1);
    std::vector<float> bias(layout.head_dim), spread(layout.head_dim);  // channels differ, as real keys' do
    for (float& x : bias) x = 2 * normal(random);
    for (float& x : spread) x = std::exp(normal(random));
    AlignedArray<uint8_t> raw = MakeAligned<uint8_t>(layout.raw_bytes());
    for (int i = 0; i < pages_count; ++i) {
      for (int side = 0; side < 2; ++side) {
        for (int h = 0; h < layout.kv_heads; ++h) {
          for (int t = 0; t < layout.page_tokens; ++t) {
            for (int c = 0; c < layout.head_dim; ++c) {
              const float x = value ? value(side, i * layout.page_tokens + t, c) : bias[c] + spread[c] * normal(random);
              StoreElement(raw.get(), layout.dtype, layout.raw_offset(side, h, t) / 2 + c, x);
            }
          }
        }
      }
      pages.push_back(MakeAligned<uint8_t>(format.page_bytes));
      EXPECT_TRUE(ReferenceEncode(format, raw.get(), 0, i * layout.page_tokens, pages.back().get()));
      pointers.push_back(pages.back().get());
    }
    for (int i = 0; i < rows * layout.head_dim; ++i) q[i] = q_std * normal(random);
  }

  PageAttentionTask Task(int first_row, int row_count, size_t first_page, size_t page_count) const {
    PageAttentionTask task;
    task.q = q.get() + size_t(first_row) * format.layout.head_dim;
    task.rows = row_count;
    task.scale = 1 / std::sqrt(float(format.layout.head_dim));
    task.kv_head = format.layout.kv_heads - 1;
    task.pages = absl::MakeConstSpan(pointers).subspan(first_page, page_count);
    return task;
  }

  void Attend(Isa isa, const PageAttentionTask& task, const State& state) const {
    const auto attention = MakeHackAttention(&format, isa);
    const size_t bytes = attention->workspace_bytes(task.rows);
    AlignedArray<uint8_t> workspace = MakeAligned<uint8_t>(bytes);
    std::memset(workspace.get(), 0xff, bytes);
    attention->Attend(task, state.Rows(), absl::MakeSpan(workspace.get(), bytes));
  }

  /// Every instruction set against the reference.
  void Check() const {
    const int d = format.layout.head_dim;
    const PageAttentionTask task = Task(0, rows, 0, pointers.size());
    State expected(rows, d);
    ReferenceAttend(format, task, expected.Rows());
    for (Isa isa : SupportedIsas()) {
      SCOPED_TRACE(IsaName(isa));
      State got(rows, d);
      Attend(isa, task, got);
      for (int r = 0; r < rows; ++r) {
        double error = 0, norm = 0;
        for (int c = 0; c < d; ++c) {
          const double e = double(expected.acc[r * d + c]) / expected.sum[r],
                       g = double(got.acc[r * d + c]) / got.sum[r];
          error += (e - g) * (e - g);
          norm += e * e;
        }
        ASSERT_LE(std::sqrt(error), kTolerance * std::sqrt(norm) + 1e-7) << "row " << r;
        const double lse = expected.max[r] + std::log(expected.sum[r]);
        ASSERT_NEAR(lse, got.max[r] + std::log(got.sum[r]), 2e-4 * (1 + std::abs(lse))) << "row " << r;
      }
    }
  }

  HackFormat format;
  int rows;
  AlignedArray<float> q;
  std::vector<AlignedArray<uint8_t>> pages;
  std::vector<const uint8_t*> pointers;
};

HackFormat Format(int heads, int d, int page_tokens, HackParameters parameters, const SegmentBits* bits = nullptr) {
  if ((d & (d - 1)) != 0) parameters.rotation = Rotation::kNone;
  return MakeHackFormat(MakeLayout(heads, d, page_tokens), parameters, bits);
}

HackParameters Bits(int k_bits, int v_bits) {
  HackParameters p;
  p.k_bits = k_bits;
  p.v_bits = v_bits;
  return p;
}

TEST(HackAttention, EveryWidthAgreesWithTheReference) {
  uint64_t seed = 1;
  for (int k_bits : {1, 2, 3, 4, 8}) {
    for (int v_bits : {1, 2, 3, 4, 8}) {
      for (int rows : {1, 4, 6}) {
        SCOPED_TRACE(testing::Message() << "K" << k_bits << "V" << v_bits << " rows " << rows);
        if (++seed % kSample != 0) continue;
        HackParameters p = Bits(k_bits, v_bits);
        p.v_norm = seed % 4 != 0;
        Case(Format(1, 128, 64, p), 3, rows, 0.5, seed).Check();
      }
    }
  }
}

TEST(HackAttention, EveryShapeAgreesWithTheReference) {
  uint64_t seed = 100;
  for (int page_tokens : {64, 128, 256}) {
    for (int part : {32, 64, 128}) {
      if (page_tokens % part != 0) continue;
      for (int meta : {8, 16}) {
        for (int d : {16, 64, 80, 128, 256}) {
          for (Axis axis : {Axis::kChannel, Axis::kToken}) {
            if (axis == Axis::kToken && d % part != 0) continue;
            for (int variant = 0; variant < (axis == Axis::kToken ? 3 : 1); ++variant) {
              constexpr int kWidths[] = {2, 3, 1, 8, 4};
              HackParameters p = Bits(kWidths[seed % 5], kWidths[seed / 2 % 5]);
              p.k_axis = axis;
              p.partition = part;
              p.meta_bits = meta;
              p.query = variant == 1 ? QueryCode::kAsymmetric : QueryCode::kSymmetric;
              p.sums = variant == 1 || meta == 16;
              p.rotation = variant == 2 ? Rotation::kNone : Rotation::kHadamard;
              p.v_norm = seed % 3 != 0;
              if (axis == Axis::kChannel) p.sums = false;
              SCOPED_TRACE(testing::Message()
                           << "tokens " << page_tokens << " part " << part << " meta " << meta << " d " << d << " axis "
                           << int(axis) << " variant " << variant << " K" << p.k_bits << "V" << p.v_bits);
              Case(Format(2, d, page_tokens, p), 2, 1 + seed % 5, 0.7, seed).Check();
            }
          }
        }
      }
    }
  }
}

TEST(HackAttention, EveryGroupSize) {
  for (int rows = 1; rows <= 16; rows += kSample) Case(Format(1, 128, 64, Bits(3, 2)), 2, rows, 0.5, rows).Check();
  Case(Format(1, 64, 64, Bits(2, 2)), 1, 64, 0.5, 17).Check();
}

TEST(HackAttention, WidthsPerSegment) {
  std::mt19937 random(5);
  for (int round = 0; round < 12; round += kSample) {
    SegmentBits bits(2);
    for (auto& head : bits) {
      for (auto& side : head) {
        constexpr int kWidths[] = {0, 1, 2, 3, 4, 8};
        for (int s = 0; s < 8; ++s) side.push_back(round == 0 ? 0 : kWidths[random() % 6]);
        if (round % 2) std::sort(side.rbegin(), side.rend());
      }
    }
    HackParameters p;
    p.partition = round % 3 ? 64 : 32;
    p.v_norm = round % 4 != 3;
    SCOPED_TRACE(round);
    Case(Format(2, 128, 64, p, &bits), 2, 5, 0.5, round).Check();
  }
}

/// Widths of K per segment, 0..4 and 8; V 2 throughout.
SegmentBits WidthsOfK(int heads, const std::vector<uint8_t>& k) {
  return SegmentBits(heads, {k, std::vector<uint8_t>(k.size(), 2)});
}

/// K's widths with segments of 8 bits, for d = 16 * .size().
std::vector<std::vector<uint8_t>> WideWidths(int segments) {
  std::vector<std::vector<uint8_t>> all(6, std::vector<uint8_t>(segments, 0));
  for (int s = 0; s < segments; ++s) {
    all[0][s] = s == 0 ? 8 : std::max(0, 4 - s);
    all[1][s] = 8;
    all[2][s] = s == segments - 1 ? 8 : 1;
    all[3][s] = s % 2 ? 8 : 3;
    all[4][s] = s == 1 ? 8 : 0;
    all[5][s] = s < 2 ? 8 : s == 2 ? 4 : 2;
  }
  return all;
}

TEST(HackAttention, QueriesInTwoBytes) {
  uint64_t seed = 1;
  for (int d : {64, 80, 128, 256}) {
    for (const auto& widths : WideWidths(d / kSegmentChannels)) {
      for (const auto& [page_tokens, part, meta] :
           {std::tuple(64, 64, 8), std::tuple(64, 32, 8), std::tuple(128, 128, 16)}) {
        for (int rows : {1, 2, 3, 4, 7}) {
          if (++seed % kSample != 0) continue;
          HackParameters p;
          p.partition = part;
          p.meta_bits = meta;
          p.rotation = Rotation::kNone;
          const SegmentBits bits = WidthsOfK(2, widths);
          SCOPED_TRACE(testing::Message() << "d " << d << " seed " << seed << " part " << part << " rows " << rows);
          const HackFormat format = Format(2, d, page_tokens, p, &bits);
          ASSERT_TRUE(format.heads[1].side[0].two_byte_q);
          Case(format, 2, rows, 0.5, seed).Check();
          // A channel that stands out, inside a segment of 8 bits and outside.
          for (int loud : {0, 16, d - 1}) {
            std::mt19937 random{uint32_t(seed)};
            std::normal_distribution<float> normal;
            Case(format, 2, rows, 0.05, seed, [&](int, int, int c) {
              return (c == loud ? 100.0f : 1.0f) * normal(random);
            }).Check();
          }
        }
      }
    }
  }
  const SegmentBits narrow = WidthsOfK(1, {4, 3, 2, 1});
  EXPECT_FALSE(Format(1, 64, 64, {}, &narrow).heads[0].side[0].two_byte_q);
  EXPECT_FALSE(Format(1, 64, 64, Bits(8, 8)).heads[0].side[0].two_byte_q);
  const SegmentBits wide_v(1, {std::vector<uint8_t>(4, 2), std::vector<uint8_t>(4, 8)});
  EXPECT_FALSE(Format(1, 64, 64, {}, &wide_v).heads[0].side[0].two_byte_q);
}

// The largest codes and bytes of q: sums of integers neither saturate nor overflow.
TEST(HackAttention, TwoByteSumsAreExact) {
  for (int d : {64, 128, 256}) {
    for (const auto& widths : WideWidths(d / kSegmentChannels)) {
      HackParameters p;
      p.rotation = Rotation::kNone;
      const SegmentBits bits = WidthsOfK(1, widths);
      SCOPED_TRACE(testing::Message() << "d " << d);
      Case c(Format(1, d, 64, p, &bits), 2, 3, 1, 5,
             [](int side, int t, int c) { return (t + c) % 64 ? 8.0f : -8.0f; });
      // 126.498 of 127 levels: the second byte is near its largest, too.
      for (int i = 0; i < 3 * d; ++i)
        c.q[i] = (i < d ? 1 : i < 2 * d ? -1 : i % 2 ? 1 : -1) * (i % d ? 126.498f / 127 : 1);
      c.Check();
    }
  }
}

TEST(HackAttention, FlatUsualAndSharpScores) {
  for (float std_dev : {0.05f, 0.5f, 2.0f, 20.0f}) {
    for (auto [k, v] : {std::pair(2, 2), std::pair(3, 2), std::pair(2, 1), std::pair(4, 3), std::pair(8, 8)}) {
      SCOPED_TRACE(testing::Message() << std_dev << " K" << k << "V" << v);
      Case(Format(1, 128, 64, Bits(k, v)), 6, 4, std_dev, k * 10 + v).Check();
    }
  }
}

TEST(HackAttention, AdversarialPages) {
  for (Axis axis : {Axis::kChannel, Axis::kToken}) {
    for (int bits : {1, 2, 3, 4, 8}) {
      HackParameters p = Bits(bits, bits);
      p.k_axis = axis;
      p.rotation = Rotation::kNone;  // the values below are those that are coded
      p.v_norm = bits % 2 == 0;
      SCOPED_TRACE(testing::Message() << "axis " << int(axis) << " bits " << bits);
      const HackFormat format = Format(1, 128, 64, p);
      Case zero_q(format, 2, 3, 0, 1);
      zero_q.Check();
      Case zero_k(format, 2, 3, 1, 2,
                  [](int side, int t, int c) { return side == 0 ? 0.0f : float(t % 7) - c * 0.1f; });
      zero_k.Check();
      Case zero_v(format, 2, 3, 1, 3,
                  [](int side, int t, int c) { return side == 1 ? 0.0f : float((t * 31 + c) % 17) / 8; });
      zero_v.Check();
      Case constant(format, 2, 3, 1, 4, [](int side, int t, int c) { return c % 3 ? 1.5f : -0.25f * c; });
      constant.Check();
      // The largest codes and queries everywhere: what would saturate 16-bit sums.
      Case extreme(format, 2, 3, 1, 5, [](int side, int t, int c) { return (t + c) % 64 ? 8.0f : -8.0f; });
      for (int i = 0; i < 3 * 128; ++i) extreme.q[i] = i < 128 ? 1 : i < 256 ? -1 : (i % 2 ? 1 : -1);
      extreme.Check();
      // One token takes all the attention.
      Case one_hot(format, 3, 2, 0, 6, [](int side, int t, int c) {
        return side == 0 ? (t == 100 ? 30.0f : -1.0f - 0.001f * t) : float((t * 13 + c) % 29) - 14;
      });
      for (int i = 0; i < 2 * 128; ++i) one_hot.q[i] = i < 128 ? 4 : 0.5f;
      one_hot.Check();
    }
  }
}

// What weighs most in V is not what weighs most in the sum of probabilities.
TEST(HackAttention, NormsOfAnyByte) {
  for (const char* norms : {"random", "zeros", "a quiet token takes the attention"}) {
    for (int d : {64, 128, 256}) {
      for (const auto& [part, meta] : {std::pair(64, 8), std::pair(32, 8), std::pair(64, 16)}) {
        SCOPED_TRACE(testing::Message() << norms << " d " << d << " part " << part << " meta " << meta);
        HackParameters p = Bits(3, 2);
        p.partition = part;
        p.meta_bits = meta;
        Case c(Format(2, d, 64, p), 3, 5, 1, uint64_t(d + part));
        std::mt19937 random(4);
        for (auto& page : c.pages) {
          for (const HeadLayout& head : c.format.heads) {
            uint8_t* u8 = page.get() + head.offset + head.side[1].norms;
            for (int t = 0; t < 64; ++t) {
              u8[t] = norms[0] == 'r' ? uint8_t(random()) : norms[0] == 'z' ? 0 : t % 8 == 0 ? 1 : 255;
            }
          }
        }
        c.Check();
      }
    }
  }
}

TEST(HackAttention, MapsByTheTransform) {
  for (int d : {16, 32, 64, 128, 256}) {
    const HackFormat format = Format(1, d, 64, {});
    Case c(format, 1, 5, 1, uint64_t(d));
    for (Isa isa : SupportedIsas()) {
      SCOPED_TRACE(testing::Message() << IsaName(isa) << " d " << d);
      const auto attention = MakeHackAttention(&format, isa);
      ASSERT_TRUE(attention->maps(0));
      EXPECT_FALSE(attention->folds_output(0));
      AlignedArray<float> mapped = MakeAligned<float>(5 * d), back = MakeAligned<float>(5 * d);
      attention->MapQueries(0, 0, 5, c.q.get(), mapped.get());
      attention->ExpandOutput(0, 0, 5, mapped.get(), back.get());
      for (int r = 0; r < 5; ++r) {
        std::vector<float> want(c.q.get() + r * d, c.q.get() + (r + 1) * d);
        Hadamard(absl::MakeSpan(want));
        AlignedArray<float> alone = MakeAligned<float>(d);
        attention->MapQueries(0, 0, 1, c.q.get() + r * d, alone.get());
        EXPECT_EQ(0, std::memcmp(alone.get(), mapped.get() + r * d, sizeof(float) * d));
        for (int i = 0; i < d; ++i) {
          EXPECT_NEAR(mapped[r * d + i], want[i], 1e-5);
          EXPECT_NEAR(back[r * d + i], c.q[r * d + i], 1e-5);
        }
      }
    }
  }
  HackParameters none;
  none.rotation = Rotation::kNone;
  const HackFormat format = Format(1, 128, 64, none);
  EXPECT_FALSE(MakeHackAttention(&format)->maps(0));
}

TEST(HackAttention, RowsDoNotDependOnTheirNeighbours) {
  for (Axis axis : {Axis::kChannel, Axis::kToken}) {
    for (auto [k, v] : {std::pair(1, 3), std::pair(2, 2), std::pair(3, 1), std::pair(4, 8)}) {
      HackParameters p = Bits(k, v);
      p.k_axis = axis;
      Case c(Format(1, 128, 64, p), 3, 9, 1, 7);
      for (Isa isa : SupportedIsas()) {
        State all(9, 128);
        c.Attend(isa, c.Task(0, 9, 0, 3), all);
        for (int r = 0; r < 9; ++r) {
          for (int count = 1; count <= 5 && r + count <= 9; ++count) {
            State part(count, 128);
            c.Attend(isa, c.Task(r, count, 0, 3), part);
            ASSERT_EQ(0, std::memcmp(part.acc.get(), all.acc.get() + r * 128, sizeof(float) * 128 * count));
            ASSERT_EQ(0, std::memcmp(part.sum.get(), all.sum.get() + r, sizeof(float) * count));
          }
        }
      }
    }
  }
}

TEST(HackAttention, RowsOfTwoBytesDoNotDependOnTheirNeighbours) {
  for (const auto& widths : WideWidths(8)) {
    const SegmentBits bits = WidthsOfK(1, widths);
    Case c(Format(1, 128, 64, {}, &bits), 3, 9, 1, 7);
    for (Isa isa : SupportedIsas()) {
      SCOPED_TRACE(testing::Message() << IsaName(isa) << " " << int(widths[0]) << int(widths[1]) << int(widths[2]));
      State all(9, 128), parts(9, 128);
      c.Attend(isa, c.Task(0, 9, 0, 3), all);
      c.Attend(isa, c.Task(0, 9, 0, 1), parts);
      c.Attend(isa, c.Task(0, 9, 1, 2), parts);
      EXPECT_EQ(0, std::memcmp(parts.acc.get(), all.acc.get(), sizeof(float) * 128 * 9));
      for (int r = 0; r < 9; ++r) {
        for (int count = 1; count <= 5 && r + count <= 9; ++count) {
          State part(count, 128);
          c.Attend(isa, c.Task(r, count, 0, 3), part);
          ASSERT_EQ(0, std::memcmp(part.acc.get(), all.acc.get() + r * 128, sizeof(float) * 128 * count));
        }
      }
    }
  }
}

TEST(HackAttention, PagesInSeveralCallsGiveTheSameBits) {
  for (const auto& [d, page_tokens] : {std::pair(80, 128), std::pair(64, 64), std::pair(128, 64), std::pair(256, 64)}) {
    Case c(Format(2, d, page_tokens, Bits(3, 2)), 5, 4, 1, 9);
    for (Isa isa : SupportedIsas()) {
      State all(4, d), parts(4, d);
      c.Attend(isa, c.Task(0, 4, 0, 5), all);
      c.Attend(isa, c.Task(0, 4, 0, 2), parts);
      c.Attend(isa, c.Task(0, 4, 2, 3), parts);
      EXPECT_EQ(0, std::memcmp(parts.acc.get(), all.acc.get(), sizeof(float) * 4 * d));
    }
  }
}

}  // namespace
}  // namespace kvmanager::hack
