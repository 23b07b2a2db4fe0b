#include "codecs/zack/zack_format.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "codecs/raw/raw_attention_kernel.h"
#include "kvmanager/base/status.h"

namespace kvmanager::zack {
namespace {

constexpr uint64_t kStepsMax = 1 << 16;
// Rates are stored in fp32, and one written with six digits means the step of that name.
constexpr double kRateRounding = 1e-6;

absl::Status CheckLayout(const PageLayout& layout) {
  if (layout.dtype != DType::kFloat16 && layout.dtype != DType::kBFloat16) {
    return InvalidField("dtype", int(layout.dtype), "float16 (0) or bfloat16 (1)");
  }
  if (layout.kv_heads < 1 || layout.kv_heads > PageLayout::kKvHeadsMax) {
    return InvalidField("kv_heads", layout.kv_heads, absl::StrCat("1..", PageLayout::kKvHeadsMax));
  }
  const auto check = [](absl::string_view field, int value, int min, int max) {
    if (value >= min && value <= max && value % 16 == 0) return absl::OkStatus();
    return InvalidField(field, value, absl::StrCat("a multiple of 16 in ", min, "..", max));
  };
  KV_RETURN_IF_ERROR(check("head_dim", layout.head_dim, PageLayout::kHeadDimMin, PageLayout::kHeadDimMax));
  return check("page_tokens", layout.page_tokens, PageLayout::kPageTokensMin, PageLayout::kPageTokensMax);
}

absl::Status ReadRate(const CodecParameters& parameters, double* rate) {
  const auto given = parameters.find("rate");
  if (given == parameters.end()) return absl::OkStatus();
  double value;
  if (!ParseDecimal(given->second, &value) || !(value >= 0 && value <= kRateMax)) {
    return InvalidField("codec parameter rate", absl::StrCat("\"", given->second, "\""),
                        absl::StrCat("a number in 0..", kRateMax));
  }
  // What the canonical spec says (StrCat writes six digits) is what holds.
  KV_CHECK(absl::SimpleAtod(absl::StrCat(value + 0.0), rate));
  return absl::OkStatus();
}

absl::Status ReadFold(const CodecParameters& parameters, bool* fold) {
  const auto given = parameters.find("fold");
  if (given == parameters.end()) return absl::OkStatus();
  if (given->second != "0" && given->second != "1") {
    return InvalidField("codec parameter fold", absl::StrCat("\"", given->second, "\""), "0 or 1");
  }
  *fold = given->second == "1";
  return absl::OkStatus();
}

/// F_p's ranks [layers][kv_heads][2] at the first step that removes at least `rate`.
absl::StatusOr<absl::Span<const int32_t>> ReadRanks(const CodecContext& context, const ZackParameters& parameters) {
  const Calibration& calibration = *context.calibration;
  const std::string rates_name = absl::StrCat("zack.", parameters.mode, ".rates");
  const std::string ranks_name = absl::StrCat("zack.", parameters.mode, ".ranks");
  const auto field = [&](absl::string_view name, size_t i) {
    return absl::StrCat("calibration ", calibration.source(), " tensor ", name, "[", i, "]");
  };
  const auto found = calibration.tensors().find(rates_name);
  const uint64_t steps =
      found != calibration.tensors().end() && found->second.shape.size() == 1 ? found->second.shape[0] : 1;
  if (steps < 1 || steps > kStepsMax) {
    return InvalidField(absl::StrCat("calibration ", calibration.source(), " tensor ", rates_name, " elements"), steps,
                        absl::StrCat("1..", kStepsMax));
  }
  KV_ASSIGN_OR_RETURN(const absl::Span<const float> rates, calibration.Floats(rates_name, {steps}, "zack"));
  const uint64_t shape[] = {steps, uint64_t(context.layers), context.layout.kv_heads, 2};
  KV_ASSIGN_OR_RETURN(const absl::Span<const int32_t> ranks,
                      calibration.Integers(ranks_name, shape, kRankStep, context.layout.head_dim, "zack"));
  for (size_t i = 0; i < steps; ++i) {
    if (rates[i] >= 0 && rates[i] < 1 && (i == 0 || rates[i] >= rates[i - 1])) continue;
    return InvalidField(field(rates_name, i), rates[i], "ascending in 0..1");
  }
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] % kRankStep == 0) continue;
    return InvalidField(field(ranks_name, i), ranks[i], absl::StrCat("a multiple of ", kRankStep));
  }
  const auto step =
      std::find_if(rates.begin(), rates.end(), [&](float rate) { return rate >= parameters.rate - kRateRounding; });
  if (step == rates.end()) {
    return InvalidField(
        "codec parameter rate", parameters.rate,
        absl::StrCat("at most ", rates.back(), ", the most that calibration ", calibration.source(), " has ranks for"));
  }
  const size_t ranks_per_step = ranks.size() / steps;
  return ranks.subspan((step - rates.begin()) * ranks_per_step, ranks_per_step);
}

