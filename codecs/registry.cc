#include "codecs/registry.h"

#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t kSpecBytesMax = 4096;
constexpr absl::string_view kWordBound = "1 or more of a-z, 0-9 and _";
constexpr char kCalibration[] = "calibration";

bool IsWord(absl::string_view text) {
  for (char c : text) {
    if (!absl::ascii_islower(c) && !absl::ascii_isdigit(c) && c != '_') return false;
  }
  return !text.empty();
}

/// "zack+hack": words joined by '+'.
bool IsName(absl::string_view text) {
  for (absl::string_view word : absl::StrSplit(text, '+')) {
    if (!IsWord(word)) return false;
  }
  return true;
}

/// A model's name without the directory or the organisation before it. Engines name a model by the path or the
/// repository that it was loaded from, or by the last part of it alone; an artifact fits them all.
absl::string_view LastPart(absl::string_view name) {
  while (absl::ConsumeSuffix(&name, "/")) {
  }
  return name.substr(name.rfind('/') + 1);
}

absl::Status CheckFits(const Calibration& calibration, const CodecContext& context) {
  const CalibrationModel& model = calibration.model();
  const auto refuse = [&](absl::string_view field, const auto& value, const auto& bound) {
    return FieldError(absl::StatusCode::kFailedPrecondition,
                      absl::StrCat("calibration ", calibration.source(), " ", field), absl::StrCat(value),
                      absl::StrCat(bound, ", the cache's"));
  };
  if (!context.model.empty() && LastPart(model.model) != LastPart(context.model)) {
    return refuse("model", model.model, context.model);
  }
  if (!context.revision.empty() && !model.revision.empty() && model.revision != context.revision) {
    return refuse("revision", model.revision, context.revision);
  }
  if (model.layers != context.layers) return refuse("layers", model.layers, context.layers);
  if (model.kv_heads != context.layout.kv_heads) return refuse("kv_heads", model.kv_heads, context.layout.kv_heads);
  // An engine that keeps pages and attends itself may not know its query heads: it says as many as KV heads.
  if (context.query_heads != 0 && context.query_heads != context.layout.kv_heads &&
      model.query_heads != context.query_heads) {
    return refuse("query_heads", model.query_heads, context.query_heads);
  }
  if (model.head_dim != context.layout.head_dim) return refuse("head_dim", model.head_dim, context.layout.head_dim);
  return absl::OkStatus();
}

}  // namespace

std::string WithCalibration(std::string spec, const std::shared_ptr<const Calibration>& calibration) {
  if (calibration == nullptr) return spec;
  absl::StrAppend(&spec, spec.find(':') == std::string::npos ? ":" : ",", kCalibration, "=", calibration->digest());
  return spec;
}

absl::Status RefuseCalibration(const CodecContext& context, absl::string_view why) {
  if (context.calibration == nullptr) return absl::OkStatus();
  return InvalidField("codec parameter calibration", context.calibration->digest(), absl::StrCat("absent: ", why));
}

bool ParseDecimal(absl::string_view text, int* value) {
  return text.find_first_not_of("-0123456789") == absl::string_view::npos && absl::SimpleAtoi(text, value);
}

bool ParseDecimal(absl::string_view text, double* value) {
  return text.find_first_not_of("+-.0123456789eE") == absl::string_view::npos && !absl::StartsWith(text, "+") &&
         absl::SimpleAtod(text, value) && std::isfinite(*value);
}

