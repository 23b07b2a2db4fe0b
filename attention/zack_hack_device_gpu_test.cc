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

struct Shape : StepShape {
  std::string bytes = "56";
};

std::unique_ptr<Codec> CodecOf(const Shape& shape) {
  auto made = MakeCodec(zack::SyntheticContext(shape.layout(), StepWorld::kLayers, shape.query_heads()),
                        {{"mode", shape.mode},
                         {"bytes", absl::StrCat(std::stod(shape.bytes) * shape.head_dim / 128)},
                         {"fold", shape.fold}});
  KV_CHECK(made.ok());
  return *std::move(made);
}

class World final : public StepWorld {
 public:
  World(const Shape& shape, uint64_t seed) : StepWorld(shape, CodecOf(shape), seed), shape_(shape) {}

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
      if (!ReadsRaw(s, own, j)) {
        float page_max = -INFINITY, page_sum = 0;
        Memory acc = zack::MakeMemory(d * sizeof(float));
        std::memset(acc.get(), 0, d * sizeof(float));
        const uint8_t* const encoded = page.encoded.get();
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
        const uint8_t* const k = page.raw.get() + layout().raw_offset(0, kv_head, t);
        const uint8_t* const v = page.raw.get() + layout().raw_offset(1, kv_head, t);
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
  void Check(const Shape& shape, uint64_t seed, bool captured = false) {
    World world(shape, seed);
    MappedStepTest::Check(world, absl::StrCat(shape.bytes, " bytes ", shape.Name(), " seed ", seed), shape, captured);
  }
};

TEST_F(ZackHackDevice, RandomBatches) {
  std::mt19937 random(1);
  const char* const bytes[] = {"56", "48", "32", "72", "100", "130"};
  for (int trial = 0; trial < 40; ++trial) {
    Shape shape;
    shape.mode = random() % 2 == 0 ? "joint" : "balanced";
    shape.bytes = bytes[random() % std::size(bytes)];
    shape.fold = random() % 4 == 0 ? "1" : "0";
    shape.dtype = random() % 3 == 0 ? DType::kBFloat16 : DType::kFloat16;
    shape.head_dim = random() % 3 == 0 ? 64 : 128;
    shape.kv_heads = 1 + random() % 3;
    shape.group = 1 + random() % 16;
    shape.lag_pages = random() % 3;
    shape.multiprocessors = random() % 2 == 0 ? 132 : 1 + int(random() % 40);
    shape.q_std = std::exp(float(random() % 4) - 2);
    const int sequences = 1 + random() % 3;
    for (int i = 0; i < sequences; ++i) {
      const uint64_t context = 1 + random() % 1200;
      shape.sequences.push_back({context, 1 + int(random() % std::min<uint64_t>(context, random() % 2 ? 1 : 16))});
    }
    Check(shape, trial, trial % 4 == 0);
  }
}

TEST_F(ZackHackDevice, ContextsAtPageBoundaries) {
  for (const char* bytes : {"56", "48"}) {
    for (const uint64_t context : {1, 16, 17, 63, 64, 65, 128, 129, 192, 193, 256, 320}) {
      for (const int tokens : {1, 2, 16}) {
        if (uint64_t(tokens) > context) continue;
        Shape shape;
        shape.bytes = bytes;
        shape.lag_pages = 1;
        shape.sequences = {{context, tokens}};
        Check(shape, context);
      }
    }
  }
}

TEST_F(ZackHackDevice, EveryGroup) {
  for (int group = 1; group <= 16; ++group) {
    Shape shape;
    shape.group = group;
    shape.sequences = {{700, 1}, {130, 3}};
    Check(shape, group);
  }
}

TEST_F(ZackHackDevice, HardKeysAndQueries) {
  for (const char* mode : {"joint", "balanced"}) {
    for (const StepKeys keys : {StepKeys::kZero, StepKeys::kConstant, StepKeys::kOneHot}) {
      Shape shape;
      shape.mode = mode;
      shape.keys = keys;
      shape.sequences = {{900, 1}, {64, 1}, {350, 5}};
      Check(shape, 7);
    }
    for (const float q_std : {0.f, 8.f}) {
      Shape shape;
      shape.mode = mode;
      shape.q_std = q_std;
      shape.sequences = {{900, 1}};
      Check(shape, 8);
    }
  }
}

TEST_F(ZackHackDevice, HoweverTheWorkIsSplit) {
  for (const int blocks : {1, 2, 3, 7, 32, 131, 264}) {
    for (const bool holes : {false, true}) {
      Shape shape;
      shape.kv_heads = 8;
      shape.holes = holes;
      shape.multiprocessors = blocks;
      shape.sequences = {{2000, 1}, {300, 1}, {65, 1}};
      Check(shape, 11);
    }
  }
}

}  // namespace
}  // namespace kvmanager::zack_hack
