// A calibration artifact: the arrays that codecs were trained to, what they were trained on, and a digest of it all.
//
// One safetensors file (docs/calibration.md). Its metadata names the model (model, revision, layers, kv_heads,
// query_heads, head_dim) and holds the codecs' parameters; `digest` is the SHA-256 over the tensors in the order of
// their names and the metadata without `digest` (CalibrationDigest). A Calibration is immutable once loaded, shared by
// the codecs that were made from it, and may be read from any thread. Nothing in a file is believed: structure, digest
// and ranges are checked before anything is handed out.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvmanager/base/mutex.h"
#include "kvmanager/base/safetensors.h"

namespace kvmanager {

/// What an artifact was trained for.
struct CalibrationModel {
  std::string model;     // name
  std::string revision;  // may be empty: fits every revision
  int layers = 0, kv_heads = 0, query_heads = 0, head_dim = 0;
  friend bool operator==(const CalibrationModel&, const CalibrationModel&) = default;
};

class Calibration {
 public:
  static constexpr uint64_t kFileBytesMax = uint64_t{4} << 30;
  static constexpr int kFormatVersion = 1;  // metadata "format": "kvmanager-calibration-1"

  /// Parses and checks a file's bytes, which are copied. `source` names it in errors. Errors: INVALID_ARGUMENT (field,
  /// value, bound; a digest that does not fit is named as such).
  static absl::StatusOr<std::shared_ptr<const Calibration>> Parse(std::string bytes, absl::string_view source);
  /// Errors: NOT_FOUND; as Parse's.
  static absl::StatusOr<std::shared_ptr<const Calibration>> Load(const std::string& path);

  const CalibrationModel& model() const { return model_; }
  /// 64 hexadecimal digits.
  const std::string& digest() const { return digest_; }
  /// The path or name it was read from, for messages.
  const std::string& source() const { return source_; }
  const TensorMetadata& metadata() const { return metadata_; }
  const TensorMap& tensors() const { return tensors_; }
  bool Has(absl::string_view tensor) const { return tensors_.count(std::string(tensor)) != 0; }

  /// A tensor's elements, 64-byte aligned, valid as long as this. Errors: FAILED_PRECONDITION "artifact ... has no
  /// tensor ..., made by kvctl calibrate --codec ..." (`made_by` says which); INVALID_ARGUMENT if dtype (F32, F16 or
  /// I32), shape or an element (not finite) is not as wanted.
  absl::StatusOr<absl::Span<const float>> Floats(absl::string_view tensor, absl::Span<const uint64_t> shape,
                                                 absl::string_view made_by) const;
  absl::StatusOr<absl::Span<const uint16_t>> Halves(absl::string_view tensor, absl::Span<const uint64_t> shape,
                                                    absl::string_view made_by) const;
  /// Each element must be in min..max.
  absl::StatusOr<absl::Span<const int32_t>> Integers(absl::string_view tensor, absl::Span<const uint64_t> shape,
                                                     int32_t min, int32_t max, absl::string_view made_by) const;

 private:
  Calibration() = default;
  absl::StatusOr<const Tensor*> Find(absl::string_view tensor, absl::string_view dtype,
                                     absl::Span<const uint64_t> shape, absl::string_view made_by) const;

  std::string source_, digest_;
  CalibrationModel model_;
  TensorMetadata metadata_;
  TensorMap tensors_;                // into memory_
  std::shared_ptr<uint8_t> memory_;  // 64-byte aligned, every tensor too
};

/// SHA-256, hexadecimal, over the tensors in the order of their names (name, dtype, shape, bytes) and the metadata
/// without "digest", each text preceded by its length as u64 little-endian.
std::string CalibrationDigest(const TensorMap& tensors, const TensorMetadata& metadata);

/// What a codec of several artifacts says: "" of none, the digest of one, else the SHA-256 of all digests, a newline
/// behind each.
std::string DigestOfArtifacts(const std::set<std::string>& digests);

/// The artifact's file: adds format, the model's identity and the digest to `metadata`.
std::string SerializeCalibration(const CalibrationModel& model, const TensorMap& tensors, TensorMetadata metadata);

/// Where codecs get artifacts from. Thread-safe.
class CalibrationSource {
 public:
  virtual ~CalibrationSource() = default;
  /// `name`: as written after "calibration=": a name in the source, or 64 hexadecimal digits, the digest. Errors:
  /// NOT_FOUND naming what there is; as Calibration::Parse's.
  virtual absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view name) = 0;
};

/// The artifacts (*.safetensors) of one directory, by file name (with or without the suffix; no '/') or digest; files
/// are read when asked for, and kept while a codec uses them. A file that changed is read anew. An empty directory name
/// refuses everything, saying which flag is missing.
std::unique_ptr<CalibrationSource> MakeCalibrationDirectory(std::string directory);
/// Files by path: for programs that run as their user.
std::unique_ptr<CalibrationSource> MakeCalibrationFiles();

}  // namespace kvmanager
