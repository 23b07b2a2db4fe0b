// Attention to ZACK+HACK pages and raw pages beside them on a GPU, by way of device steps, against the same arithmetic
// in double precision: q mapped as the device maps it, codes by HACK's reference, outputs expanded.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/attention.h"
#include "attention/mapped_step_testing.h"
#include "attention/prefill_plan.h"
#include "codecs/hack/hack_codec.h"
#include "codecs/hack/hack_reference.h"
#include "codecs/zack_hack/rotated_codec.h"
#include "codecs/zack_hack/stack_testing.h"
#include "codecs/zack_hack/zack_hack.h"
#include "gtest/gtest.h"
#include "kvmanager/base/half.h"

namespace kvmanager::zack_hack {
namespace {

using zack::Memory;

/// Segments of K of 8 bits: none; as an artifact whose K has dominant channels buys them; or in many places.
enum class Wide { kNone, kBought, kAnywhere };

struct Shape : StepShape {
  std::string bytes = "56";
  Wide wide = Wide::kNone;
  float loudness = 1;  // of K's first rotated channel, beside what it would be
};

/// Widths of K that no budget would buy: head by head one wide segment; also the last; these two alone; every second
/// one. V is narrow enough for records to have room.
void Widen(LayerWidths* widths) {
  constexpr uint8_t kValueBits[4] = {3, 2, 2, 1};
  for (hack::SegmentBits& layer : *widths) {
    for (size_t head = 0; head < layer.size(); ++head) {
      std::vector<uint8_t>&k = layer[head][0], &v = layer[head][1];
      if (head % 4 == 2) std::fill(k.begin(), k.end(), uint8_t{0});
      for (size_t s = 0; s < k.size(); ++s) {
        const bool is_wide = s == 0 || (head % 4 != 0 && s + 1 == k.size()) || (head % 4 == 3 && s % 2 == 0);
        k[s] = is_wide ? uint8_t{kWideWidth} : std::min<uint8_t>(k[s], 3);
        v[s] = std::min(v[s], kValueBits[head % 4]);
      }
    }
  }
}

std::unique_ptr<Codec> CodecOf(const Shape& shape) {
  CodecContext context = zack::SyntheticContext(shape.layout(), StepWorld::kLayers, shape.query_heads());
  if (shape.wide == Wide::kBought) context = zack::WithLoudKeys(context);
  const auto parameters =
      ParseParameters(context, {{"mode", shape.mode},
                                {"bytes", absl::StrCat(std::stod(shape.bytes) * shape.head_dim / 128)},
                                {"allocation", shape.wide == Wide::kBought ? "model" : "head"},
                                {"fold", shape.fold}});
  KV_CHECK(parameters.ok());
  const auto energies = ReadEnergies(context, parameters->mode, parameters->allocation == Allocation::kModel);
  KV_CHECK(energies.ok());
  LayerWidths widths = MakeWidths(*parameters, context.layout, *energies);
  if (shape.wide == Wide::kAnywhere) Widen(&widths);
  auto made = MakeCodec(context, *parameters, widths);
  KV_CHECK(made.ok());
  return *std::move(made);
}

/// Multiplies K's first rotated channel.
StepWorld::PageChange LoudnessOf(const Shape& shape) {
  if (shape.loudness == 1) return nullptr;
  return [shape](const Codec& codec, std::mt19937_64& random, uint8_t* raw) {
    const PageLayout layout = shape.layout();
    std::normal_distribution<float> normal(0, 0.5f * shape.loudness);
    for (int head = 0; head < layout.kv_heads; ++head) {
      const float* const direction =
          static_cast<const zack::RotatedCodec&>(codec).rotation(StepWorld::kLayer, head).decode[0].data();
      for (int t = 0; t < layout.page_tokens; ++t) {
        uint8_t* const k = raw + layout.raw_offset(0, head, t);
        const float size = normal(random);
        for (int c = 0; c < layout.head_dim; ++c) {
          StoreElement(k, layout.dtype, c, LoadElement(k, layout.dtype, c) + size * direction[c]);
        }
      }
    }
  };
}

class World final : public StepWorld {
 public:
  World(const Shape& shape, uint64_t seed) : StepWorld(shape, CodecOf(shape), seed, LoudnessOf(shape)), shape_(shape) {
    const auto& format = static_cast<const hack::HackCodec&>(rotated().inner(kLayer)).format();
    EXPECT_TRUE(shape.wide == Wide::kNone ||
                std::any_of(format.heads.begin(), format.heads.end(),
                            [](const hack::HeadLayout& head) { return head.side[0].two_byte_q; }));
  }

 private:
  const zack::RotatedCodec& rotated() const { return static_cast<const zack::RotatedCodec&>(codec()); }

