// Reloads of random activations, weights and stored pages, and what has to come of them in double precision. For tests.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "kvmanager/base/half.h"
#include "transport/recompute/executor.h"
#include "transport/recompute/runtime.h"

namespace kvmanager::recompute {

inline std::vector<uint8_t> RandomElements(size_t count, DType dtype, double scale, std::mt19937_64& random) {
  std::vector<uint8_t> bytes(count * DTypeBytes(dtype));
  std::normal_distribution<float> normal(0, float(scale));
  for (size_t i = 0; i < count; ++i) StoreElement(bytes.data(), dtype, i, normal(random));
  return bytes;
}

// Random activations, stored pages and weights of one layer, and room for what comes back.
struct World {
  ProjectionModel model;
  DType weights_dtype;
  std::vector<uint8_t> w_k, w_v, b_k, b_v;
  struct Sequence {
    int64_t tokens, first_position;
    std::vector<std::vector<uint8_t>> activations, stored, pages;
    std::vector<const uint8_t*> activation_pointers, stored_pointers;
    std::vector<uint8_t*> page_pointers;
  };
  size_t kv_page_bytes;
  std::vector<Sequence> sequences;

  World(const ProjectionModel& m, DType weights, bool bias, std::vector<std::pair<int64_t, int64_t>> shapes,
        size_t page_bytes, uint64_t seed)
      : model(m), weights_dtype(weights), kv_page_bytes(page_bytes) {
    std::mt19937_64 random(seed);
    const size_t width = model.width(), hidden = model.hidden;
    w_k = RandomElements(width * hidden, weights, 1 / std::sqrt(double(hidden)), random);
    w_v = RandomElements(width * hidden, weights, 1 / std::sqrt(double(hidden)), random);
    if (bias) {
      b_k = RandomElements(width, weights, 1, random);
      b_v = RandomElements(width, weights, 1, random);
    }
    const int64_t page_tokens = model.layout.page_tokens;
    for (const auto& [tokens, position] : shapes) {
      Sequence s{tokens, position};
      for (int64_t p = 0; p * page_tokens < tokens; ++p) {
        const size_t rows = std::min(page_tokens, tokens - p * page_tokens);
        s.activations.push_back(RandomElements(rows * hidden, model.layout.dtype, 1, random));
        s.stored.push_back(RandomElements(kv_page_bytes / 2, DType::kFloat16, 1, random));
        s.pages.emplace_back(std::max(kv_page_bytes, model.layout.raw_bytes()), 0xee);
      }
      sequences.push_back(std::move(s));
    }
    for (Sequence& s : sequences) {
      for (auto& a : s.activations) s.activation_pointers.push_back(a.data());
      for (auto& a : s.stored) s.stored_pointers.push_back(a.data());
      for (auto& a : s.pages) s.page_pointers.push_back(a.data());
    }
  }

  LayerWeights Weights() const { return {weights_dtype, w_k, w_v, b_k, b_v}; }

  std::vector<ReloadSequence> Split(const std::vector<int64_t>& splits) const {
    std::vector<ReloadSequence> list;
    for (size_t i = 0; i < sequences.size(); ++i) {
      const Sequence& s = sequences[i];
      const size_t pages = (splits[i] + model.layout.page_tokens - 1) / model.layout.page_tokens;
      list.push_back({s.tokens, splits[i], s.first_position,
                      absl::MakeConstSpan(s.activation_pointers).subspan(0, pages), s.page_pointers,
                      absl::MakeConstSpan(s.stored_pointers).subspan(pages)});
    }
    return list;
  }

