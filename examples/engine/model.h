// A Llama-architecture model: configuration, weights, and the arithmetic of one step around attention.
//
// ModelConfig is a value. Model owns weights in float32 and is immutable: any thread may read it. Runner owns the
// scratch of one stream of steps over a Model and a KvBackend, both of which outlive it; one thread calls it, and it
// splits long chunks over worker threads by rows. Tensor names are Hugging Face's (LlamaForCausalLM).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "examples/engine/kv_backend.h"
#include "kvmanager/base/safetensors.h"
#include "kvmanager/base/worker_pool.h"

namespace kvmanager::engine {

struct ModelConfig {
  std::string name;  // the configuration's _name_or_path, else the directory's name
  int hidden_size = 0, intermediate_size = 0, layers = 0;
  int query_heads = 0, kv_heads = 0, head_dim = 0;
  int vocab_size = 0;
  double rope_theta = 10000;
  float rms_norm_eps = 1e-5f;
  bool tie_word_embeddings = false;
};

/// Reads config.json's text. Errors: INVALID_ARGUMENT naming field, value and bound, also for what the engine does not
/// have (biases, scaled RoPE, activations other than SiLU).
absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& json);

struct LayerWeights {
  // Matrices are [outputs][inputs], row-major.
  std::vector<float> input_norm, q, k, v, o, post_norm, gate, up, down;
};

class Model {
 public:
  /// directory: config.json and *.safetensors. Errors: NOT_FOUND, INVALID_ARGUMENT (file, tensor, field, value, bound).
  static absl::StatusOr<std::unique_ptr<Model>> Load(const std::string& directory);
  static absl::StatusOr<std::unique_ptr<Model>> Create(const ModelConfig& config, const TensorMap& tensors);

  const ModelConfig& config() const { return config_; }
  /// Hexadecimal SHA-256 over configuration and weights: two models whose K and V differ have different digests.
  const std::string& digest() const { return digest_; }
  const std::vector<LayerWeights>& layers() const { return layers_; }
  const std::vector<float>& embeddings() const { return embeddings_; }  // [vocab][hidden]
  const std::vector<float>& final_norm() const { return final_norm_; }
  const std::vector<float>& head() const {
    return config_.tie_word_embeddings ? embeddings_ : head_;
  }  // [vocab][hidden]

 private:
  Model() = default;

  ModelConfig config_;
  std::string digest_;
  std::vector<LayerWeights> layers_;
  std::vector<float> embeddings_, final_norm_, head_;
};

/// K and V of activations `x` [tokens][hidden], float16, at `position` onwards, as Runner makes them:
/// [tokens][kv_heads] [head_dim], float16.
void ProjectKeysValues(const Model& model, int layer, absl::Span<const uint16_t> x, uint64_t position, uint16_t* k,
                       uint16_t* v);

class Runner {
 public:
  /// threads: 1..WorkerPool::kThreadsMax, for long chunks.
  Runner(const Model* model, KvBackend* backend, int threads);
  ~Runner();

  enum class Logits { kNone, kLast, kAll };

  /// Runs `tokens` (the rows of all entries) through every layer. logits: [rows][vocab] with kAll, [entries][vocab] of
  /// each entry's last token with kLast. Errors: INVALID_ARGUMENT (rows, token ids), and those of the backend.
  absl::Status Step(absl::Span<const KvEntry> entries, absl::Span<const uint32_t> tokens, Logits which,
                    std::vector<float>* logits);

 private:
  void Parallel(int rows, absl::FunctionRef<void(int begin, int end)> work);
  void BeforeAttention(const LayerWeights& weights, int begin, int end);
  void AfterAttention(int layer, int begin, int end);

  const Model* const model_;
  KvBackend* const backend_;
  const StepBuffers buffers_;
  const std::vector<float> inverse_frequencies_;  // [head_dim / 2]
  std::vector<float> hidden_, normed_, branch_;   // [rows_max][hidden]
  std::vector<float> k_, v_;                      // [rows_max][kv_heads][head_dim]
  std::vector<float> gate_, up_;                  // [rows_max][intermediate]
  std::vector<float> cos_, sin_;                  // [rows_max][head_dim / 2]
  std::unique_ptr<WorkerPool> workers_;           // nullptr: one thread
};

}  // namespace kvmanager::engine