  /// q in the space, in the order of the device's sums: a difference in the last bit would round some codes otherwise.
  Memory Map(const float* q, int kv_head) const {
    const int d = shape_.head_dim, depth = d / 4;
    const std::vector<float>& factor = rotated().rotation(kLayer, kv_head).query;
    Memory out = zack::MakeMemory(d * sizeof(float));
    for (int c = 0; c < d; ++c) {
      float sum = 0;
      for (int part = 0; part < 4; ++part) {
        float of_part = 0;
        for (int i = part * depth; i < (part + 1) * depth; ++i) of_part = std::fma(q[i], factor[i * d + c], of_part);
        sum += of_part;
      }
      reinterpret_cast<float*>(out.get())[c] = sum;
    }
    return out;
  }
  static void Multiply(const std::vector<double>& x, const std::vector<float>& factor, int d,
                       std::vector<double>* out) {
    for (int c = 0; c < d; ++c) {
      for (int k = 0; k < d; ++k) (*out)[c] += x[k] * double(factor[size_t(k) * d + c]);
    }
  }

  /// out, then lse.
  std::vector<double> ReferenceRow(const Sequence& s, uint64_t position, int head, const float* q) const override {
    const int d = shape_.head_dim, kv_head = head / shape_.group;
    const uint32_t own = uint32_t(position / kPageTokens);
    const float scale = 1 / std::sqrt(float(d));
    const Memory mapped = Map(q, kv_head);
    const auto& inner = static_cast<const hack::HackCodec&>(rotated().inner(kLayer));
    double max = -INFINITY, sum = 0;
    std::vector<double> in_space(d), plain(d);
    const auto rescale = [&](double to) {
      const double factor = max == -INFINITY ? 0 : std::exp(max - to);
      sum *= factor;
      for (double& x : in_space) x *= factor;
      for (double& x : plain) x *= factor;
      max = to;
    };
    for (uint32_t j = 0; j <= own; ++j) {
      const Page& page = s.pages[j];
      if (!ReadsRaw(s, own, j) && s.tokens >= PrefillPlanner::kTokensMin) {  // decoded
        const Memory decoded = zack::MakeMemory(layout().raw_bytes());
        const DecodeItem item = {page.encoded, decoded.get(), uint32_t(kLayer)};
        inner.Decode({&item, 1});
        for (int t = 0; t < kPageTokens; ++t) {
          const uint8_t* const k = decoded.get() + layout().raw_offset(0, kv_head, t);
          const uint8_t* const v = decoded.get() + layout().raw_offset(1, kv_head, t);
          double score = 0;
          for (int c = 0; c < d; ++c) {
            score += double(reinterpret_cast<const float*>(mapped.get())[c]) * LoadElement(k, DType::kFloat16, c);
          }
          score *= scale;
          if (score > max) rescale(score);
          const double p = std::exp(score - max);
          sum += p;
          for (int c = 0; c < d; ++c) in_space[c] += p * LoadElement(v, DType::kFloat16, c);
        }
        continue;
      }
      if (!ReadsRaw(s, own, j)) {
        float page_max = -INFINITY, page_sum = 0;
        Memory acc = zack::MakeMemory(d * sizeof(float));
        std::memset(acc.get(), 0, d * sizeof(float));
        const uint8_t* const encoded = page.encoded;
        PageAttentionTask task;
        task.q = reinterpret_cast<const float*>(mapped.get());
        task.rows = 1;
        task.scale = scale;
        task.layer = kLayer;
        task.kv_head = kv_head;
        task.pages = {&encoded, 1};
        hack::ReferenceAttend(inner.format(), task, {&page_max, &page_sum, reinterpret_cast<float*>(acc.get())});
        if (page_max > max) rescale(page_max);
        const double factor = std::exp(page_max - max);
        sum += factor * page_sum;
        for (int c = 0; c < d; ++c) in_space[c] += factor * reinterpret_cast<const float*>(acc.get())[c];
        continue;
      }
      const int seen = j == own ? int(position % kPageTokens) + 1 : kPageTokens;
      for (int t = 0; t < seen; ++t) {
        const uint8_t* const k = page.raw + layout().raw_offset(0, kv_head, t);
        const uint8_t* const v = page.raw + layout().raw_offset(1, kv_head, t);
        double score = 0;
        for (int c = 0; c < d; ++c) score += double(q[c]) * LoadElement(k, shape_.dtype, c);
        score *= scale;
        if (score > max) rescale(score);
        const double p = std::exp(score - max);
        sum += p;
        for (int c = 0; c < d; ++c) plain[c] += p * LoadElement(v, shape_.dtype, c);
      }
    }
    const zack::HeadRotation& rotation = rotated().rotation(kLayer, kv_head);
    std::vector<double> out = shape_.fold == "1" ? in_space : plain;
    if (shape_.fold == "1") {
      Multiply(plain, rotation.encode[1], d, &out);
    } else {
      Multiply(in_space, rotation.decode[1], d, &out);
    }
    for (double& x : out) x /= sum;
    out.push_back(max + std::log(sum));
    return out;
  }