  // K (side 0) or V of one token and KV head in double precision, from the elements as they are stored.
  std::vector<double> Reference(const Sequence& s, int side, int head, int64_t token) const {
    const int d = model.layout.head_dim, hidden = model.hidden;
    const auto& w = side == 0 ? w_k : w_v;
    const auto& b = side == 0 ? b_k : b_v;
    const uint8_t* const x = s.activations[token / model.layout.page_tokens].data();
    const size_t row = size_t(token % model.layout.page_tokens) * hidden;
    std::vector<double> out(d);
    for (int c = 0; c < d; ++c) {
      const size_t o = size_t(head) * d + c;
      for (int i = 0; i < hidden; ++i) {
        out[c] +=
            double(LoadElement(x, model.layout.dtype, row + i)) * LoadElement(w.data(), weights_dtype, o * hidden + i);
      }
      if (!b.empty()) out[c] += LoadElement(b.data(), weights_dtype, o);
    }
    if (side == 1) return out;
    const int n = model.rope.rotary_dims / 2;
    for (int i = 0; i < n; ++i) {
      const int at = model.rope.pairs == RopeFacts::Pairs::kHalfSplit ? i : 2 * i;
      const int other = model.rope.pairs == RopeFacts::Pairs::kHalfSplit ? i + n : 2 * i + 1;
      const double frequency = std::pow(model.rope.theta, -2.0 * i / model.rope.rotary_dims);
      const double position = double(s.first_position + token);
      const double angle = model.rope.angles == RopeFacts::Angles::kDouble ? position * frequency
                                                                           : double(float(position) * float(frequency));
      const double a = out[at], b2 = out[other];
      out[at] = a * std::cos(angle) - b2 * std::sin(angle);
      out[other] = b2 * std::cos(angle) + a * std::sin(angle);
    }
    return out;
  }

  // Everything below the splits recomputed, everything behind copied.
  void Verify(const std::vector<int64_t>& splits) const {
    const PageLayout& l = model.layout;
    // Half a step of the dtype, and the error of an fp32 sum of `hidden` products of about unit variance.
    const double step = l.dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
    const double sum = 4 * std::sqrt(double(model.hidden)) * 0x1p-24;
    for (size_t i = 0; i < sequences.size(); ++i) {
      const Sequence& s = sequences[i];
      for (int64_t t = 0; t < splits[i]; ++t) {
        const uint8_t* const page = s.pages[t / l.page_tokens].data();
        for (int side = 0; side < 2; ++side) {
          for (int head = 0; head < l.kv_heads; ++head) {
            const std::vector<double> want = Reference(s, side, head, t);
            const uint8_t* const got = page + l.raw_offset(side, head, int(t % l.page_tokens));
            for (int c = 0; c < l.head_dim; ++c) {
              ASSERT_NEAR(LoadElement(got, l.dtype, c), want[c], std::abs(want[c]) * step + 0x1p-25 + sum)
                  << "sequence " << i << ", token " << t << ", side " << side << ", head " << head << ", channel " << c;
            }
          }
        }
      }
      const int64_t recomputed = (splits[i] + l.page_tokens - 1) / l.page_tokens;
      for (size_t p = recomputed; p < s.pages.size(); ++p) {
        ASSERT_EQ(std::memcmp(s.pages[p].data(), s.stored[p].data(), kv_page_bytes), 0) << i << ", page " << p;
      }
    }
  }
};

inline ProjectionModel Model(int hidden, int kv_heads, int head_dim, RopeFacts rope, DType dtype = DType::kFloat16) {
  ProjectionModel model{.layers = 2, .hidden = hidden, .rope = rope};
  model.layout = {dtype, uint16_t(kv_heads), uint16_t(head_dim), 16};
  return model;
}

struct ModelCase {
  ProjectionModel model;
  DType weights;
  bool bias;
};
inline std::vector<ModelCase> ModelCases() {
  using Pairs = RopeFacts::Pairs;
  using Angles = RopeFacts::Angles;
  return {
      // One head per query head, Llama of transformers.
      {Model(256, 4, 64, {64, 10000, Pairs::kHalfSplit, Angles::kFloat32}), DType::kFloat16, false},
      // Grouped queries: K and V narrower than X, large theta.
      {Model(256, 1, 32, {32, 5e5, Pairs::kHalfSplit, Angles::kDouble}), DType::kFloat16, false},
      // Interleaved, part of the channels, biases.
      {Model(96, 3, 48, {24, 10000, Pairs::kInterleaved, Angles::kFloat32}), DType::kFloat16, true},
      {Model(128, 2, 64, {64, 1e6, Pairs::kInterleaved, Angles::kFloat32}, DType::kBFloat16), DType::kBFloat16, false},
      // No rotation; hidden no multiple of any vector; weights of another type than pages.
      {Model(77, 2, 16, {}), DType::kBFloat16, true},
      {Model(64, 20, 32, {32, 10000, Pairs::kHalfSplit, Angles::kDouble}, DType::kBFloat16), DType::kFloat32, true},
  };
}

}  // namespace kvmanager::recompute
