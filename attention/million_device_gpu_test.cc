// Attention to MILLION and ZACK+MILLION pages of every format, and raw pages beside them, on a GPU by way of device
// steps, against attention in double precision on the same pages.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/mapped_step_testing.h"
#include "attention/prefill_plan.h"
#include "codecs/million/million.h"
#include "codecs/million/million_codec.h"
#include "codecs/million/million_device_format.h"
#include "codecs/million/million_reference.h"
#include "codecs/million/million_testing.h"
#include "codecs/registry.h"
#include "codecs/zack_hack/rotated_codec.h"
#include "codecs/zack_hack/stack_testing.h"
#include "codecs/zack_million/zack_million.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"

namespace kvmanager::million {
namespace {

struct Shape : StepShape {
  SideParameters k, v;
  bool rotated = false;

  std::string FormatName() const {
    return absl::StrCat(rotated ? "zack+million" : "million", " k ", k.m, "x", k.bits, " v ", v.m, "x", v.bits);
  }
};

class OneArtifact final : public CalibrationSource {
 public:
  absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view) override { return artifact; }
  std::shared_ptr<const Calibration> artifact;
};

std::unique_ptr<Codec> CodecOf(const Shape& shape) {
  if (!shape.rotated) {
    const MillionFormat format = MakeFormat(shape.layout(), shape.k, shape.v);
    // Channels of different size and place.
    std::mt19937_64 random(5);
    std::normal_distribution<float> normal;
    std::vector<float> spread(2 * shape.head_dim), mean(2 * shape.head_dim);
    for (float& x : spread) x = std::exp(normal(random)) / 2;
    for (float& x : mean) x = normal(random) / 2;
    const Books books(format, StepWorld::kLayers, 6, [&](int side, int channel, int) {
      const int c = side * shape.head_dim + channel;
      return mean[c] + spread[c] * normal(random);
    });
    return MakeMillionCodec(format, books.books, "million");
  }
  const std::string spec = absl::StrCat("zack+million:k_m=", shape.k.m, ",k_bits=", shape.k.bits, ",v_m=", shape.v.m,
                                        ",v_bits=", shape.v.bits);
  const CodecContext context = zack::SyntheticContext(shape.layout(), StepWorld::kLayers, shape.query_heads(), {spec});
  OneArtifact source;
  source.artifact = context.calibration;
  CodecRegistry registry;
  registry.SetCalibrations(&source);
  RegisterZackMillion(registry);
  auto made =
      registry.Create(absl::StrCat(spec, ",mode=", shape.mode, ",fold=", shape.fold, ",calibration=any"), context);
  KV_CHECK(made.ok());
  return *std::move(made);
}

class World final : public StepWorld {
 public:
  World(const Shape& shape, uint64_t seed) : StepWorld(shape, CodecOf(shape), seed), shape_(shape) {}

 private:
  const zack::RotatedCodec& rotated() const { return static_cast<const zack::RotatedCodec&>(codec()); }
  const MillionCodec& million() const {
    return static_cast<const MillionCodec&>(shape_.rotated ? rotated().inner(kLayer) : codec());
  }
  static std::vector<double> Times(const std::vector<double>& x, const std::vector<float>& factor) {
    std::vector<double> out(x.size(), 0.);
    for (size_t i = 0; i < x.size(); ++i) {
      for (size_t c = 0; c < x.size(); ++c) out[c] += x[i] * double(factor[i * x.size() + c]);
    }
    return out;
  }

  /// Kernels of 64 subspaces of 8 bits do, but not those of many query tokens.
  bool Rounds(const Sequence& s) const {
    return MillionPairs(million().format()) && s.tokens < PrefillPlanner::kTokensMin;
  }

