// A tiny random model for tests, with the bytes of its safetensors file.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "examples/engine/model.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/safetensors_testing.h"

namespace kvmanager::engine {

inline ModelConfig TinyConfig() {
  ModelConfig c;
  c.name = "tiny";
  c.hidden_size = 48;
  c.intermediate_size = 80;
  c.layers = 2;
  c.query_heads = 6;
  c.kv_heads = 2;
  c.head_dim = 16;
  c.vocab_size = 256;
  c.rope_theta = 1000;
  return c;
}

/// Random float16 weights of `config`, under Hugging Face's names.
inline std::vector<FileTensor> RandomTensors(const ModelConfig& c, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<FileTensor> tensors;
  const auto add = [&](const std::string& name, std::vector<uint64_t> shape, float mean, float spread) {
    std::normal_distribution<float> normal(mean, spread);
    uint64_t n = 1;
    for (uint64_t s : shape) n *= s;
    std::string bytes(2 * n, '\0');
    for (uint64_t i = 0; i < n; ++i) StoreElement(bytes.data(), DType::kFloat16, i, normal(random));
    tensors.push_back({name, "F16", std::move(shape), std::move(bytes)});
  };
  const uint64_t hidden = c.hidden_size, inner = c.intermediate_size, vocab = c.vocab_size;
  const uint64_t q_rows = c.query_heads * c.head_dim, kv_rows = c.kv_heads * c.head_dim;
  const float spread = 1.5f / std::sqrt(float(hidden));
  add("model.embed_tokens.weight", {vocab, hidden}, 0, 1);
  add("model.norm.weight", {hidden}, 1, 0.1f);
  if (!c.tie_word_embeddings) add("lm_head.weight", {vocab, hidden}, 0, spread);
  for (int i = 0; i < c.layers; ++i) {
    const std::string p = absl::StrCat("model.layers.", i, ".");
    add(p + "input_layernorm.weight", {hidden}, 1, 0.1f);
    add(p + "self_attn.q_proj.weight", {q_rows, hidden}, 0, spread);
    add(p + "self_attn.k_proj.weight", {kv_rows, hidden}, 0, spread);
    add(p + "self_attn.v_proj.weight", {kv_rows, hidden}, 0, spread);
    add(p + "self_attn.o_proj.weight", {hidden, q_rows}, 0, spread);
    add(p + "post_attention_layernorm.weight", {hidden}, 1, 0.1f);
    add(p + "mlp.gate_proj.weight", {inner, hidden}, 0, spread);
    add(p + "mlp.up_proj.weight", {inner, hidden}, 0, spread);
    add(p + "mlp.down_proj.weight", {hidden, inner}, 0, spread);
  }
  return tensors;
}

inline absl::StatusOr<std::unique_ptr<Model>> TinyModel(const ModelConfig& config, uint32_t seed) {
  const std::string file = SafetensorsFile(RandomTensors(config, seed));
  TensorMap tensors;
  const absl::Status parsed = ParseSafetensors(Bytes(file), "tiny", &tensors);
  if (!parsed.ok()) return parsed;
  return Model::Create(config, tensors);
}

inline std::vector<uint32_t> RandomTokens(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint32_t> tokens(n);
  for (uint32_t& token : tokens) token = random() % 256;
  return tokens;
}

}  // namespace kvmanager::engine
