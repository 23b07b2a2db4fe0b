#include "codecs/calibrate/plan.h"

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "codecs/million/million_format.h"
#include "codecs/registry.h"
#include "kvmanager/base/status.h"

namespace kvmanager::calibrate {
namespace {

constexpr char kCodecs[] = "one that is calibrated: million, zack, zack+hack, zack+million, default (zack+hack)";

/// What each codec takes beside "calibration"; others are misspelt.
absl::Span<const char* const> KeysOf(absl::string_view codec) {
  static constexpr const char* kMillion[] = {"m", "bits", "k_m", "k_bits", "v_m", "v_bits", "scope"};
  static constexpr const char* kZack[] = {"mode", "rate", "fold"};
  static constexpr const char* kZackHack[] = {"mode", "k_bits", "v_bits", "bytes", "allocation", "fold", "v_norm"};
  static constexpr const char* kZackMillion[] = {"mode",   "fold", "m",      "bits", "k_m",
                                                 "k_bits", "v_m",  "v_bits", "scope"};
  if (codec == "million") return kMillion;
  if (codec == "zack") return kZack;
  if (codec == "zack+hack") return kZackHack;
  if (codec == "zack+million") return kZackMillion;
  return {};
}

absl::Status CheckKeys(const CodecSpec& spec) {
  const absl::Span<const char* const> known = KeysOf(spec.name);
  for (const auto& [key, value] : spec.parameters) {
    if (key == "calibration" || std::find(known.begin(), known.end(), key) != known.end()) continue;
    return InvalidField(absl::StrCat(spec.name, " parameter"), absl::CHexEscape(key.substr(0, 40)),
                        known.empty() ? "absent: name the codec to set its parameters"
                                      : absl::StrCat("one of ", absl::StrJoin(known, ", ")));
  }
  return absl::OkStatus();
}

/// "head", or what `scope` says.
absl::StatusOr<std::string> Scope(const CodecSpec& spec, absl::Span<const char* const> allowed) {
  const auto found = spec.parameters.find("scope");
  const std::string scope = found == spec.parameters.end() ? "head" : found->second;
  if (std::find(allowed.begin(), allowed.end(), scope) == allowed.end()) {
    return InvalidField(absl::StrCat(spec.name, " scope"), absl::CHexEscape(scope.substr(0, 40)),
                        absl::StrJoin(allowed, " or "));
  }
  return scope;
}

/// The integer under `key` in min..max, or `otherwise`.
absl::StatusOr<int> Number(const CodecSpec& spec, const std::string& key, int otherwise, int min, int max) {
  const auto found = spec.parameters.find(key);
  if (found == spec.parameters.end()) return otherwise;
  int value = 0;
  if (!ParseDecimal(found->second, &value) || value < min || value > max) {
    return InvalidField(absl::StrCat(spec.name, " ", key), absl::CHexEscape(found->second.substr(0, 40)),
                        absl::StrCat("an integer in ", min, "..", max));
  }
  return value;
}

/// m and bits of each side: k_m, k_bits, v_m, v_bits, or m, bits for both.
absl::Status AddShapes(const CodecSpec& spec, int head_dim, std::set<PqShape> (*into)[2]) {
  KV_ASSIGN_OR_RETURN(const int m, Number(spec, "m", million::DefaultSubspaces(head_dim), 1, head_dim));
  KV_ASSIGN_OR_RETURN(const int bits, Number(spec, "bits", PqShape().bits, PqShape::kBitsMin, PqShape::kBitsMax));
  for (Side side : kSides) {
    const std::string prefix = absl::StrCat(Name(side), "_");
    PqShape shape;
    KV_ASSIGN_OR_RETURN(shape.m, Number(spec, prefix + "m", m, 1, head_dim));
    KV_ASSIGN_OR_RETURN(shape.bits, Number(spec, prefix + "bits", bits, PqShape::kBitsMin, PqShape::kBitsMax));
    if (head_dim % shape.m != 0) {
      return InvalidField(absl::StrCat(spec.name, " ", spec.parameters.count(prefix + "m") ? prefix : "", "m"), shape.m,
                          absl::StrCat("a divisor of head_dim ", head_dim));
    }
    (*into)[int(side)].insert(shape);
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view Name(ZackMode mode) { return mode == ZackMode::kJoint ? "joint" : "balanced"; }
absl::string_view Name(Side side) { return side == Side::kK ? "k" : "v"; }

absl::StatusOr<CalibrationPlan> CalibrationPlan::Make(absl::Span<const std::string> specs, int head_dim) {
  CalibrationPlan plan;
  if (specs.empty()) return InvalidField("codecs to calibrate", "none", "at least one");
  for (const std::string& text : specs) {
    KV_ASSIGN_OR_RETURN(const CodecSpec spec, ParseCodecSpec(text));
    if (spec.name == "million") {
      KV_RETURN_IF_ERROR(CheckKeys(spec));
      KV_ASSIGN_OR_RETURN(const std::string scope, Scope(spec, {"head", "model"}));
      KV_RETURN_IF_ERROR(AddShapes(spec, head_dim, scope == "head" ? &plan.million : &plan.million_model));
    } else if (spec.name == "zack") {
      KV_RETURN_IF_ERROR(CheckKeys(spec));
      plan.zack = true;
    } else if (spec.name == "zack+hack" || spec.name == "default") {
      KV_RETURN_IF_ERROR(CheckKeys(spec));
      plan.zack = plan.zack_hack = true;
    } else if (spec.name == "zack+million") {
      KV_RETURN_IF_ERROR(CheckKeys(spec));
      KV_RETURN_IF_ERROR(Scope(spec, {"head"}).status());
      plan.zack = true;
      KV_RETURN_IF_ERROR(AddShapes(spec, head_dim, &plan.zack_million));
    } else {
      return InvalidField("codec", absl::CHexEscape(spec.name.substr(0, 40)), kCodecs);
    }
  }
  return plan;
}

std::string CodebookName(absl::string_view prefix, Side side, PqShape shape) {
  return absl::StrCat(prefix, ".", Name(side), ".m", shape.m, ".b", shape.bits);
}

std::string ZackName(absl::string_view prefix, ZackMode mode, absl::string_view tensor) {
  return absl::StrCat(prefix, ".", Name(mode), ".", tensor);
}

}  // namespace kvmanager::calibrate
