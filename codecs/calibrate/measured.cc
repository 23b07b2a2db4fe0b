#include "codecs/calibrate/measured.h"

#include <cmath>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "codecs/calibrate/plan.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager::calibrate {
namespace {

constexpr char kWanted[] = "zack_hack.joint.sensitivity or zack_hack.balanced.sensitivity";
constexpr size_t kTextBytesMax = 4096;

std::string Short(absl::string_view text) { return absl::CHexEscape(text.substr(0, 80)); }

absl::Status CheckTensor(const Calibration& artifact, const std::string& name, const Tensor& tensor) {
  bool known = false;
  for (ZackMode mode : kZackModes) known |= name == ZackName("zack_hack", mode, "sensitivity");
  if (!known) return InvalidField("measured tensor", Short(name), kWanted);
  const auto replaced = artifact.tensors().find(name);
  if (replaced == artifact.tensors().end()) {
    return InvalidField("measured tensor", name, "one of the artifact: train it with --codec zack+hack");
  }
  if (tensor.dtype != "F32" || tensor.shape != replaced->second.shape) {
    return InvalidField(absl::StrCat("measured tensor ", name),
                        absl::StrCat(Short(tensor.dtype), " [", absl::StrJoin(tensor.shape, ","), "]"),
                        absl::StrCat("F32 [", absl::StrJoin(replaced->second.shape, ","), "]"));
  }
  for (size_t i = 0; i < tensor.bytes.size() / sizeof(float); ++i) {
    const float value = LoadElement(tensor.bytes.data(), DType::kFloat32, i);
    if (!(value >= 0) || !std::isfinite(value)) {
      return InvalidField(absl::StrCat("measured tensor ", name, "[", i, "]"), value, "finite, not negative");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckMetadata(const Calibration& artifact, const std::string& key, const std::string& value) {
  const std::string field = absl::StrCat("measured metadata ", Short(key));
  const auto one_of = [&](absl::string_view a, absl::string_view b) -> absl::Status {
    if (artifact.metadata().count(key) == 0) return InvalidField(field, Short(value), "one of the artifact's keys");
    if (value != a && value != b) return InvalidField(field, Short(value), absl::StrCat(a, " or ", b));
    return absl::OkStatus();
  };
  if (key == "zack.mode" || key == "zack_hack.mode") {
    return one_of(Name(ZackMode::kJoint), Name(ZackMode::kBalanced));
  }
  if (key == "zack_hack.allocation") return one_of("head", "model");
  if (!absl::StartsWith(key, "measured.")) {
    return InvalidField(field, Short(value), "absent: zack.mode, zack_hack.mode, zack_hack.allocation or measured.*");
  }
  if (value.size() > kTextBytesMax) {
    return InvalidField(field, absl::StrCat(value.size(), " bytes"), absl::StrCat("at most ", kTextBytesMax));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> WithMeasured(const Calibration& artifact, const Safetensors& measured) {
  TensorMap tensors = artifact.tensors();
  TensorMetadata metadata = artifact.metadata();
  if (measured.tensors().empty()) return InvalidField("measured tensors", 0, kWanted);
  for (const auto& [name, tensor] : measured.tensors()) {
    KV_RETURN_IF_ERROR(CheckTensor(artifact, name, tensor));
    tensors[name] = tensor;
  }
  for (const auto& [key, value] : measured.metadata()) {
    if (key == "format") continue;  // what libraries write
    KV_RETURN_IF_ERROR(CheckMetadata(artifact, key, value));
    metadata[key] = value;
  }
  metadata["zack_hack.sensitivity"] = "measured";
  return SerializeCalibration(artifact.model(), tensors, std::move(metadata));
}

}  // namespace kvmanager::calibrate
