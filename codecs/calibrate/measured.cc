#include "codecs/calibrate/measured.h"

#include <cmath>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "codecs/calibrate/factors.h"
#include "codecs/calibrate/plan.h"
#include "codecs/calibrate/tensor_set.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/status.h"

namespace kvmanager::calibrate {
namespace {

constexpr char kWanted[] = "zack_hack.joint.sensitivity or zack_hack.balanced.sensitivity";
constexpr size_t kTextBytesMax = 4096;
constexpr char kBasisKey[] = "zack_hack.v_basis", kTrained[] = "trained", kHadamard[] = "hadamard";

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
  if (key == kBasisKey) {
    if (value != kTrained && value != kHadamard) {
      return InvalidField(field, Short(value), absl::StrCat(kTrained, " or ", kHadamard));
    }
    if (value == kHadamard && !artifact.Has(kHadamardEnergy)) {
      return InvalidField(field, value, absl::StrCat(kTrained, ": the artifact has no ", kHadamardEnergy));
    }
    return absl::OkStatus();
  }
  if (!absl::StartsWith(key, "measured.")) {
    return InvalidField(field, Short(value),
                        "absent: zack.mode, zack_hack.mode, zack_hack.allocation, zack_hack.v_basis or measured.*");
  }
  if (value.size() > kTextBytesMax) {
    return InvalidField(field, absl::StrCat(value.size(), " bytes"), absl::StrCat("at most ", kTextBytesMax));
  }
  return absl::OkStatus();
}

/// Adds to `set` what zack+hack reads where V is rotated by the Hadamard matrix: zack_hack.{mode}.vw.left and .right,
/// and V's part of order and energy, channels alike.
absl::Status RotateByHadamard(const Calibration& artifact, TensorSet* set) {
  const CalibrationModel& model = artifact.model();
  const uint64_t layers = model.layers, heads = model.kv_heads, d = model.head_dim;
  KV_ASSIGN_OR_RETURN(const absl::Span<const float> flat,
                      artifact.Floats(kHadamardEnergy, {layers, heads}, "zack+hack"));
  if (!IsPowerOfTwo(model.head_dim)) return InvalidField("head_dim", d, "a power of two for v_basis=hadamard");
  const Matrix matrix = HadamardMatrix(model.head_dim);
  std::vector<float> factors;
  for (uint64_t place = 0; place < layers * heads; ++place) factors.insert(factors.end(), matrix.begin(), matrix.end());
  for (ZackMode mode : kZackModes) {
    const std::string energy_name = ZackName("zack_hack", mode, "energy"),
                      order_name = ZackName("zack_hack", mode, "order");
    KV_ASSIGN_OR_RETURN(const absl::Span<const float> energy,
                        artifact.Floats(energy_name, {layers, heads, 2, d}, "zack+hack"));
    KV_ASSIGN_OR_RETURN(const absl::Span<const int32_t> order,
                        artifact.Integers(order_name, {layers, heads, 2, d}, 0, int32_t(d) - 1, "zack+hack"));
    std::vector<float> new_energy(energy.begin(), energy.end());
    std::vector<int32_t> new_order(order.begin(), order.end());
    for (uint64_t place = 0; place < layers * heads; ++place) {
      for (uint64_t c = 0; c < d; ++c) {
        new_energy[(place * 2 + 1) * d + c] = flat[place];
        new_order[(place * 2 + 1) * d + c] = int32_t(c);
      }
    }
    set->AddFloats(energy_name, {layers, heads, 2, d}, new_energy);
    set->AddIntegers(order_name, {layers, heads, 2, d}, new_order);
    set->AddFloats(ZackName("zack_hack", mode, "vw.left"), {layers, heads, d, d}, factors);
    set->AddFloats(ZackName("zack_hack", mode, "vw.right"), {layers, heads, d, d}, factors);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> WithMeasured(const Calibration& artifact, const Safetensors& measured) {
  TensorMap tensors = artifact.tensors();
  TensorMetadata metadata = artifact.metadata();
  for (const auto& [name, tensor] : measured.tensors()) {
    KV_RETURN_IF_ERROR(CheckTensor(artifact, name, tensor));
    tensors[name] = tensor;
  }
  for (const auto& [key, value] : measured.metadata()) {
    if (key == "format") continue;  // what libraries write
    KV_RETURN_IF_ERROR(CheckMetadata(artifact, key, value));
    metadata[key] = value;
  }
  if (!measured.tensors().empty()) metadata["zack_hack.sensitivity"] = "measured";
  TensorSet rotated;
  const auto basis = measured.metadata().find(kBasisKey);
  if (basis != measured.metadata().end() && basis->second == kHadamard) {
    KV_RETURN_IF_ERROR(RotateByHadamard(artifact, &rotated));
  }
  for (const auto& [name, tensor] : rotated.tensors()) tensors[name] = tensor;
  return SerializeCalibration(artifact.model(), tensors, std::move(metadata));
}

}  // namespace kvmanager::calibrate
