// Attention to ZACK pages and raw pages beside them on a GPU, by way of device steps, against attention in double
// precision on the same pages.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "attention/mapped_step_testing.h"
#include "codecs/zack/zack_codec.h"
#include "codecs/zack/zack_testing.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"

namespace kvmanager::zack {
namespace {

struct Shape : StepShape {
  /// Eighths of head_dim, rounded up to multiples of 16: of heads in turn, K and V. Layers begin at other places.
  std::vector<int> ranks = {5, 2, 1, 8, 8, 3, 4, 6, 7, 7, 2, 1};
};

std::vector<int32_t> RanksOf(const Shape& shape) {
  std::vector<int32_t> ranks;
  for (int layer = 0; layer < StepWorld::kLayers; ++layer) {
    for (int i = 0; i < 2 * shape.kv_heads; ++i) {
      const int eighths = shape.ranks[(size_t(layer) * 6 + size_t(i)) % shape.ranks.size()];
      ranks.push_back((eighths * shape.head_dim / 8 + 15) / 16 * 16);
    }
  }
  return ranks;
}

std::unique_ptr<Codec> CodecOf(const Shape& shape) {
  const CodecContext context = MakeContext(shape.layout(), StepWorld::kLayers, shape.query_heads());
  return std::make_unique<ZackCodec>(MakeFormat(context, shape.mode, shape.fold == "1", RanksOf(shape)), nullptr);
}

class World final : public StepWorld {
 public:
  World(const Shape& shape, uint64_t seed) : StepWorld(shape, CodecOf(shape), seed), shape_(shape) {}

 private:
  static std::vector<double> Times(const std::vector<double>& x, const std::vector<float>& factor, int n) {
    std::vector<double> out(size_t(n), 0.);
    for (size_t i = 0; i < x.size(); ++i) {
      for (int c = 0; c < n; ++c) out[c] += x[i] * double(factor[i * n + c]);
    }
    return out;
  }

  // q is mapped and outputs are brought together, as on the device, but all in double precision.
  std::vector<double> ReferenceRow(const Sequence& s, uint64_t position, int head, const float* q) const override {
    const ZackFormat& format = static_cast<const ZackCodec&>(codec()).format();
    const int d = shape_.head_dim, kv_head = head / shape_.group;
    const ZackHead& of = format.head(kLayer, kv_head);
    const double scale = double(1 / std::sqrt(float(d)));
    const std::vector<double> plain_q(q, q + d), mapped_q = Times(plain_q, of.query, of.rank[0]);
    std::vector<double> plain(size_t(d), 0.), in_space(size_t(of.rank[1]), 0.), scores;
    double max = -INFINITY, sum = 0;
    const uint32_t own = uint32_t(position / kPageTokens);
    for (const bool finds_max : {true, false}) {
      for (uint32_t j = 0; j <= own; ++j) {
        const bool raw = ReadsRaw(s, own, j);
        const int seen = j == own ? int(position % kPageTokens) + 1 : kPageTokens;
        const DType dtype = raw ? shape_.dtype : DType::kFloat16;
        const std::vector<double>& query = raw ? plain_q : mapped_q;
        std::vector<double>& out = raw ? plain : in_space;
        const auto row = [&](int side, int t) {
          return raw ? s.pages[j].raw + layout().raw_offset(side, kv_head, t)
                     : s.pages[j].encoded + of.offset[side] + size_t(t) * of.rank[side] * 2;
        };
        for (int t = 0; t < seen; ++t) {
          if (finds_max) {
            double score = 0;
            for (size_t c = 0; c < query.size(); ++c) score += query[c] * LoadElement(row(0, t), dtype, c);
            scores.push_back(score * scale);
            max = std::max(max, scores.back());
          } else {
            const double p = std::exp(scores[j * kPageTokens + t] - max);
            sum += p;
            for (size_t c = 0; c < out.size(); ++c) out[c] += p * LoadElement(row(1, t), dtype, c);
          }
        }
      }
    }
    const bool folds = shape_.fold == "1";
    std::vector<double> result = folds ? Times(plain, of.encode[1], of.rank[1]) : Times(in_space, of.decode[1], d);
    const std::vector<double>& other = folds ? in_space : plain;
    result.resize(size_t(d), 0.);
    for (size_t c = 0; c < other.size(); ++c) result[c] += other[c];
    for (double& x : result) x /= sum;
    result.push_back(max + std::log(sum));
    return result;
  }

  const Shape shape_;
};

class ZackDevice : public MappedStepTest {
 protected:
  void Check(const Shape& shape, uint64_t seed, bool captured = false) {
    World world(shape, seed);
    MappedStepTest::Check(world,
                          absl::StrCat("ranks ", absl::StrJoin(shape.ranks, " "), " ", shape.Name(), " seed ", seed),
                          shape, captured);
  }
};

Shape WithRanks(const StepShape& base, std::mt19937& random) {
  Shape shape = Like<Shape>(base);
  for (int& rank : shape.ranks) rank = 1 + int(random() % 8);
  return shape;
}

TEST_F(ZackDevice, RandomBatches) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 40; ++trial) {
    Check(WithRanks(RandomStepShape(random), random), uint64_t(trial), trial % 4 == 0);
  }
}

// Rows of K' and V' of every length, and units of 16, 32 and 64 tokens.
TEST_F(ZackDevice, EveryPairOfRanks) {
  for (const int head_dim : {64, 128}) {
    for (int k = 16; k <= head_dim; k += 16) {
      for (int v = 16; v <= head_dim; v += 16) {
        Shape shape;
        shape.head_dim = head_dim;
        shape.kv_heads = 1;
        shape.ranks = {k * 8 / head_dim, v * 8 / head_dim};
        shape.lag_pages = 1;
        shape.holes = false;
        shape.sequences = {{330, 1}};
        Check(shape, uint64_t(k * 1000 + v));
      }
    }
  }
}

TEST_F(ZackDevice, ContextsAtPageBoundaries) {
  for (const StepShape& shape : ShapesAtPageBoundaries()) Check(Like<Shape>(shape), shape.sequences[0].first);
}

TEST_F(ZackDevice, ManyQueryTokens) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 12; ++trial) {
    Check(WithRanks(RandomLongShape(random), random), uint64_t(trial), trial % 4 == 0);
  }
}

TEST_F(ZackDevice, EveryGroup) {
  for (const StepShape& shape : ShapesOfEveryGroup()) Check(Like<Shape>(shape), uint64_t(shape.group));
}

TEST_F(ZackDevice, HardKeysAndQueries) {
  for (const StepShape& shape : ShapesOfHardKeysAndQueries({0.f, 1e-6f, 8.f, 1000.f})) Check(Like<Shape>(shape), 7);
}

TEST_F(ZackDevice, HoweverTheWorkIsSplit) {
  for (const StepShape& shape : ShapesHoweverSplit()) Check(Like<Shape>(shape), 11);
}

TEST_F(ZackDevice, LongContexts) {
  for (const StepShape& shape : ShapesOfLongContexts()) Check(Like<Shape>(shape), 13, true);
}

TEST_F(ZackDevice, ReusesPlaces) { Check(Like<Shape>(ShapeThatReusesPlaces()), 17); }

}  // namespace
}  // namespace kvmanager::zack