  const Shape shape_;
};

class ZackHackDevice : public MappedStepTest {
 protected:
  void Check(const Shape& shape, uint64_t seed, bool captured = false, const StepBounds& bounds = {}) {
    World world(shape, seed);
    MappedStepTest::Check(world, absl::StrCat(shape.bytes, " bytes ", shape.Name(), " seed ", seed), shape, captured,
                          bounds);
  }
};

constexpr const char* kBytes[] = {"56", "48", "32", "72", "100", "130"};

TEST_F(ZackHackDevice, RandomBatches) {
  std::mt19937 random(1);
  for (int trial = 0; trial < 40; ++trial) {
    Shape shape = Like<Shape>(RandomStepShape(random));
    shape.bytes = kBytes[random() % std::size(kBytes)];
    Check(shape, uint64_t(trial), trial % 4 == 0);
  }
}

// Decoded values are rounded to float16, whose errors scores make more of.
constexpr StepBounds kDecoded = {3e-3, 5e-3, 2e-3};

TEST_F(ZackHackDevice, ManyQueryTokens) {
  std::mt19937 random(2);
  for (int trial = 0; trial < 12; ++trial) {
    Shape shape = Like<Shape>(RandomLongShape(random));
    shape.bytes = kBytes[random() % std::size(kBytes)];
    Check(shape, uint64_t(trial), trial % 4 == 0, kDecoded);
  }
}

TEST_F(ZackHackDevice, SegmentsOfEightBits) {
  std::mt19937 random(3);
  for (int trial = 0; trial < 32; ++trial) {
    Shape shape = Like<Shape>(RandomStepShape(random));
    shape.wide = trial % 2 == 0 ? Wide::kBought : Wide::kAnywhere;
    shape.bytes = trial % 4 < 2 ? "76" : "92";
    shape.kv_heads = shape.wide == Wide::kBought ? 2 + trial / 2 % 3 : 1 + trial / 2 % 4;
    if (trial % 8 >= 6) shape.lag_pages = 0, shape.loudness = 100, shape.q_std = 0.1f;
    Check(shape, uint64_t(trial), trial % 4 == 0);
  }
}

TEST_F(ZackHackDevice, SegmentsOfEightBitsAndManyQueryTokens) {
  std::mt19937 random(4);
  for (int trial = 0; trial < 8; ++trial) {
    Shape shape = Like<Shape>(RandomLongShape(random));
    shape.kv_heads = 2;
    shape.wide = trial % 2 == 0 ? Wide::kBought : Wide::kAnywhere;
    shape.bytes = trial % 4 < 2 ? "76" : "92";
    Check(shape, uint64_t(trial), trial % 4 == 0, kDecoded);
  }
}

TEST_F(ZackHackDevice, ContextsAtPageBoundaries) {
  for (const char* const bytes : {"56", "48"}) {
    for (const StepShape& base : ShapesAtPageBoundaries()) {
      Shape shape = Like<Shape>(base);
      shape.bytes = bytes;
      Check(shape, base.sequences[0].first);
    }
  }
}

TEST_F(ZackHackDevice, EveryGroup) {
  for (const StepShape& shape : ShapesOfEveryGroup()) Check(Like<Shape>(shape), uint64_t(shape.group));
}

TEST_F(ZackHackDevice, HardKeysAndQueries) {
  for (const StepShape& shape : ShapesOfHardKeysAndQueries({0.f, 8.f})) Check(Like<Shape>(shape), 7);
}

TEST_F(ZackHackDevice, HoweverTheWorkIsSplit) {
  for (const StepShape& shape : ShapesHoweverSplit()) Check(Like<Shape>(shape), 11);
}

TEST_F(ZackHackDevice, LongContexts) {
  for (const char* const bytes : {"56", "48"}) {
    for (const StepShape& base : ShapesOfLongContexts()) {
      Shape shape = Like<Shape>(base);
      shape.bytes = bytes;
      Check(shape, 13, true, base.sequences[0].second > 1 ? kDecoded : StepBounds());
    }
  }
}

TEST_F(ZackHackDevice, ReusesPlaces) { Check(Like<Shape>(ShapeThatReusesPlaces()), 17, false, kDecoded); }

}  // namespace
}  // namespace kvmanager::zack_hack
