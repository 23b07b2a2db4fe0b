// Safetensors: tensors mapped read-only from one file or from every *.safetensors of a directory (shards), and the
// writing of such files.
//
// Nothing in a file is believed: header length, JSON, types, shapes, offsets, overlaps and holes are checked against
// bounds before a byte of data is handed out, and an error names file, tensor, field, value and bound. A Safetensors
// owns its mappings; Tensor::bytes point into them. Immutable after Open, so any thread may read it. The file must not
// be truncated while it is mapped. Format: https://huggingface.co/docs/safetensors (8 bytes of header length, JSON
// header, data without holes).
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmanager {

struct Tensor {
  std::string dtype;  // as in the file: "F16", "BF16", "F32", ...
  std::vector<uint64_t> shape;
  absl::Span<const uint8_t> bytes;  // row-major, little-endian, unaligned
};

using TensorMap = std::map<std::string, Tensor>;
/// The header's __metadata__: text by name.
using TensorMetadata = std::map<std::string, std::string>;

constexpr uint64_t kHeaderBytesMax = 100'000'000;  // as the format's own library
constexpr size_t kTensorsMax = 1'000'000;
constexpr size_t kTensorRankMax = 8;
constexpr size_t kShardsMax = 1000;

/// Adds the tensors of one file's content to `tensors`; their bytes point into `file`. `source` names the file in
/// errors. `metadata`, if wanted, is set to the file's. Errors: INVALID_ARGUMENT; nothing is changed then.
absl::Status ParseSafetensors(absl::Span<const uint8_t> file, absl::string_view source, TensorMap* tensors,
                              TensorMetadata* metadata = nullptr);

/// A file's bytes: tensors in the order of their names, each at a multiple of 64 bytes of the file where the sizes of
/// those before it allow. dtype and shape must fit the bytes (checked).
std::string SerializeSafetensors(const TensorMap& tensors, const TensorMetadata& metadata);
/// Writes `bytes` to `path` by way of a temporary file beside it, so that no reader ever sees half of it.
absl::Status WriteFileAtomically(const std::string& path, absl::string_view bytes);

class Safetensors {
 public:
  /// path: a file, or a directory of which every *.safetensors is read, in the order of their names.
  /// Errors: NOT_FOUND (no such file, none in the directory), INVALID_ARGUMENT (content).
  static absl::StatusOr<std::unique_ptr<Safetensors>> Open(const std::string& path);
  ~Safetensors();
  Safetensors(const Safetensors&) = delete;
  Safetensors& operator=(const Safetensors&) = delete;

  const TensorMap& tensors() const { return tensors_; }
  /// Of the last file that was read.
  const TensorMetadata& metadata() const { return metadata_; }

 private:
  Safetensors() = default;
  absl::Status Map(const std::string& path);

  std::vector<absl::Span<const uint8_t>> mappings_;
  TensorMap tensors_;
  TensorMetadata metadata_;
};

}  // namespace kvmanager
