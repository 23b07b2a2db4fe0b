#include <cmath>

#include "examples/engine/model.h"
#include "kvmanager/base/page_layout.h"
#include "kvmanager/base/status.h"
#include "nlohmann/json.hpp"

namespace kvmanager::engine {
namespace {

using Json = nlohmann::json;

constexpr int kDepthMax = 32;  // of JSON

std::string Shown(const Json& value) {
  return value.dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 120);
}

/// An integer field within low..high.
absl::Status ReadInt(const Json& config, const char* field, int64_t low, int64_t high, int* out) {
  const std::string bound = absl::StrCat("an integer in ", low, "..", high);
  const auto found = config.find(field);
  if (found == config.end()) return InvalidField(field, "absent", bound);
  if (!found->is_number_unsigned() || found->get<uint64_t>() > uint64_t(high) ||
      int64_t(found->get<uint64_t>()) < low) {
    return InvalidField(field, Shown(*found), bound);
  }
  *out = int(found->get<uint64_t>());
  return absl::OkStatus();
}

absl::Status ReadPositive(const Json& config, const char* field, double low, double high, double* out) {
  const auto found = config.find(field);
  if (found == config.end()) return InvalidField(field, "absent", "present");
  if (!found->is_number() || !(found->get<double>() >= low && found->get<double>() <= high)) {
    return InvalidField(field, Shown(*found), absl::StrCat("a number in ", low, "..", high));
  }
  *out = found->get<double>();
  return absl::OkStatus();
}

/// `field` is absent or `expected`: the engine has nothing else.
absl::Status RequireIfPresent(const Json& config, const char* field, const Json& expected) {
  const auto found = config.find(field);
  if (found == config.end() || found->is_null() || *found == expected) return absl::OkStatus();
  return InvalidField(field, Shown(*found), Shown(expected));
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(const std::string& json) {
  bool too_deep = false;
  const auto note = [&](int depth, Json::parse_event_t, Json&) {
    too_deep |= depth > kDepthMax;
    return !too_deep;  // what is deeper is dropped: printing it would recurse
  };
  const Json config = Json::parse(json, note, /*allow_exceptions=*/false);
  if (too_deep) return InvalidField("config.json nesting", "deeper", absl::StrCat("at most ", kDepthMax, " levels"));
  if (!config.is_object())
    return InvalidField("config.json", config.is_discarded() ? "malformed JSON" : Shown(config), "a JSON object");
  KV_RETURN_IF_ERROR(RequireIfPresent(config, "model_type", "llama"));
  KV_RETURN_IF_ERROR(RequireIfPresent(config, "hidden_act", "silu"));
  KV_RETURN_IF_ERROR(RequireIfPresent(config, "attention_bias", false));
  KV_RETURN_IF_ERROR(RequireIfPresent(config, "mlp_bias", false));
  KV_RETURN_IF_ERROR(RequireIfPresent(config, "rope_scaling", nullptr));

  ModelConfig model;
  KV_RETURN_IF_ERROR(ReadInt(config, "hidden_size", 1, 65536, &model.hidden_size));
  KV_RETURN_IF_ERROR(ReadInt(config, "intermediate_size", 1, 1 << 18, &model.intermediate_size));
  KV_RETURN_IF_ERROR(ReadInt(config, "num_hidden_layers", 1, 1024, &model.layers));
  KV_RETURN_IF_ERROR(ReadInt(config, "num_attention_heads", 1, 1024, &model.query_heads));
  model.kv_heads = model.query_heads;
  if (config.contains("num_key_value_heads")) {
    KV_RETURN_IF_ERROR(ReadInt(config, "num_key_value_heads", 1, PageLayout::kKvHeadsMax, &model.kv_heads));
  }
  if (model.query_heads % model.kv_heads != 0) {
    return InvalidField("num_attention_heads", model.query_heads,
                        absl::StrCat("a multiple of num_key_value_heads ", model.kv_heads));
  }
  model.head_dim = model.hidden_size / model.query_heads;
  if (config.contains("head_dim") && !config["head_dim"].is_null())
    KV_RETURN_IF_ERROR(ReadInt(config, "head_dim", 1, 65536, &model.head_dim));
  if (model.head_dim < PageLayout::kHeadDimMin || model.head_dim > PageLayout::kHeadDimMax ||
      model.head_dim % 16 != 0) {
    return InvalidField("head_dim", model.head_dim,
                        absl::StrCat("a multiple of 16 in ", PageLayout::kHeadDimMin, "..", PageLayout::kHeadDimMax));
  }
  KV_RETURN_IF_ERROR(ReadInt(config, "vocab_size", 1, 1 << 20, &model.vocab_size));

  double eps = 0;
  KV_RETURN_IF_ERROR(ReadPositive(config, "rms_norm_eps", 1e-12, 1, &eps));
  model.rms_norm_eps = float(eps);
  const auto rope = config.find("rope_parameters");
  if (rope != config.end() && rope->is_object()) {
    KV_RETURN_IF_ERROR(RequireIfPresent(*rope, "rope_type", "default"));
    KV_RETURN_IF_ERROR(ReadPositive(*rope, "rope_theta", 1, 1e12, &model.rope_theta));
  } else if (config.contains("rope_theta")) {
    KV_RETURN_IF_ERROR(ReadPositive(config, "rope_theta", 1, 1e12, &model.rope_theta));
  }
  const auto tied = config.find("tie_word_embeddings");
  if (tied != config.end()) {
    if (!tied->is_boolean()) return InvalidField("tie_word_embeddings", Shown(*tied), "true or false");
    model.tie_word_embeddings = tied->get<bool>();
  }
  const auto name = config.find("_name_or_path");
  if (name != config.end() && name->is_string()) model.name = name->get<std::string>();
  return model;
}

}  // namespace kvmanager::engine
