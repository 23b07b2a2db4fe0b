// The tiny model and a text in files, for tests of programs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "examples/engine/tiny_model.h"

namespace kvmanager::engine {

/// Makes `directory`, with the random weights of `seed`.
inline void WriteTinyModel(const ModelConfig& c, uint32_t seed, const std::filesystem::path& directory) {
  std::filesystem::create_directories(directory);
  const nlohmann::json json = {{"architectures", {"LlamaForCausalLM"}},
                               {"model_type", "llama"},
                               {"hidden_act", "silu"},
                               {"hidden_size", c.hidden_size},
                               {"intermediate_size", c.intermediate_size},
                               {"num_hidden_layers", c.layers},
                               {"num_attention_heads", c.query_heads},
                               {"num_key_value_heads", c.kv_heads},
                               {"head_dim", c.head_dim},
                               {"vocab_size", c.vocab_size},
                               {"rope_theta", c.rope_theta},
                               {"rms_norm_eps", c.rms_norm_eps},
                               {"tie_word_embeddings", c.tie_word_embeddings}};
  std::ofstream(directory / "config.json") << json.dump();
  std::ofstream(directory / "model.safetensors", std::ios::binary) << SafetensorsFile(RandomTensors(c, seed));
}

inline void WriteRandomText(size_t bytes, uint32_t seed, const std::filesystem::path& path) {
  std::ofstream text(path, std::ios::binary);
  for (uint32_t token : RandomTokens(bytes, seed)) text.put(char(token));
}

}  // namespace kvmanager::engine
