#include "codecs/pq/pq_parameters.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "codecs/pq/pq_kernels.h"
#include "codecs/registry.h"
#include "kvmanager/base/status.h"

namespace kvmanager::pq {
namespace {

std::string NameOf(absl::string_view key) { return absl::StrCat("codec parameter ", key); }

absl::Status ReadNumber(absl::string_view key, const std::string& text, uint32_t min, uint32_t max, uint32_t* out) {
  int value;
  if (!ParseDecimal(text, &value) || value < 0 || uint32_t(value) < min || uint32_t(value) > max) {
    return InvalidField(NameOf(key), text, absl::StrCat(min, "..", max));
  }
  *out = uint32_t(value);
  return absl::OkStatus();
}

/// A decimal in (0, 1] with at most six digits behind the point, exactly.
bool ReadMillionths(absl::string_view text, uint32_t* out) {
  const size_t point = text.find('.');
  const absl::string_view whole = text.substr(0, point);
  const absl::string_view rest = point == absl::string_view::npos ? "" : text.substr(point + 1);
  if (whole.size() != 1 || rest.size() > 6 || (whole != "0" && whole != "1")) return false;
  uint32_t value = whole[0] - '0';
  for (size_t i = 0; i < 6; ++i) {
    if (i < rest.size() && (rest[i] < '0' || rest[i] > '9')) return false;
    value = value * 10 + (i < rest.size() ? rest[i] - '0' : 0);
  }
  *out = value;
  return value >= 1 && value <= Parameters::kMillion;
}

std::string MillionthsText(uint32_t value) {
  if (value == Parameters::kMillion) return "1";
  std::string digits = absl::StrCat(Parameters::kMillion + value).substr(1);
  digits.erase(digits.find_last_not_of('0') + 1);
  return absl::StrCat("0.", digits);
}

}  // namespace

std::string Parameters::Spec() const {
  return absl::StrCat("pq:m=", m, ",bits=", bits, ",ratio=", MillionthsText(ratio_millionths), ",sinks=", sinks,
                      ",scores=", scores == Scores::kCodes ? "codes" : "exact",
                      ",iterations=", iterations == 0 ? "auto" : absl::StrCat(iterations), ",rebuild=", rebuild,
                      ",cache_blocks=", cache_blocks,
                      ",cache_policy=", cache_policy == CachePolicy::kLfu ? "lfu" : "lru");
}

uint64_t Parameters::Budget(uint64_t position) const {
  const uint64_t beyond = position + 1 > sinks ? position + 1 - sinks : 0;
  return std::max<uint64_t>(beyond * ratio_millionths / (2 * uint64_t{kMillion}), 1);
}

Parameters::Reads Parameters::ReadsOf(uint64_t position) const {
  const uint64_t context = position + 1, budget = Budget(position);
  Reads reads;
  reads.sinks = std::min<uint64_t>(sinks, context);
  reads.local_begin = std::max(context - std::min(budget, context), reads.sinks);
  reads.chosen = std::min(budget, reads.local_begin - reads.sinks);
  return reads;
}

uint64_t Parameters::FirstPosition(uint64_t prompt_tokens) const {
  return std::max<uint64_t>(prompt_tokens, centroids());
}

uint64_t Parameters::TrainedTokens(uint64_t prompt_tokens, uint64_t position) const {
  const uint64_t first = FirstPosition(prompt_tokens);
  return rebuild == 0 ? first : first + (position - first) / rebuild * rebuild;
}

absl::StatusOr<Parameters> ParseParameters(const PageLayout& layout, const CodecParameters& parameters) {
  Parameters p;
  for (const auto& [key, value] : parameters) {
    uint32_t number = 0;
    if (key == "m") {
      KV_RETURN_IF_ERROR(ReadNumber(key, value, 1, Parameters::kSubspacesMax, &number));
      p.m = int(number);
    } else if (key == "bits") {
      KV_RETURN_IF_ERROR(ReadNumber(key, value, kBitsMin, kBitsMax, &number));
      p.bits = int(number);
    } else if (key == "ratio") {
      if (!ReadMillionths(value, &p.ratio_millionths)) {
        return InvalidField(NameOf(key), value, "above 0, at most 1, with at most six decimals");
      }
    } else if (key == "sinks") {
      KV_RETURN_IF_ERROR(ReadNumber(key, value, 0, Parameters::kSinksMax, &p.sinks));
    } else if (key == "scores") {
      if (value != "codes" && value != "exact") return InvalidField(NameOf(key), value, "codes or exact");
      p.scores = value == "codes" ? Parameters::Scores::kCodes : Parameters::Scores::kExact;
    } else if (key == "iterations") {
      p.iterations = 0;
      if (value != "auto") KV_RETURN_IF_ERROR(ReadNumber(key, value, 1, Parameters::kIterationsMax, &p.iterations));
    } else if (key == "rebuild") {
      KV_RETURN_IF_ERROR(ReadNumber(key, value, 0, INT32_MAX, &p.rebuild));
      if (p.rebuild != 0 && p.rebuild < Parameters::kRebuildMin) {
        return InvalidField(NameOf(key), value, absl::StrCat("0 (never), or at least ", Parameters::kRebuildMin));
      }
    } else if (key == "cache_blocks") {
      KV_RETURN_IF_ERROR(ReadNumber(key, value, 0, Parameters::kCacheBlocksMax, &p.cache_blocks));
    } else if (key == "cache_policy") {
      if (value != "lfu" && value != "lru") return InvalidField(NameOf(key), value, "lfu or lru");
      p.cache_policy = value == "lfu" ? Parameters::CachePolicy::kLfu : Parameters::CachePolicy::kLru;
    } else {
      return InvalidField("codec pq parameter", absl::StrCat("\"", key, "\""),
                          "one of m, bits, ratio, sinks, scores, iterations, rebuild, cache_blocks, cache_policy");
    }
  }
  if (layout.head_dim % p.m != 0) {
    return InvalidField(NameOf("m"), p.m, absl::StrCat("a divisor of head_dim ", layout.head_dim));
  }
  return p;
}

}  // namespace kvmanager::pq