  // q is mapped and outputs are brought together, as on the device, but all in double precision, but for what kernels
  // of 64 subspaces of 8 bits round of q and P.
  std::vector<double> ReferenceRow(const Sequence& s, uint64_t position, int head, const float* q) const override {
    const int d = shape_.head_dim, kv_head = head / shape_.group;
    const double scale = double(1 / std::sqrt(float(d)));
    const uint32_t own = uint32_t(position / kPageTokens);
    const zack::Memory mapped = zack::MakeMemory(d * sizeof(float)), acc = zack::MakeMemory(d * sizeof(float));
    float* const query = reinterpret_cast<float*>(mapped.get());
    std::copy(q, q + d, query);
    if (shape_.rotated) {
      const std::vector<double> there = Times({q, q + d}, rotated().rotation(kLayer, kv_head).query);
      std::copy(there.begin(), there.end(), query);
    }
    // Encoded pages.
    std::vector<const uint8_t*> pages;
    for (uint32_t j = 0; j < own; ++j) {
      if (!ReadsRaw(s, own, j)) pages.push_back(s.pages[j].encoded);
    }
    float max = -INFINITY, sum = 0;
    std::fill_n(reinterpret_cast<float*>(acc.get()), d, 0.f);
    PageAttentionTask task;
    task.q = query, task.rows = 1, task.scale = float(scale), task.layer = kLayer, task.kv_head = kv_head;
    task.pages = pages;
    ReferenceAttend(million().format(), million().tables(), task, Rounds(s) ? Rounding::kGpu : Rounding::kNothing,
                    {&max, &sum, reinterpret_cast<float*>(acc.get())});
    // Raw ones.
    std::vector<double> plain(size_t(d), 0.), in_space(size_t(d), 0.);
    std::vector<std::pair<uint32_t, double>> scores;  // of tokens by position
    double largest = max;
    for (uint32_t j = 0; j <= own; ++j) {
      if (!ReadsRaw(s, own, j)) continue;
      const int seen = j == own ? int(position % kPageTokens) + 1 : kPageTokens;
      for (int t = 0; t < seen; ++t) {
        const uint8_t* const k = s.pages[j].raw + layout().raw_offset(0, kv_head, t);
        double score = 0;
        for (int c = 0; c < d; ++c) score += double(q[c]) * LoadElement(k, shape_.dtype, c);
        scores.push_back({j * kPageTokens + uint32_t(t), score * scale});
        largest = std::max(largest, scores.back().second);
      }
    }
    const double factor = pages.empty() ? 0 : std::exp(max - largest);
    double total = factor * sum;
    for (int c = 0; c < d; ++c) in_space[c] = factor * reinterpret_cast<const float*>(acc.get())[c];
    for (const auto& [at, score] : scores) {
      const double p = std::exp(score - largest);
      const uint8_t* const v = s.pages[at / kPageTokens].raw + layout().raw_offset(1, kv_head, int(at % kPageTokens));
      total += p;
      for (int c = 0; c < d; ++c) plain[c] += p * LoadElement(v, shape_.dtype, c);
    }
    const bool folds = shape_.rotated && shape_.fold == "1";
    std::vector<double> result = in_space;
    if (folds) plain = Times(plain, rotated().rotation(kLayer, kv_head).encode[1]);
    if (shape_.rotated && !folds) result = Times(in_space, rotated().rotation(kLayer, kv_head).decode[1]);
    for (int c = 0; c < d; ++c) result[c] = (result[c] + plain[c]) / total;
    result.push_back(largest + std::log(total));
    return result;
  }

