#include "codecs/hack/hack_format.h"

#include <algorithm>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvmanager/base/status.h"

namespace kvmanager::hack {
namespace {

constexpr uint32_t kArrayAlignment = 16;
constexpr uint32_t kRecordAlignment = 64;
constexpr uint32_t kPlaneBytesPerBit = 128;  // of one segment and strip: 64 tokens * 16 channels / 8
constexpr std::array<const char*, 12> kKeys = {"k_axis",  "k_bits",   "v_bits", "meta", "part",     "k_range",
                                               "v_range", "rounding", "q",      "sums", "rotation", "v_norm"};

bool IsPowerOfTwo(int n) { return (n & (n - 1)) == 0; }

constexpr uint32_t AlignUp(uint32_t bytes, uint32_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

absl::Status ParameterError(absl::string_view key, absl::string_view value, absl::string_view bound) {
  return InvalidField(absl::StrCat("codec parameter ", key), value, bound);
}

/// Sets *out to the allowed value that parameters[key] names; leaves it where the key is absent.
template <typename T>
absl::Status ReadChoice(const CodecParameters& parameters, const char* key,
                        const std::vector<std::pair<std::string, T>>& allowed, T* out) {
  const auto found = parameters.find(key);
  if (found == parameters.end()) return absl::OkStatus();
  std::vector<std::string> names;
  for (const auto& [name, value] : allowed) {
    if (name == found->second) {
      *out = value;
      return absl::OkStatus();
    }
    names.push_back(name);
  }
  return ParameterError(key, absl::StrCat("\"", found->second, "\""),
                        absl::StrCat("one of ", absl::StrJoin(names, ", ")));
}

absl::Status CheckLayout(const PageLayout& layout) {
  if (layout.dtype != DType::kFloat16 && layout.dtype != DType::kBFloat16) {
    return InvalidField("dtype", int(layout.dtype), "float16 (0) or bfloat16 (1)");
  }
  if (layout.kv_heads < 1 || layout.kv_heads > PageLayout::kKvHeadsMax) {
    return InvalidField("kv_heads", layout.kv_heads, absl::StrCat("1..", PageLayout::kKvHeadsMax));
  }
  if (layout.head_dim < PageLayout::kHeadDimMin || layout.head_dim > PageLayout::kHeadDimMax ||
      layout.head_dim % kSegmentChannels != 0) {
    return InvalidField("head_dim", layout.head_dim,
                        absl::StrCat("a multiple of ", kSegmentChannels, " in ", PageLayout::kHeadDimMin, "..",
                                     PageLayout::kHeadDimMax));
  }
  if (layout.page_tokens < kStripTokens || layout.page_tokens > PageLayout::kPageTokensMax ||
      layout.page_tokens % kStripTokens != 0) {
    return InvalidField("page_tokens", layout.page_tokens,
                        absl::StrCat("a multiple of ", kStripTokens, " in ", kStripTokens, "..",
                                     PageLayout::kPageTokensMax, " for codec hack"));
  }
  return absl::OkStatus();
}

uint32_t SegmentBytes(uint8_t bits) { return kPlaneBytesPerBit * bits; }

/// Lays out one side from `offset` on; adds what it holds, without padding, to *payload_bytes.
SideLayout MakeSide(const PageLayout& layout, const HackParameters& parameters, int side,
                    const std::vector<uint8_t>* bits, uint32_t offset, uint32_t* payload_bytes) {
  SideLayout out;
  const bool along_tokens = side == 1 || parameters.k_axis == Axis::kChannel;
  const Range range = side == 0 ? parameters.k_range : parameters.v_range;
  out.segments = layout.head_dim / kSegmentChannels;
  KV_CHECK(bits == nullptr || int(bits->size()) == out.segments);
  for (int s = 0; s < out.segments; ++s) {
    const int width = bits ? (*bits)[s] : side == 0 ? parameters.k_bits : parameters.v_bits;
    KV_CHECK((width >= 0 && width <= 4) || width == 8);
    out.segment_bits[s] = uint8_t(width);
    out.segment_offset[s] = out.strip_bytes;
    out.segment_least_squares[s] = bits ? width == 1 : range == Range::kLeastSquares;
    out.strip_bytes += SegmentBytes(uint8_t(width));
    out.two_byte_q |= side == 0 && bits != nullptr && width == 8;
  }
  out.partition = parameters.partition;
  out.partitions = (along_tokens ? layout.page_tokens : layout.head_dim) / parameters.partition;
  out.meta_entries = along_tokens ? layout.head_dim : layout.page_tokens;

  uint32_t end = offset;
  const auto place = [&](uint32_t bytes) {
    const uint32_t at = AlignUp(end, kArrayAlignment);
    end = at + bytes;
    *payload_bytes += bytes;
    return at;
  };
  const uint32_t meta = uint32_t(out.partitions) * out.meta_entries;
  out.codes = place(out.strip_bytes * (layout.page_tokens / kStripTokens));
  const bool norms = side == 1 && parameters.v_norm;
  const uint32_t pair_bytes = parameters.meta_bits == 8 ? 4 * (along_tokens ? out.partitions : 1) : 0;
  if (pair_bytes > 0 || norms) out.tops = place(pair_bytes + (norms ? 2 : 0));
  if (norms) out.norm_top = out.tops + pair_bytes;
  out.steps = place(meta * parameters.meta_bits / 8);
  out.minima = place(meta * parameters.meta_bits / 8);
  if (side == 0 && parameters.sums) out.sums = place(2 * meta);
  if (norms) out.norms = place(layout.page_tokens);
  out.end = end;
  return out;
}

}  // namespace

absl::StatusOr<HackParameters> ParseHackParameters(const CodecParameters& parameters, const PageLayout& layout) {
  KV_RETURN_IF_ERROR(CheckLayout(layout));
  for (const auto& [key, value] : parameters) {
    if (std::find(kKeys.begin(), kKeys.end(), key) == kKeys.end()) {
      return InvalidField("codec hack parameter", absl::StrCat("\"", key, "\""),
                          absl::StrCat("one of ", absl::StrJoin(kKeys, ", ")));
    }
  }
  HackParameters p;
  const std::vector<std::pair<std::string, int>> widths = {{"1", 1}, {"2", 2}, {"3", 3}, {"4", 4}, {"8", 8}};
  const std::vector<std::pair<std::string, Range>> ranges = {{"minmax", Range::kMinMax},
                                                             {"least_squares", Range::kLeastSquares}};
  const std::vector<std::pair<std::string, bool>> flags = {{"0", false}, {"1", true}};
  KV_RETURN_IF_ERROR(
      ReadChoice(parameters, "k_axis", {{"channel", Axis::kChannel}, {"token", Axis::kToken}}, &p.k_axis));
  KV_RETURN_IF_ERROR(ReadChoice(parameters, "k_bits", widths, &p.k_bits));
  KV_RETURN_IF_ERROR(ReadChoice(parameters, "v_bits", widths, &p.v_bits));
  KV_RETURN_IF_ERROR(ReadChoice(parameters, "meta", {{"8", 8}, {"16", 16}}, &p.meta_bits));
  KV_RETURN_IF_ERROR(ReadChoice(parameters, "part", {{"32", 32}, {"64", 64}, {"128", 128}}, &p.partition));
  if (p.v_bits == 1) p.v_range = Range::kLeastSquares;
  KV_RETURN_IF_ERROR(ReadChoice(parameters, "k_range", ranges, &p.k_range));
  KV_RETURN_IF_ERROR(ReadChoice(parameters, "v_range", ranges, &p.v_range));
  KV_RETURN_IF_ERROR(ReadChoice(parameters, "rounding",
                                {{"nearest", Rounding::kNearest}, {"stochastic", Rounding::kStochastic}}, &p.rounding));
  KV_RETURN_IF_ERROR(ReadChoice(
      parameters, "q", {{"symmetric", QueryCode::kSymmetric}, {"asymmetric", QueryCode::kAsymmetric}}, &p.query));
  const bool asymmetric = p.query == QueryCode::kAsymmetric;
  p.sums = asymmetric;
  KV_RETURN_IF_ERROR(ReadChoice(parameters, "sums", flags, &p.sums));
  if (!IsPowerOfTwo(layout.head_dim)) p.rotation = Rotation::kNone;
  KV_RETURN_IF_ERROR(
      ReadChoice(parameters, "rotation", {{"hadamard", Rotation::kHadamard}, {"none", Rotation::kNone}}, &p.rotation));
  KV_RETURN_IF_ERROR(ReadChoice(parameters, "v_norm", flags, &p.v_norm));

  const bool token_axis = p.k_axis == Axis::kToken;
  if (layout.page_tokens % p.partition != 0) {
    return ParameterError(
        "part", absl::StrCat(p.partition),
        absl::StrCat("a divisor of page_tokens ", layout.page_tokens, ": a partition never crosses a page"));
  }
  if (token_axis && layout.head_dim % p.partition != 0) {
    return ParameterError("part", absl::StrCat(p.partition),
                          absl::StrCat("a divisor of head_dim ", layout.head_dim, " with k_axis=token"));
  }
  if (asymmetric && !token_axis) return ParameterError("q", "asymmetric", "symmetric unless k_axis=token");
  if (asymmetric && !p.sums) return ParameterError("sums", "0", "1 with q=asymmetric");
  if (p.sums && !token_axis) return ParameterError("sums", "1", "0 unless k_axis=token");
  if (p.rotation == Rotation::kHadamard && !IsPowerOfTwo(layout.head_dim)) {
    return ParameterError("rotation", "hadamard",
                          absl::StrCat("none unless head_dim is a power of two (it is ", layout.head_dim, ")"));
  }
  return p;
}

std::string HackSpec(const HackParameters& p) {
  const auto range = [](Range r) { return r == Range::kMinMax ? "minmax" : "least_squares"; };
  return absl::StrCat(
      "hack:k_axis=", p.k_axis == Axis::kChannel ? "channel" : "token", ",k_bits=", p.k_bits, ",v_bits=", p.v_bits,
      ",meta=", p.meta_bits, ",part=", p.partition, ",k_range=", range(p.k_range), ",v_range=", range(p.v_range),
      ",rounding=", p.rounding == Rounding::kNearest ? "nearest" : "stochastic",
      ",q=", p.query == QueryCode::kSymmetric ? "symmetric" : "asymmetric", ",sums=", p.sums ? 1 : 0,
      ",rotation=", p.rotation == Rotation::kHadamard ? "hadamard" : "none", ",v_norm=", p.v_norm ? 1 : 0);
}

HackFormat MakeHackFormat(const PageLayout& layout, const HackParameters& parameters, const SegmentBits* bits) {
  KV_CHECK(bits == nullptr || (bits->size() == layout.kv_heads && parameters.k_axis == Axis::kChannel));
  KV_CHECK(parameters.rotation == Rotation::kNone || IsPowerOfTwo(layout.head_dim));
  HackFormat format;
  format.layout = layout;
  format.parameters = parameters;
  format.heads.resize(layout.kv_heads);
  for (int h = 0; h < layout.kv_heads; ++h) {
    HeadLayout& head = format.heads[h];
    head.offset = format.page_bytes;
    uint32_t end = 0;
    for (int side = 0; side < 2; ++side) {
      head.side[side] =
          MakeSide(layout, parameters, side, bits ? &(*bits)[h][side] : nullptr, end, &format.payload_bytes);
      end = head.side[side].end;
    }
    format.page_bytes += AlignUp(end, kRecordAlignment);
  }
  return format;
}

}  // namespace kvmanager::hack
