#include "codecs/zack_hack/zack_hack.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "codecs/hack/hack_codec.h"
#include "codecs/zack_hack/rotated_codec.h"
#include "codecs/zack_hack/zack_hack_device_codec.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace zack_hack {
namespace {

constexpr int kSegment = hack::kSegmentChannels;
constexpr const char* kKeys[] = {"mode", "k_bits", "v_bits", "bytes", "allocation", "fold", "v_norm"};
constexpr const char* kBitKeys[2] = {"k_bits", "v_bits"};
constexpr double kDefaultBits[2] = {2, 1};
constexpr const char* kMadeBy = "zack+hack";
constexpr int kSides = 2;
/// Metadata of an artifact whose sensitivities were measured with the model.
constexpr char kSensitivityKey[] = "zack_hack.sensitivity";
constexpr absl::string_view kMeasured = "measured";
/// Energies are fp32 and weights of a sum in fp64: bounded so that no product of them overflows.
constexpr float kEnergyMax = 1e30f;

absl::Status ParameterError(absl::string_view key, absl::string_view value, absl::string_view bound) {
  return InvalidField(absl::StrCat("codec parameter ", key), value, bound);
}

/// What a record of a head has beside its codes: steps, minima, tops, norms and padding, in bytes of a token. Codes of
/// a segment are multiples of a record's alignment, so that they bring no padding of their own.
double OverheadBytes(const PageLayout& layout, const hack::HackParameters& codes) {
  PageLayout one = layout;
  one.kv_heads = 1;
  const std::vector<uint8_t> none(layout.head_dim / kSegment, 0);
  const hack::SegmentBits bits = {{none, none}};
  return double(hack::MakeHackFormat(one, codes, &bits).page_bytes) / layout.page_tokens;
}
/// Of hack's pages; widths and ranges are each segment's own.
hack::HackParameters CodeParameters(bool v_norm) {
  hack::HackParameters codes;
  codes.rotation = hack::Rotation::kNone;  // the factors rotate
  codes.v_norm = v_norm;
  return codes;
}
/// One bit for one segment: bytes of a token.
constexpr double kBitBytes = kSegment / 8.0;

/// A number as the canonical spec writes it.
double Written(double value) {
  double written = 0;
  KV_CHECK(absl::SimpleAtod(absl::StrCat(value + 0.0), &written));
  return written;
}

absl::Status ReadNumber(const std::string& text, absl::string_view key, double min, double max, double* out) {
  double value;
  if (!ParseDecimal(text, &value) || !(value >= min && value <= max)) {
    return ParameterError(key, absl::StrCat("\"", text, "\""), absl::StrCat("a number in ", min, "..", max));
  }
  *out = Written(value);
  return absl::OkStatus();
}

absl::Status ReadAllocation(absl::string_view field, absl::string_view value, Allocation* out) {
  if (value != "head" && value != "model") return InvalidField(field, absl::StrCat("\"", value, "\""), "head or model");
  *out = value == "model" ? Allocation::kModel : Allocation::kHead;
  return absl::OkStatus();
}

absl::Status ReadFlag(const CodecParameters& parameters, const char* key, bool* out) {
  const auto given = parameters.find(key);
  if (given == parameters.end()) return absl::OkStatus();
  if (given->second != "0" && given->second != "1") {
    return ParameterError(key, absl::StrCat("\"", given->second, "\""), "0 or 1");
  }
  *out = given->second == "1";
  return absl::OkStatus();
}

std::string Spec(const ZackHackParameters& p) {
  const std::string budget =
      std::isnan(p.bytes) ? absl::StrCat("k_bits=", p.bits[0], ",v_bits=", p.bits[1]) : absl::StrCat("bytes=", p.bytes);
  return absl::StrCat("zack+hack:mode=", p.mode, ",", budget,
                      ",allocation=", p.allocation == Allocation::kModel ? "model" : "head", ",fold=", p.fold ? 1 : 0,
                      ",v_norm=", p.v_norm ? 1 : 0);
}

std::string TensorName(absl::string_view mode, absl::string_view which) {
  return absl::StrCat("zack_hack.", mode, ".", which);
}

absl::Status TensorError(const CodecContext& context, absl::string_view name, size_t index, double value,
                         absl::string_view bound) {
  return InvalidField(absl::StrCat("calibration ", context.calibration->source(), " tensor ", name, "[", index, "]"),
                      value, bound);
}

/// Elements in 0..kEnergyMax.
absl::StatusOr<absl::Span<const float>> ReadPositive(const CodecContext& context, const std::string& name,
                                                     absl::Span<const uint64_t> shape) {
  KV_ASSIGN_OR_RETURN(const absl::Span<const float> elements, context.calibration->Floats(name, shape, kMadeBy));
  for (size_t i = 0; i < elements.size(); ++i) {
    if (elements[i] >= 0 && elements[i] <= kEnergyMax) continue;
    return TensorError(context, name, i, elements[i], absl::StrCat("in 0..", kEnergyMax));
  }
  return elements;
}

/// [layers][kv_heads][side][head_dim], each head's and side's a permutation.
absl::StatusOr<absl::Span<const int32_t>> ReadOrder(const CodecContext& context, absl::string_view mode) {
  const uint64_t d = context.layout.head_dim;
  const std::string name = TensorName(mode, "order");
  const uint64_t shape[] = {uint64_t(context.layers), context.layout.kv_heads, kSides, d};
  KV_ASSIGN_OR_RETURN(const absl::Span<const int32_t> order,
                      context.calibration->Integers(name, shape, 0, int32_t(d) - 1, kMadeBy));
  for (size_t first = 0; first < order.size(); first += d) {
    std::vector<bool> seen(d, false);
    for (size_t i = first; i < first + d; ++i) {
      if (seen[order[i]]) return TensorError(context, name, i, order[i], "of a permutation: it is there twice");
      seen[order[i]] = true;
    }
  }
  return order;
}

/// V's factors where the artifact has some of zack+hack's own, which lose less in codes than ZACK's.
absl::Status ReadOwnBasis(const CodecContext& context, absl::string_view mode, zack::Factors* factors) {
  const uint64_t d = context.layout.head_dim;
  const uint64_t shape[] = {uint64_t(context.layers), context.layout.kv_heads, d, d};
  if (!context.calibration->Has(TensorName(mode, "vw.right"))) return absl::OkStatus();
  for (auto [which, factor] : {std::pair("vw.left", &factors->left[1]), std::pair("vw.right", &factors->right[1])}) {
    const std::string name = TensorName(mode, which);
    KV_ASSIGN_OR_RETURN(*factor, context.calibration->Floats(name, shape, kMadeBy));
    for (size_t i = 0; i < factor->size(); ++i) {
      if (!(std::fabs((*factor)[i]) <= zack::kFactorMax)) {
        return TensorError(context, name, i, (*factor)[i], absl::StrCat("at most ", zack::kFactorMax, " in magnitude"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ZackHackParameters> ParseParameters(const CodecContext& context, const CodecParameters& parameters) {
  if (context.calibration == nullptr) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "codec parameter calibration", "absent",
                      "an artifact made by kvctl calibrate --codec zack+hack");
  }
  for (const auto& [key, value] : parameters) {
    if (std::find(std::begin(kKeys), std::end(kKeys), key) == std::end(kKeys)) {
      return InvalidField("codec zack+hack parameter", absl::StrCat("\"", key, "\""),
                          absl::StrCat("one of ", absl::StrJoin(kKeys, ", "), ", calibration"));
    }
  }
  // HACK's limits on pages.
  KV_RETURN_IF_ERROR(hack::ParseHackParameters({}, context.layout).status());
  ZackHackParameters p;
  p.bytes = DefaultBytes(context.layout);
  KV_RETURN_IF_ERROR(ReadFlag(parameters, "v_norm", &p.v_norm));
  KV_ASSIGN_OR_RETURN(p.mode, zack::ReadMode(parameters, *context.calibration, "zack_hack.mode"));
  for (int side = 0; side < kSides; ++side) {
    const auto given = parameters.find(kBitKeys[side]);
    if (given == parameters.end()) continue;
    if (parameters.count("bytes") != 0) {
      return ParameterError("bytes", parameters.at("bytes"), absl::StrCat("absent beside ", kBitKeys[side]));
    }
    if (!std::isnan(p.bytes)) std::copy_n(kDefaultBits, kSides, p.bits);
    p.bytes = std::nan("");
    KV_RETURN_IF_ERROR(ReadNumber(given->second, kBitKeys[side], 0, kWidthMax, &p.bits[side]));
  }
  if (const auto given = parameters.find("bytes"); given != parameters.end() || !std::isnan(p.bytes)) {
    // Rounded up to eighths: a short number, which a message says in full.
    const double min = std::ceil(8 * OverheadBytes(context.layout, CodeParameters(p.v_norm))) / 8;
    const double max = min + double(kSides) * kWidthMax * context.layout.head_dim / 8;
    const std::string text = given != parameters.end() ? given->second : absl::StrCat(p.bytes);
    KV_RETURN_IF_ERROR(ReadNumber(text, "bytes", min, max, &p.bytes));
  }
  const TensorMetadata& metadata = context.calibration->metadata();
  if (const auto given = parameters.find("allocation"); given != parameters.end()) {
    KV_RETURN_IF_ERROR(ReadAllocation("codec parameter allocation", given->second, &p.allocation));
  } else if (const auto trained = metadata.find("zack_hack.allocation"); trained != metadata.end()) {
    KV_RETURN_IF_ERROR(
        ReadAllocation(absl::StrCat("calibration ", context.calibration->source(), " metadata zack_hack.allocation"),
                       trained->second, &p.allocation));
  }
  KV_RETURN_IF_ERROR(ReadFlag(parameters, "fold", &p.fold));
  return p;
}

absl::StatusOr<SegmentEnergies> ReadEnergies(const CodecContext& context, absl::string_view mode, bool sensitivity) {
  const uint64_t layers = context.layers, heads = context.layout.kv_heads, d = context.layout.head_dim;
  KV_ASSIGN_OR_RETURN(const absl::Span<const float> channels,
                      ReadPositive(context, TensorName(mode, "energy"), {layers, heads, kSides, d}));
  SegmentEnergies out;
  out.layers = context.layers;
  out.kv_heads = context.layout.kv_heads;
  out.segments = int(d) / kSegment;
  if (!context.served_layers.empty()) {
    out.served.assign(context.layers, false);
    for (const int layer : context.served_layers) {
      KV_CHECK(layer >= 0 && layer < context.layers);
      out.served[layer] = true;
    }
  }
  for (size_t i = 0; i < channels.size(); i += kSegment) {
    double sum = 0;
    for (int c = 0; c < kSegment; ++c) sum += channels[i + c];
    out.energy.push_back(sum);
  }
  out.sensitivity.assign(layers * heads * kSides, 1.0);
  if (!sensitivity) return out;
  KV_ASSIGN_OR_RETURN(const absl::Span<const float> weights,
                      ReadPositive(context, TensorName(mode, "sensitivity"), {layers, heads, kSides}));
  // Without a model to measure with they are left at 1. Older artifacts do not say whether they were measured.
  const bool alike = std::all_of(weights.begin(), weights.end(), [&](float weight) { return weight == weights[0]; });
  const TensorMetadata& metadata = context.calibration->metadata();
  const auto said = metadata.find(kSensitivityKey);
  if (alike && (said == metadata.end() || said->second != kMeasured)) {
    return FieldError(
        absl::StatusCode::kFailedPrecondition, "codec parameter allocation", "model",
        absl::StrCat("head: the sensitivities of calibration ", context.calibration->source(),
                     " were not measured; python -m kvmanager.calibrate measures them, and kvctl calibrate "
                     "--model if the text goes on behind what it trains on"));
  }
  std::copy(weights.begin(), weights.end(), out.sensitivity.begin());
  return out;
}

LayerWidths MakeWidths(const ZackHackParameters& parameters, const PageLayout& layout,
                       const SegmentEnergies& energies) {
  const int segments = energies.segments;
  const bool model = parameters.allocation == Allocation::kModel;
  const double heads = model ? double(energies.served_layers()) * energies.kv_heads : 1;
  if (std::isnan(parameters.bytes)) {
    // nearbyint: ties to even.
    const std::array<int64_t, 2> bits = {int64_t(std::nearbyint(parameters.bits[0] * segments * heads)),
                                         int64_t(std::nearbyint(parameters.bits[1] * segments * heads))};
    return model ? AllocatePerSide(energies, bits) : AllocatePerHead(energies, bits);
  }
  const double codes = parameters.bytes - OverheadBytes(layout, CodeParameters(parameters.v_norm));
  const int64_t bits =
      std::min(int64_t(std::floor(codes * heads / kBitBytes)), int64_t(kSides * kWidthMax * segments * heads));
  if (model) return AllocateAcrossModel(energies, bits);
  const int64_t k = BitsOfK(bits, segments);
  return AllocatePerHead(energies, {k, bits - k});
}

absl::StatusOr<std::unique_ptr<Codec>> MakeCodec(const CodecContext& context, const ZackHackParameters& parameters,
                                                 const LayerWidths& widths, Isa isa) {
  KV_ASSIGN_OR_RETURN(zack::Factors factors, zack::ReadFactors(context, parameters.mode));
  KV_RETURN_IF_ERROR(ReadOwnBasis(context, parameters.mode, &factors));
  KV_ASSIGN_OR_RETURN(const absl::Span<const int32_t> order, ReadOrder(context, parameters.mode));
  zack::RotatedCodecOptions options;
  options.name = "zack+hack";
  options.spec = Spec(parameters);
  options.version = kFormatVersion;
  options.layout = context.layout;
  // Factors and their order are the artifact's, whatever the budget is.
  options.space = absl::StrCat("zack+hack ", parameters.mode, " ", context.calibration->digest());
  options.fold = parameters.fold;
  options.calibration = context.calibration;
  options.isa = isa;
  options.new_device_codec = MakeZackHackDeviceCodec;
  PageLayout rotated = context.layout;
  rotated.dtype = DType::kFloat16;
  const hack::HackParameters codes = CodeParameters(parameters.v_norm);
  std::vector<zack::HeadRotation> heads;
  std::vector<std::shared_ptr<const Codec>> inner;
  for (int layer = 0; layer < context.layers; ++layer) {
    for (int head = 0; head < context.layout.kv_heads; ++head) {
      const size_t at = (size_t(layer) * context.layout.kv_heads + head) * kSides * context.layout.head_dim;
      heads.push_back(zack::MakeHeadRotation(factors, layer, head, order.data() + at));
    }
    inner.push_back(std::make_shared<hack::HackCodec>(hack::MakeHackFormat(rotated, codes, &widths[layer]),
                                                      hack::HackKernelsFor(isa)));
  }
  return std::make_unique<zack::RotatedCodec>(std::move(options), std::move(heads), std::move(inner));
}

absl::StatusOr<std::unique_ptr<Codec>> MakeCodec(const CodecContext& context, const CodecParameters& parameters,
                                                 Isa isa) {
  KV_ASSIGN_OR_RETURN(const ZackHackParameters checked, ParseParameters(context, parameters));
  KV_ASSIGN_OR_RETURN(const SegmentEnergies energies,
                      ReadEnergies(context, checked.mode, checked.allocation == Allocation::kModel));
  return MakeCodec(context, checked, MakeWidths(checked, context.layout, energies), isa);
}

}  // namespace zack_hack

void RegisterZackHack(CodecRegistry& registry) {
  registry.Register(
      "zack+hack",
      "rotated K and V in codes of 0 to 4 bits, or 8 where K stands out (calibration=NAME, mode=joint|balanced, bytes= "
      "or k_bits= and v_bits=, allocation=head|model, fold=0|1)",
      [](const CodecContext& context, const CodecParameters& parameters) -> absl::StatusOr<std::unique_ptr<Codec>> {
        return zack_hack::MakeCodec(context, parameters);
      });
}

}  // namespace kvmanager
