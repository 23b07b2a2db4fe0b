#include "codecs/calibrate/plan.h"

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "codecs/registry.h"
#include "kvmanager/base/status.h"

namespace kvmanager::calibrate {
namespace {

constexpr char kCodecs[] = "one that is calibrated: million, zack, zack+hack, zack+million, default (zack+hack)";

/// The integer under `key` in min..max, or `otherwise`.
absl::StatusOr<int> Number(const CodecSpec& spec, const std::string& key, int otherwise, int min, int max) {
  const auto found = spec.parameters.find(key);
  if (found == spec.parameters.end()) return otherwise;
  int value = 0;
  if (!absl::SimpleAtoi(found->second, &value) || value < min || value > max) {
    return InvalidField(absl::StrCat(spec.name, " ", key), absl::CHexEscape(found->second.substr(0, 40)),
                        absl::StrCat("an integer in ", min, "..", max));
  }
  return value;
}

/// m and bits of each side: k_m, k_bits, v_m, v_bits, or m, bits for both.
absl::Status AddShapes(const CodecSpec& spec, int head_dim, std::set<PqShape> (*into)[2]) {
  KV_ASSIGN_OR_RETURN(const int m, Number(spec, "m", PqShape().m, 1, head_dim));
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
      static const std::set<std::string> kKnown = {"m",   "bits",   "k_m",   "k_bits",
                                                   "v_m", "v_bits", "scope", "calibration"};
      for (const auto& [key, value] : spec.parameters) {
        if (kKnown.count(key) == 0) {
          return InvalidField(absl::StrCat(spec.name, " parameter"), absl::CHexEscape(key.substr(0, 40)),
                              "m, bits, k_m, k_bits, v_m, v_bits or scope");
        }
      }
      const auto found = spec.parameters.find("scope");
      const std::string scope = found == spec.parameters.end() ? "head" : found->second;
      if (scope != "head" && scope != "model") {
        return InvalidField("million scope", absl::CHexEscape(scope.substr(0, 40)), "head or model");
      }
      KV_RETURN_IF_ERROR(AddShapes(spec, head_dim, scope == "head" ? &plan.million : &plan.million_model));
    } else if (spec.name == "zack") {
      plan.zack = true;
    } else if (spec.name == "zack+hack" || spec.name == "default") {
      plan.zack = plan.zack_hack = true;
    } else if (spec.name == "zack+million") {
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