ZackHead MakeHead(const PageLayout& layout, const Factors& factors, int layer, int head, const int32_t* ranks,
                  uint32_t* page_bytes) {
  const int d = layout.head_dim;
  ZackHead out;
  for (int side = 0; side < 2; ++side) {
    const int n = ranks[side];
    KV_CHECK(n >= kRankStep && n <= d && n % kRankStep == 0);
    out.rank[side] = n;
    out.offset[side] = *page_bytes;
    *page_bytes += uint32_t(n) * layout.page_tokens * 2;
    out.encode[side].resize(size_t(d) * n);
    out.decode[side].resize(size_t(d) * n);
    CopyColumns(factors.right_of(side, layer, head), d, d, n, out.encode[side].data());
    CopyColumnsTransposed(factors.left_of(side, layer, head), d, d, n, out.decode[side].data());
  }
  out.query.resize(size_t(d) * out.rank[0]);
  CopyColumns(factors.left_of(0, layer, head), d, d, out.rank[0], out.query.data());
  return out;
}

}  // namespace

ZackFormat LayOut(const PageLayout& layout, const ZackParameters& parameters, const Factors& factors,
                  absl::Span<const int32_t> ranks) {
  const size_t per_layer = size_t{layout.kv_heads} * 2;
  KV_CHECK(!ranks.empty() && ranks.size() % per_layer == 0);
  const int layers = int(ranks.size() / per_layer);
  ZackFormat format;
  format.layout = layout;
  format.parameters = parameters;
  format.spec =
      absl::StrCat("zack:mode=", parameters.mode, ",rate=", parameters.rate, ",fold=", parameters.fold ? 1 : 0);
  uint64_t total = 0, kept = 0;
  for (int layer = 0; layer < layers; ++layer) {
    uint32_t page_bytes = 0;
    int lead_lines = RawLeadLines(layout.page_tokens, layout.head_dim, layout.head_dim);
    for (int head = 0; head < layout.kv_heads; ++head) {
      const int32_t* rank = ranks.data() + layer * per_layer + size_t(head) * 2;
      format.heads.push_back(MakeHead(layout, factors, layer, head, rank, &page_bytes));
      lead_lines = std::min(lead_lines, RawLeadLines(layout.page_tokens, rank[0], rank[1]));
      kept += rank[0] + rank[1];
      format.rank_max = std::max({format.rank_max, int(rank[0]), int(rank[1])});
    }
    format.page_bytes.push_back(page_bytes);
    format.lead_lines.push_back(lead_lines);
    format.page_bytes_max = std::max(format.page_bytes_max, page_bytes);
    total += page_bytes;
  }
  format.payload_bytes = total / layers;
  format.removed = 1 - double(kept) / (double(ranks.size()) * layout.head_dim);
  return format;
}

absl::StatusOr<ZackFormat> MakeZackFormat(const CodecContext& context, const CodecParameters& parameters) {
  KV_RETURN_IF_ERROR(CheckLayout(context.layout));
  for (const auto& [key, value] : parameters) {
    if (key != "mode" && key != "rate" && key != "fold") {
      return InvalidField("codec zack parameter", absl::StrCat("\"", key, "\""),
                          "one of mode, rate, fold, calibration");
    }
  }
  ZackParameters p;
  KV_RETURN_IF_ERROR(ReadRate(parameters, &p.rate));
  KV_RETURN_IF_ERROR(ReadFold(parameters, &p.fold));
  if (context.calibration == nullptr) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "codec parameter calibration", "absent",
                      "given for zack: an artifact made by kvctl calibrate --codec zack");
  }
  KV_ASSIGN_OR_RETURN(p.mode, ReadMode(parameters, *context.calibration, "zack.mode"));
  KV_ASSIGN_OR_RETURN(const absl::Span<const int32_t> ranks, ReadRanks(context, p));
  KV_ASSIGN_OR_RETURN(const Factors factors, ReadFactors(context, p.mode));
  return LayOut(context.layout, p, factors, ranks);
}

}  // namespace kvmanager::zack
