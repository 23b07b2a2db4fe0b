// Activations, and the K and V that a small model's projections make of them, in double precision with plain loops:
// what daemons that recompute are compared with. Pure functions of the seed.
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "client/client.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager::testing {

/// 2 layers, 2 KV heads, 4 query heads: X of a token takes half of what K and V do.
inline client::CacheOptions ProjectedCache(const std::string& codec = "raw", int lag_pages = 0) {
  client::CacheOptions o;
  o.model = "projected";
  o.layers = 2;
  o.kv_heads = 2;
  o.query_heads = 4;
  o.head_dim = 32;
  o.hidden_size = 64;
  o.codec = codec;
  o.lag_pages = lag_pages;
  return o;
}

struct ProjectedSource {
  uint64_t seed = 1;
  client::CacheOptions shape = ProjectedCache();
  client::ProjectionFacts facts = {.rotary_dims = 32, .theta = 10000};
  DType weights = DType::kFloat32;  // as they are registered: or kFloat16

  struct Rows {
    std::vector<uint16_t> x, k, v;  // float16: [tokens][hidden_size], [tokens][kv_heads][head_dim]
  };
  /// W_K (side 0) or W_V, [kv_heads * head_dim][hidden_size].
  std::vector<float> Weights(int layer, int side) const {
    std::mt19937_64 random(1000 + layer * 2 + side);
    std::normal_distribution<float> normal(0, 1 / std::sqrt(float(shape.hidden_size)));
    std::vector<float> weights(size_t(shape.kv_heads) * shape.head_dim * shape.hidden_size);
    for (float& w : weights) {
      w = normal(random);
      if (this->weights == DType::kFloat16) w = HalfToFloat(FloatToHalf(w));
    }
    return weights;
  }
  Rows Tokens(int layer, uint64_t first, int tokens) const {
    const int width = shape.kv_heads * shape.head_dim;
    Rows rows;
    for (int t = 0; t < tokens; ++t) {
      std::mt19937_64 random(seed * 1000003 + (first + t) * 97 + layer);
      std::normal_distribution<float> normal;
      for (int i = 0; i < shape.hidden_size; ++i) rows.x.push_back(FloatToHalf(normal(random)));
    }
    for (int side = 0; side < 2; ++side) {
      const std::vector<float> weights = Weights(layer, side);
      for (int t = 0; t < tokens; ++t) {
        const uint16_t* const x = &rows.x[size_t(t) * shape.hidden_size];
        std::vector<double> out(width, 0);
        for (int o = 0; o < width; ++o) {
          for (int i = 0; i < shape.hidden_size; ++i) {
            out[o] += double(weights[size_t(o) * shape.hidden_size + i]) * HalfToFloat(x[i]);
          }
        }
        for (int head = 0; side == 0 && head < shape.kv_heads; ++head) {
          Rotate(&out[size_t(head) * shape.head_dim], first + t);
        }
        for (const double value : out) (side == 0 ? rows.k : rows.v).push_back(FloatToHalf(float(value)));
      }
    }
    return rows;
  }
  void Rotate(double* head, uint64_t position) const {
    const int half = facts.rotary_dims / 2;
    for (int i = 0; i < half; ++i) {
      const double angle = double(position) * std::pow(facts.theta, -2.0 * i / facts.rotary_dims);
      double& a = head[facts.interleaved ? 2 * i : i];
      double& b = head[facts.interleaved ? 2 * i + 1 : i + half];
      const double rotated = a * std::cos(angle) - b * std::sin(angle);
      b = b * std::cos(angle) + a * std::sin(angle);
      a = rotated;
    }
  }
};

template <typename T>
client::TensorView InlineView(const std::vector<T>& values) {
  return client::TensorView::Inline(values.data(), values.size() * sizeof(T));
}

/// What a client registers for one layer; the vectors are what its views point into.
struct Registration {
  explicit Registration(const ProjectedSource& source, int layer, uint64_t position = 5000)
      : k(source.Weights(layer, 0)), v(source.Weights(layer, 1)), proof(source.Tokens(layer, position, 16)) {
    wire.layer = layer;
    wire.dtype = source.weights;
    wire.proof.position = position;
    wire.proof.tokens = 16;
    Point();
  }
  /// After a change of the vectors.
  void Point() {
    const bool half = wire.dtype == DType::kFloat16;
    k_half = Halves(k), v_half = Halves(v);
    wire.k = half ? InlineView(k_half) : InlineView(k);
    wire.v = half ? InlineView(v_half) : InlineView(v);
    wire.proof.x = InlineView(proof.x);
    wire.proof.k = InlineView(proof.k);
    wire.proof.v = InlineView(proof.v);
  }
  static std::vector<uint16_t> Halves(const std::vector<float>& values) {
    std::vector<uint16_t> halves;
    for (const float value : values) halves.push_back(FloatToHalf(value));
    return halves;
  }
  std::vector<float> k, v;
  std::vector<uint16_t> k_half, v_half;
  ProjectedSource::Rows proof;
  client::LayerProjections wire;
};

/// Opens the cache's projections and registers every layer.
inline absl::StatusOr<std::unique_ptr<client::Projections>> RegisterAll(client::Cache& cache,
                                                                        const ProjectedSource& source) {
  KV_ASSIGN_OR_RETURN(auto projections, cache.OpenProjections(source.facts));
  for (int layer = 0; layer < source.shape.layers; ++layer) {
    KV_RETURN_IF_ERROR(projections->SetLayer(Registration(source, layer).wire));
  }
  return projections;
}

/// Appends tokens to every layer, with their activations.
inline absl::Status LoadProjected(client::Cache& cache, uint64_t sequence, const ProjectedSource& source,
                                  uint64_t first, int tokens) {
  for (int layer = 0; layer < source.shape.layers; ++layer) {
    const ProjectedSource::Rows rows = source.Tokens(layer, first, tokens);
    const client::StepEntry entry{sequence, first, tokens};
    client::StepBatch batch;
    batch.layer = layer;
    batch.entries = {&entry, 1};
    batch.k = InlineView(rows.k);
    batch.v = InlineView(rows.v);
    batch.x = InlineView(rows.x);
    KV_RETURN_IF_ERROR(cache.Step(batch).status());
  }
  return absl::OkStatus();
}

}  // namespace kvmanager::testing