  const Shape shape_;
};

class MillionDevice : public MappedStepTest {
 protected:
  void Check(const Shape& shape, uint64_t seed, bool captured = false, const StepBounds& bounds = {}) {
    World world(shape, seed);
    MappedStepTest::Check(world, absl::StrCat(shape.FormatName(), " ", shape.Name(), " seed ", seed), shape, captured,
                          bounds);
  }
};

/// Formats of any kind, now and then 64 subspaces of 8 bits, which have kernels of their own.
Shape WithFormat(const StepShape& base, std::mt19937& random) {
  Shape shape = Like<Shape>(base);
  shape.rotated = random() % 2 == 0;
  for (SideParameters* const side : {&shape.k, &shape.v}) {
    side->m = random() % 3 == 0 ? 64 : shape.head_dim >> random() % 6;
    side->bits = random() % 3 == 0 ? 8 : 4 + int(random() % 6);
  }
  if (random() % 5 == 0) shape.head_dim = 128, shape.k = shape.v = {64, 8};
  return shape;
}

constexpr SideParameters kPairs = {64, 8}, kNarrow = {32, 6};

#ifdef KVMANAGER_SANITIZED
constexpr int kTrials = 4;
#else
constexpr int kTrials = 40;
#endif

TEST_F(MillionDevice, RandomBatches) {
  std::mt19937 random(1);
  for (int trial = 0; trial < kTrials; ++trial) {
    Check(WithFormat(RandomStepShape(random), random), uint64_t(trial), trial % 4 == 0);
  }
}

// Decoded values are rounded to float16, or to bfloat16 where K and V are not rotated, whose errors scores make more
// of.
StepBounds DecodedBounds(const Shape& shape) { return {3e-3, shape.rotated ? 5e-3 : 1.6e-2, 2e-3}; }

TEST_F(MillionDevice, ManyQueryTokens) {
  std::mt19937 random(2);
  for (int trial = 0; trial < (kTrials + 2) / 3; ++trial) {
    const Shape shape = WithFormat(RandomLongShape(random), random);
    Check(shape, uint64_t(trial), trial % 4 == 0, DecodedBounds(shape));
  }
}

// Every width of an index, and of a subspace.
TEST_F(MillionDevice, EveryFormat) {
  for (const bool rotated : {false, true}) {
    for (int bits = kBitsMin; bits <= (rotated ? 10 : kBitsMax); ++bits) {
      Shape shape;
      shape.rotated = rotated;
      shape.kv_heads = 1;
      shape.holes = false;
      shape.lag_pages = 1;
      shape.k = {32, bits}, shape.v = {64, 16 - bits > 12 ? 12 : 16 - bits};
      if (rotated && shape.v.bits > 10) shape.v.bits = 6;
      shape.sequences = {{330, 1}};
      Check(shape, uint64_t(bits));
    }
    for (int m = 1; m <= 128; m *= 2) {
      Shape shape;
      shape.rotated = rotated;
      shape.kv_heads = 2;
      shape.lag_pages = 1;
      shape.k = {m, 7}, shape.v = {128 / m, 5};
      shape.sequences = {{330, 2}};
      Check(shape, uint64_t(100 + m));
    }
  }
}

TEST_F(MillionDevice, ContextsAtPageBoundaries) {
  for (const SideParameters& side : {kPairs, kNarrow}) {
    for (const StepShape& base : ShapesAtPageBoundaries()) {
      Shape shape = Like<Shape>(base);
      shape.rotated = true;
      shape.k = shape.v = side;
      Check(shape, base.sequences[0].first);
    }
  }
}

TEST_F(MillionDevice, EveryGroup) {
  for (const StepShape& base : ShapesOfEveryGroup()) {
    Shape shape = Like<Shape>(base);
    shape.rotated = base.group % 2 == 0;
    shape.k = kNarrow, shape.v = kPairs;
    Check(shape, uint64_t(base.group));
    shape.rotated = true;
    shape.k = shape.v = kPairs;
    Check(shape, uint64_t(base.group));
  }
}

TEST_F(MillionDevice, HardKeysAndQueries) {
  for (const bool rotated : {false, true}) {
    for (const SideParameters& side : {kPairs, kNarrow}) {
      for (const StepShape& base : ShapesOfHardKeysAndQueries({0.f, 1e-6f, 8.f})) {
        Shape shape = Like<Shape>(base);
        shape.rotated = rotated;
        shape.k = shape.v = side;
        Check(shape, 7);
      }
    }
  }
}

TEST_F(MillionDevice, HoweverTheWorkIsSplit) {
  for (const bool rotated : {false, true}) {
    for (const SideParameters& side : {kPairs, kNarrow}) {
      if (!rotated && side == kPairs) continue;  // device_attention_gpu_test has that
      for (StepShape base : ShapesHoweverSplit()) {
        if (base.multiprocessors % 3 == 2) continue;  // encoding takes its time
        base.sequences[0].first = 1200;
        Shape shape = Like<Shape>(base);
        shape.rotated = rotated;
        shape.k = shape.v = side;
        Check(shape, 11);
      }
    }
  }
}

TEST_F(MillionDevice, LongContexts) {
  for (const bool rotated : {false, true}) {
    for (const SideParameters& side : {kPairs, kNarrow}) {
      for (const StepShape& base : ShapesOfLongContexts()) {
        Shape shape = Like<Shape>(base);
        shape.rotated = rotated;
        shape.k = shape.v = side;
        Check(shape, 13, true, base.sequences[0].second > 1 ? DecodedBounds(shape) : StepBounds());
      }
    }
  }
}

TEST_F(MillionDevice, ReusesPlaces) {
  for (const bool rotated : {false, true}) {
    Shape shape = Like<Shape>(ShapeThatReusesPlaces());
    shape.rotated = rotated;
    shape.k = shape.v = kPairs;
    Check(shape, 17, false, DecodedBounds(shape));
  }
}

}  // namespace
}  // namespace kvmanager::million
