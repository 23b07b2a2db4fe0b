#include "examples/engine/model.h"

#include <cmath>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/base/status.h"

namespace kvmanager::engine {
namespace {

/// One named tensor as float32, of exactly this shape, all values finite.
absl::Status LoadWeights(const TensorMap& tensors, const std::string& name, absl::Span<const uint64_t> shape,
                         std::vector<float>* out) {
  const auto found = tensors.find(name);
  if (found == tensors.end()) return InvalidField("tensor " + name, "absent", "present");
  const Tensor& tensor = found->second;
  if (absl::MakeConstSpan(tensor.shape) != shape) {
    return InvalidField("tensor " + name + ": shape", absl::StrCat("[", absl::StrJoin(tensor.shape, ", "), "]"),
                        absl::StrCat("[", absl::StrJoin(shape, ", "), "] (config.json)"));
  }
  DType dtype;
  if (tensor.dtype == "F16") {
    dtype = DType::kFloat16;
  } else if (tensor.dtype == "BF16") {
    dtype = DType::kBFloat16;
  } else if (tensor.dtype == "F32") {
    dtype = DType::kFloat32;
  } else {
    return InvalidField("tensor " + name + ": dtype", tensor.dtype, "F16, BF16 or F32");
  }
  out->resize(tensor.bytes.size() / DTypeBytes(dtype));
  for (size_t i = 0; i < out->size(); ++i) {
    const float value = LoadElement(tensor.bytes.data(), dtype, i);
    if (!std::isfinite(value)) return InvalidField(absl::StrCat("tensor ", name, ": value ", i), value, "finite");
    (*out)[i] = value;
  }
  return absl::OkStatus();
}

std::string DigestModel(const ModelConfig& c, const TensorMap& tensors) {
  std::string facts = absl::StrFormat("llama %d %d %d %d %d %d %d %.17g %.9g %d\n", c.hidden_size, c.intermediate_size,
                                      c.layers, c.query_heads, c.kv_heads, c.head_dim, c.vocab_size, c.rope_theta,
                                      c.rms_norm_eps, c.tie_word_embeddings);
  for (const auto& [name, tensor] : tensors) {
    absl::StrAppend(&facts, name.size(), " ", name, " ", tensor.dtype, " ", absl::StrJoin(tensor.shape, ","), " ",
                    Sha256(tensor.bytes).ToHex(), "\n");
  }
  return Sha256(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(facts.data()), facts.size())).ToHex();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> Model::Load(const std::string& directory) {
  const std::filesystem::path path(directory);
  std::ifstream file(path / "config.json", std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat("cannot open ", (path / "config.json").string()));
  std::stringstream text;
  text << file.rdbuf();
  KV_ASSIGN_OR_RETURN(ModelConfig config, ParseModelConfig(text.str()));
  if (config.name.empty()) {
    std::error_code error;
    config.name = std::filesystem::canonical(path, error).filename().string();
  }
  KV_ASSIGN_OR_RETURN(const std::unique_ptr<Safetensors> tensors, Safetensors::Open(directory));
  return Create(config, tensors->tensors());
}

absl::StatusOr<std::unique_ptr<Model>> Model::Create(const ModelConfig& config, const TensorMap& tensors) {
  std::unique_ptr<Model> model(new Model);
  model->config_ = config;
  const uint64_t hidden = config.hidden_size, inner = config.intermediate_size, vocab = config.vocab_size;
  const uint64_t q_rows = uint64_t(config.query_heads) * config.head_dim,
                 kv_rows = uint64_t(config.kv_heads) * config.head_dim;
  KV_RETURN_IF_ERROR(LoadWeights(tensors, "model.embed_tokens.weight", {vocab, hidden}, &model->embeddings_));
  KV_RETURN_IF_ERROR(LoadWeights(tensors, "model.norm.weight", {hidden}, &model->final_norm_));
  if (!config.tie_word_embeddings)
    KV_RETURN_IF_ERROR(LoadWeights(tensors, "lm_head.weight", {vocab, hidden}, &model->head_));
  for (int i = 0; i < config.layers; ++i) {
    const std::string p = absl::StrCat("model.layers.", i, ".");
    LayerWeights& w = model->layers_.emplace_back();
    KV_RETURN_IF_ERROR(LoadWeights(tensors, p + "input_layernorm.weight", {hidden}, &w.input_norm));
    KV_RETURN_IF_ERROR(LoadWeights(tensors, p + "self_attn.q_proj.weight", {q_rows, hidden}, &w.q));
    KV_RETURN_IF_ERROR(LoadWeights(tensors, p + "self_attn.k_proj.weight", {kv_rows, hidden}, &w.k));
    KV_RETURN_IF_ERROR(LoadWeights(tensors, p + "self_attn.v_proj.weight", {kv_rows, hidden}, &w.v));
    KV_RETURN_IF_ERROR(LoadWeights(tensors, p + "self_attn.o_proj.weight", {hidden, q_rows}, &w.o));
    KV_RETURN_IF_ERROR(LoadWeights(tensors, p + "post_attention_layernorm.weight", {hidden}, &w.post_norm));
    KV_RETURN_IF_ERROR(LoadWeights(tensors, p + "mlp.gate_proj.weight", {inner, hidden}, &w.gate));
    KV_RETURN_IF_ERROR(LoadWeights(tensors, p + "mlp.up_proj.weight", {inner, hidden}, &w.up));
    KV_RETURN_IF_ERROR(LoadWeights(tensors, p + "mlp.down_proj.weight", {hidden, inner}, &w.down));
  }
  model->digest_ = DigestModel(config, tensors);
  return model;
}

}  // namespace kvmanager::engine