absl::StatusOr<CodecSpec> ParseCodecSpec(absl::string_view text) {
  if (text.size() > kSpecBytesMax) {
    return InvalidField("codec", absl::StrCat(text.size(), " bytes long"),
                        absl::StrCat("at most ", kSpecBytesMax, " bytes"));
  }
  const size_t colon = text.find(':');
  CodecSpec spec;
  spec.name = std::string(text.substr(0, colon));
  if (!IsName(spec.name)) {
    return InvalidField("codec", absl::StrCat("\"", text, "\""),
                        "NAME[:key=value,...], NAME being 1 or more of a-z, 0-9, _ and +");
  }
  if (colon == absl::string_view::npos) return spec;
  for (absl::string_view part : absl::StrSplit(text.substr(colon + 1), ',')) {
    const size_t equals = part.find('=');
    if (equals == absl::string_view::npos) {
      return InvalidField(absl::StrCat("codec ", spec.name, " parameter"), absl::StrCat("\"", part, "\""), "key=value");
    }
    const std::string key(part.substr(0, equals));
    const std::string value(part.substr(equals + 1));
    if (!IsWord(key)) {
      return InvalidField(absl::StrCat("codec ", spec.name, " parameter name"), absl::StrCat("\"", key, "\""),
                          kWordBound);
    }
    if (value.empty()) return InvalidField(absl::StrCat("codec parameter ", key), "empty", "a value");
    if (!spec.parameters.emplace(key, value).second) {
      return InvalidField(absl::StrCat("codec parameter ", key), "given twice", "given once");
    }
  }
  return spec;
}

void CodecRegistry::Register(std::string name, std::string help, Factory factory) {
  KV_CHECK(IsName(name));
  KV_CHECK(entries_.emplace(std::move(name), Entry{std::move(help), std::move(factory)}).second);
}

void CodecRegistry::SetPolicyFactory(PolicyFactory factory) { policy_factory_ = std::move(factory); }
void CodecRegistry::SetLadderFactory(PolicyFactory factory) { ladder_factory_ = std::move(factory); }
void CodecRegistry::SetCalibrations(CalibrationSource* calibrations) { calibrations_ = calibrations; }

bool CodecRegistry::IsLadder(absl::string_view spec) const {
  return absl::StartsWith(spec, kLadderPrefix) && ladder_factory_ != nullptr;
}

absl::StatusOr<std::unique_ptr<Codec>> CodecRegistry::Create(absl::string_view spec,
                                                             const CodecContext& context) const {
  if (IsLadder(spec)) return ladder_factory_(*this, context, spec, std::nullopt);
  if (spec.find(';') != absl::string_view::npos && policy_factory_ != nullptr) {
    return policy_factory_(*this, context, spec, std::nullopt);
  }
  KV_ASSIGN_OR_RETURN(CodecSpec parsed, ParseCodecSpec(spec));
  const auto found = entries_.find(parsed.name);
  if (found == entries_.end()) {
    std::vector<std::string> names;
    for (const auto& [name, entry] : entries_) names.push_back(name);
    return InvalidField("codec", absl::StrCat("\"", parsed.name, "\""),
                        absl::StrCat("one of ", absl::StrJoin(names, ", ")));
  }
  CodecContext with = context;
  with.calibration = nullptr;
  if (const auto named = parsed.parameters.find(kCalibration); named != parsed.parameters.end()) {
    if (calibrations_ == nullptr) {
      return InvalidField("codec parameter calibration", named->second, "absent: no artifacts can be read here");
    }
    KV_ASSIGN_OR_RETURN(with.calibration, calibrations_->Get(named->second));
    KV_RETURN_IF_ERROR(CheckFits(*with.calibration, context));
    parsed.parameters.erase(named);
  }
  return found->second.factory(with, parsed.parameters);
}

absl::StatusOr<std::unique_ptr<Codec>> CodecRegistry::CreateForCache(absl::string_view spec,
                                                                     const CodecContext& context) const {
  if (policy_factory_ == nullptr) return Create(spec, context);
  if (IsLadder(spec)) return ladder_factory_(*this, context, spec, context.layout.page_tokens);
  return policy_factory_(*this, context, spec, context.layout.page_tokens);
}

absl::StatusOr<std::unique_ptr<Codec>> CodecRegistry::Create(absl::string_view spec, const PageLayout& layout) const {
  CodecContext context;
  context.layout = layout;
  return Create(spec, context);
}

std::map<std::string, std::string> CodecRegistry::Names() const {
  std::map<std::string, std::string> names;
  for (const auto& [name, entry] : entries_) names.emplace(name, entry.help);
  return names;
}

}  // namespace kvmanager
