#include "codecs/zack_million/zack_million.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "codecs/million/million.h"
#include "codecs/zack/factors.h"
#include "codecs/zack_hack/rotated_codec.h"
#include "codecs/zack_million/zack_million_device_codec.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr uint32_t kFormatVersion = 1;  // of the spec and of rotated pages; the pages' own format is million's
constexpr const char* kKeys[] = {"mode", "fold", "m", "bits", "k_m", "k_bits", "v_m", "v_bits", "scope"};

absl::StatusOr<std::unique_ptr<Codec>> MakeZackMillion(const CodecContext& context, const CodecParameters& parameters) {
  for (const auto& [key, value] : parameters) {
    if (std::find(std::begin(kKeys), std::end(kKeys), key) == std::end(kKeys)) {
      return InvalidField("codec zack+million parameter", absl::StrCat("\"", key, "\""),
                          absl::StrCat("one of ", absl::StrJoin(kKeys, ", "), ", calibration"));
    }
  }
  if (context.calibration == nullptr) {
    return FieldError(absl::StatusCode::kFailedPrecondition, "codec parameter calibration", "absent",
                      "an artifact made by kvctl calibrate --codec zack+million:...");
  }
  bool fold = false;
  CodecParameters codes = parameters;
  codes.erase("mode");
  codes.erase("fold");
  if (const auto given = parameters.find("fold"); given != parameters.end()) {
    if (given->second != "0" && given->second != "1") {
      return InvalidField("codec parameter fold", absl::StrCat("\"", given->second, "\""), "0 or 1");
    }
    fold = given->second == "1";
  }
  KV_ASSIGN_OR_RETURN(const std::string mode, zack::ReadMode(parameters, *context.calibration, "zack.mode"));
  PageLayout rotated = context.layout;
  rotated.dtype = DType::kFloat16;
  KV_ASSIGN_OR_RETURN(const million::MillionParameters checked, million::ParseMillionParameters(codes, rotated));
  if (checked.whole_model) {
    return InvalidField("codec parameter scope", "model", "head: each head is rotated by itself");
  }
  const std::string inner_spec = million::MillionSpec(checked);
  zack::RotatedCodecOptions options;
  options.name = "zack+million";
  options.spec = absl::StrCat("zack+million:mode=", mode, ",fold=", fold ? 1 : 0, ",",
                              std::string(absl::StripPrefix(inner_spec, "million:")));
  options.version = kFormatVersion;
  options.layout = context.layout;
  options.fold = fold;
  options.calibration = context.calibration;
  options.new_device_codec = MakeZackMillionDeviceCodec;
  const million::MillionFormat format = million::MakeMillionFormat(rotated, checked);
  KV_ASSIGN_OR_RETURN(const million::MillionCodebooks codebooks,
                      million::CodebooksOf(*context.calibration, absl::StrCat("zack_million.", mode), format,
                                           absl::StrCat("zack+", inner_spec)));
  KV_ASSIGN_OR_RETURN(const zack::Factors factors, zack::ReadFactors(context, mode));
  std::vector<zack::HeadRotation> heads;
  for (int layer = 0; layer < context.layers; ++layer) {
    for (int head = 0; head < context.layout.kv_heads; ++head) {
      heads.push_back(zack::MakeHeadRotation(factors, layer, head, nullptr));
    }
  }
  const std::shared_ptr<const Codec> inner = MakeMillionCodec(format, codebooks, inner_spec);
  return std::make_unique<zack::RotatedCodec>(std::move(options), std::move(heads),
                                              std::vector<std::shared_ptr<const Codec>>(context.layers, inner));
}

}  // namespace

void RegisterZackMillion(CodecRegistry& registry) {
  registry.Register("zack+million",
                    "product quantisation of rotated K and V (mode, fold, m, bits, k_m, k_bits, v_m, v_bits, "
                    "calibration)",
                    MakeZackMillion);
}

}  // namespace kvmanager
