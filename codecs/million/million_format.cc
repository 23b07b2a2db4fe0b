#include "codecs/million/million_format.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvmanager/base/status.h"

namespace kvmanager::million {
namespace {

constexpr uint32_t kAlignment = 64;
constexpr const char* kKeys[] = {"m", "bits", "k_m", "k_bits", "v_m", "v_bits", "scope"};

bool HasPlane(const SideLayout& side, int i) { return (side.bits & kPlaneBits[i]) != 0; }
constexpr uint32_t AlignUp(uint32_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

absl::Status CheckLayout(const PageLayout& layout) {
  if (layout.dtype != DType::kFloat16 && layout.dtype != DType::kBFloat16) {
    return InvalidField("dtype", int(layout.dtype), "float16 (0) or bfloat16 (1)");
  }
  if (layout.kv_heads < 1 || layout.kv_heads > PageLayout::kKvHeadsMax) {
    return InvalidField("kv_heads", layout.kv_heads, absl::StrCat("1..", PageLayout::kKvHeadsMax));
  }
  if (layout.head_dim < PageLayout::kHeadDimMin || layout.head_dim > PageLayout::kHeadDimMax ||
      layout.head_dim % 16 != 0) {
    return InvalidField("head_dim", layout.head_dim,
                        absl::StrCat("a multiple of 16 in ", PageLayout::kHeadDimMin, "..", PageLayout::kHeadDimMax));
  }
  if (layout.page_tokens < kStripTokens || layout.page_tokens > PageLayout::kPageTokensMax ||
      layout.page_tokens % kStripTokens != 0) {
    return InvalidField("page_tokens", layout.page_tokens,
                        absl::StrCat("a multiple of ", kStripTokens, " in ", kStripTokens, "..",
                                     PageLayout::kPageTokensMax, " for codec million"));
  }
  return absl::OkStatus();
}

/// Sets *out to the number under `key`, if it is there.
absl::Status ReadNumber(const CodecParameters& parameters, const std::string& key, int min, int max, int divides,
                        int* out) {
  const auto found = parameters.find(key);
  if (found == parameters.end()) return absl::OkStatus();
  int value = 0;
  if (!ParseDecimal(found->second, &value) || value < min || value > max || (divides > 0 && divides % value != 0)) {
    const std::string divisor = divides > 0 ? absl::StrCat(", a divisor of head_dim ", divides) : "";
    return InvalidField(absl::StrCat("codec parameter ", key), absl::StrCat("\"", found->second, "\""),
                        absl::StrCat(min, "..", max, divisor));
  }
  *out = value;
  return absl::OkStatus();
}

SideLayout MakeSide(const PageLayout& layout, const SideParameters& parameters, uint32_t offset) {
  SideLayout side;
  side.subspaces = parameters.m;
  side.width = layout.head_dim / parameters.m;
  side.bits = parameters.bits;
  side.centroids = 1 << parameters.bits;
  side.offset = offset;
  for (int i = 0; i < kPlanes; ++i) {
    if (!HasPlane(side, i)) continue;
    side.plane[i] = side.strip_bytes;
    side.strip_bytes += uint32_t(8 * kPlaneBits[i] * side.subspaces);
  }
  side.end = offset + side.strip_bytes * uint32_t(layout.page_tokens / kStripTokens);
  return side;
}

}  // namespace

absl::StatusOr<MillionParameters> ParseMillionParameters(const CodecParameters& parameters, const PageLayout& layout) {
  KV_RETURN_IF_ERROR(CheckLayout(layout));
  for (const auto& [key, value] : parameters) {
    if (std::find(std::begin(kKeys), std::end(kKeys), key) == std::end(kKeys)) {
      return InvalidField("codec million parameter", absl::StrCat("\"", key, "\""),
                          absl::StrCat("one of ", absl::StrJoin(kKeys, ", "), ", calibration"));
    }
  }
  const int d = layout.head_dim;
  SideParameters both;
  both.m = DefaultSubspaces(d);
  KV_RETURN_IF_ERROR(ReadNumber(parameters, "m", 1, d, d, &both.m));
  KV_RETURN_IF_ERROR(ReadNumber(parameters, "bits", kBitsMin, kBitsMax, 0, &both.bits));
  MillionParameters p;
  for (int side = 0; side < 2; ++side) {
    const std::string prefix = side == kSideK ? "k_" : "v_";
    p.side[side] = both;
    KV_RETURN_IF_ERROR(ReadNumber(parameters, prefix + "m", 1, d, d, &p.side[side].m));
    KV_RETURN_IF_ERROR(ReadNumber(parameters, prefix + "bits", kBitsMin, kBitsMax, 0, &p.side[side].bits));
  }
  if (const auto scope = parameters.find("scope"); scope != parameters.end()) {
    if (scope->second != "head" && scope->second != "model") {
      return InvalidField("codec parameter scope", absl::StrCat("\"", scope->second, "\""), "head or model");
    }
    p.whole_model = scope->second == "model";
  }
  return p;
}

std::string MillionSpec(const MillionParameters& p) {
  return absl::StrCat("million:k_m=", p.side[kSideK].m, ",k_bits=", p.side[kSideK].bits, ",v_m=", p.side[kSideV].m,
                      ",v_bits=", p.side[kSideV].bits, ",scope=", p.whole_model ? "model" : "head");
}

MillionFormat MakeMillionFormat(const PageLayout& layout, const MillionParameters& parameters) {
  KV_CHECK(layout.page_tokens % kStripTokens == 0);
  MillionFormat format;
  format.layout = layout;
  format.parameters = parameters;
  for (int side = 0; side < 2; ++side) {
    const SideParameters& p = parameters.side[side];
    KV_CHECK(p.m >= 1 && layout.head_dim % p.m == 0 && p.bits >= kBitsMin && p.bits <= kBitsMax);
    format.side[side] = MakeSide(layout, p, format.record_bytes);
    format.payload_bytes += format.side[side].end - format.side[side].offset;
    format.record_bytes = AlignUp(format.side[side].end);
  }
  format.payload_bytes *= layout.kv_heads;
  format.page_bytes = format.record_bytes * layout.kv_heads;
  return format;
}

int IndexAt(const SideLayout& side, const uint8_t* strip, int subspace, int token) {
  int index = 0, low = 0;
  for (int i = 0; i < kPlanes; ++i) {
    if (!HasPlane(side, i)) continue;
    const int b = kPlaneBits[i];
    const uint8_t* at = strip + side.plane[i] + subspace * 8 * b;
    const int byte = b == 1 ? token / 8 : token % (8 * b), shift = b == 1 ? token % 8 : token / (8 * b) * b;
    index |= (at[byte] >> shift & ((1 << b) - 1)) << low;
    low += b;
  }
  return index;
}

void PutIndex(const SideLayout& side, uint8_t* strip, int subspace, int token, int index) {
  for (int i = 0; i < kPlanes; ++i) {
    if (!HasPlane(side, i)) continue;
    const int b = kPlaneBits[i];
    uint8_t* at = strip + side.plane[i] + subspace * 8 * b;
    const int byte = b == 1 ? token / 8 : token % (8 * b), shift = b == 1 ? token % 8 : token / (8 * b) * b;
    at[byte] |= uint8_t((index & ((1 << b) - 1)) << shift);
    index >>= b;
  }
}

void UnpackIndices(const SideLayout& side, const uint8_t* strip, int subspace, uint16_t* indices) {
  std::fill_n(indices, kStripTokens, 0);
  int low = 0;
  for (int i = 0; i < kPlanes; ++i) {
    if (!HasPlane(side, i)) continue;
    const int b = kPlaneBits[i], bytes = 8 * b, mask = (1 << b) - 1;
    const uint8_t* at = strip + side.plane[i] + subspace * bytes;
    if (b == 1) {
      for (int t = 0; t < kStripTokens; ++t) indices[t] |= uint16_t((at[t / 8] >> t % 8 & 1) << low);
    } else {
      for (int part = 0; part < 8 / b; ++part) {
        for (int t = 0; t < bytes; ++t) indices[part * bytes + t] |= uint16_t((at[t] >> part * b & mask) << low);
      }
    }
    low += b;
  }
}

void PackIndices(const SideLayout& side, const uint16_t* indices, int subspace, uint8_t* strip) {
  int low = 0;
  for (int i = 0; i < kPlanes; ++i) {
    if (!HasPlane(side, i)) continue;
    const int b = kPlaneBits[i], bytes = 8 * b, mask = (1 << b) - 1;
    uint8_t* at = strip + side.plane[i] + subspace * bytes;
    std::memset(at, 0, bytes);
    if (b == 1) {
      for (int t = 0; t < kStripTokens; ++t) at[t / 8] |= uint8_t((indices[t] >> low & 1) << t % 8);
    } else {
      for (int part = 0; part < 8 / b; ++part) {
        for (int t = 0; t < bytes; ++t) at[t] |= uint8_t((indices[part * bytes + t] >> low & mask) << part * b);
      }
    }
    low += b;
  }
}

}  // namespace kvmanager::million
