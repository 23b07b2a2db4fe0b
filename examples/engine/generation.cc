#include "examples/engine/generation.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "nlohmann/json.hpp"

namespace kvmanager::engine {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kBlobVersion = 1;

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators), to [0, 1).
double NextUniform(uint64_t* state) {
  uint64_t z = *state += 0x9e3779b97f4a7c15;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
  z = (z ^ z >> 27) * 0x94d049bb133111eb;
  return double((z ^ z >> 31) >> 11) * 0x1p-53;
}

absl::Status ReadUnsigned(const Json& blob, const char* field, uint64_t max, uint64_t* out) {
  const auto found = blob.find(field);
  if (found == blob.end() || !found->is_number_unsigned() || found->get<uint64_t>() > max) {
    return InvalidField(
        absl::StrCat("hand-off blob: ", field),
        found == blob.end() ? "absent" : found->dump(-1, ' ', true, Json::error_handler_t::replace).substr(0, 80),
        absl::StrCat("an integer in 0..", max));
  }
  *out = found->get<uint64_t>();
  return absl::OkStatus();
}

}  // namespace

uint32_t Sample(absl::Span<const float> logits, SamplingState* state) {
  const auto best = std::max_element(logits.begin(), logits.end());
  if (state->temperature <= 0) return uint32_t(best - logits.begin());
  std::vector<double> cumulative;
  cumulative.reserve(logits.size());
  double sum = 0;
  for (float logit : logits) cumulative.push_back(sum += std::exp((double(logit) - *best) / state->temperature));
  const double drawn = NextUniform(&state->random_state) * sum;
  const auto chosen = std::upper_bound(cumulative.begin(), cumulative.end(), drawn);
  return uint32_t(std::min<size_t>(chosen - cumulative.begin(), logits.size() - 1));
}

std::string EncodeBlob(const HandOffBlob& blob) {
  return Json{{"version", kBlobVersion},
              {"prompt_tokens", blob.prompt_tokens},
              {"first_token", blob.first_token},
              {"temperature", blob.sampling.temperature},
              {"random_state", blob.sampling.random_state}}
      .dump();
}

absl::StatusOr<HandOffBlob> DecodeBlob(absl::string_view bytes, int vocab_size) {
  if (bytes.size() > HandOffBlob::kBytesMax) {
    return InvalidField("hand-off blob bytes", bytes.size(), absl::StrCat("at most ", HandOffBlob::kBytesMax));
  }
  const Json json = Json::parse(bytes.begin(), bytes.end(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return InvalidField("hand-off blob", "not a JSON object", "what EncodeBlob wrote");
  uint64_t version = 0, first_token = 0;
  HandOffBlob blob;
  KV_RETURN_IF_ERROR(ReadUnsigned(json, "version", kBlobVersion, &version));
  if (version != kBlobVersion) return InvalidField("hand-off blob: version", version, absl::StrCat(kBlobVersion));
  KV_RETURN_IF_ERROR(ReadUnsigned(json, "prompt_tokens", UINT32_MAX, &blob.prompt_tokens));
  KV_RETURN_IF_ERROR(ReadUnsigned(json, "first_token", uint64_t(vocab_size) - 1, &first_token));
  KV_RETURN_IF_ERROR(ReadUnsigned(json, "random_state", UINT64_MAX, &blob.sampling.random_state));
  blob.first_token = uint32_t(first_token);
  const auto temperature = json.find("temperature");
  if (temperature == json.end() || !temperature->is_number() ||
      !(temperature->get<double>() >= 0 && temperature->get<double>() <= SamplingState::kTemperatureMax)) {
    return InvalidField("hand-off blob: temperature",
                        temperature == json.end() ? "absent" : temperature->dump().substr(0, 80),
                        absl::StrCat("a number in 0..", SamplingState::kTemperatureMax));
  }
  blob.sampling.temperature = temperature->get<double>();
  return blob;
}

absl::Status Prefill(Runner& runner, uint64_t sequence, absl::Span<const uint32_t> tokens, uint64_t position, int chunk,
                     absl::FunctionRef<void(uint64_t)> progress, std::vector<float>* logits) {
  while (position < tokens.size()) {
    const int count = int(std::min<uint64_t>(chunk, tokens.size() - position));
    const bool last = position + count == tokens.size();
    const KvEntry entry{sequence, position, count};
    KV_RETURN_IF_ERROR(runner.Step({&entry, 1}, tokens.subspan(position, count),
                                   last ? Runner::Logits::kLast : Runner::Logits::kNone, logits));
    position += count;
    progress(position);
  }
  return absl::OkStatus();
}

absl::Status Decode(Runner& runner, uint64_t sequence, uint64_t position, uint32_t first, int count,
                    SamplingState* sampling, absl::FunctionRef<void(uint32_t)> on_token,
                    std::vector<uint32_t>* generated) {
  std::vector<float> logits;
  uint32_t token = first;
  for (int i = 0; i < count; ++i) {
    generated->push_back(token);
    on_token(token);
    if (i + 1 == count) break;
    const KvEntry entry{sequence, position + i, 1};
    KV_RETURN_IF_ERROR(runner.Step({&entry, 1}, {&token, 1}, Runner::Logits::kLast, &logits));
    token = Sample(logits, sampling);
  }
  return absl::OkStatus();
}

}  // namespace kvmanager::engine
