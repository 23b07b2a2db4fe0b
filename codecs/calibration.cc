#include "codecs/calibration.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "kvmanager/base/half.h"
#include "kvmanager/base/page_layout.h"
#include "kvmanager/base/sha256.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

namespace fs = std::filesystem;

constexpr char kFormat[] = "kvmanager-calibration-1";
constexpr char kSuffix[] = ".safetensors";
constexpr size_t kDigestDigits = 64;
constexpr size_t kNamesShownMax = 20;
constexpr uint64_t kAlign = 64;

bool IsDigest(absl::string_view text) {
  return text.size() == kDigestDigits && std::all_of(text.begin(), text.end(), absl::ascii_isxdigit);
}

absl::StatusOr<int> Number(const std::string& source, const TensorMetadata& metadata, const std::string& key, int max) {
  const auto found = metadata.find(key);
  int value = 0;
  if (found == metadata.end() || !absl::SimpleAtoi(found->second, &value) || value < 1 || value > max) {
    return InvalidField(absl::StrCat(source, ": metadata ", key), found == metadata.end() ? "absent" : found->second,
                        absl::StrCat("1..", max));
  }
  return value;
}

absl::StatusOr<std::string> ReadFile(const std::string& path) {
  std::error_code error;
  if (!fs::is_regular_file(path, error)) return absl::NotFoundError(absl::StrCat("no calibration file ", path));
  const uint64_t bytes = fs::file_size(path, error);
  if (error || bytes > Calibration::kFileBytesMax) {
    return InvalidField(absl::StrCat(path, ": file bytes"), bytes,
                        absl::StrCat("at most ", Calibration::kFileBytesMax));
  }
  std::ifstream file(path, std::ios::binary);
  std::string text(bytes, '\0');
  if (!file.read(text.data(), std::streamsize(bytes))) {
    return absl::UnavailableError(absl::StrCat("cannot read ", path));
  }
  return text;
}

std::string ShapeText(absl::Span<const uint64_t> shape) { return absl::StrCat("[", absl::StrJoin(shape, ","), "]"); }

}  // namespace

std::string CalibrationDigest(const TensorMap& tensors, const TensorMetadata& metadata) {
  Sha256Stream stream;
  const auto add_number = [&](uint64_t n) {
    uint8_t bytes[8];
    for (int i = 0; i < 8; ++i) bytes[i] = uint8_t(n >> (8 * i));
    stream.Add(bytes);
  };
  const auto add_text = [&](absl::string_view text) {
    add_number(text.size());
    stream.Add(absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(text.data()), text.size()));
  };
  for (const auto& [name, tensor] : tensors) {
    add_text(name);
    add_text(tensor.dtype);
    add_text(absl::StrJoin(tensor.shape, ","));
    add_number(tensor.bytes.size());
    stream.Add(tensor.bytes);
  }
  for (const auto& [key, value] : metadata) {
    if (key == "digest") continue;
    add_text(key);
    add_text(value);
  }
  return stream.Finish().ToHex(sizeof(Digest));
}

std::string DigestOfArtifacts(const std::set<std::string>& digests) {
  if (digests.empty()) return "";
  if (digests.size() == 1) return *digests.begin();
  std::string text;
  for (const std::string& digest : digests) absl::StrAppend(&text, digest, "\n");
  return Sha256({reinterpret_cast<const uint8_t*>(text.data()), text.size()}).ToHex(sizeof(Digest));
}

std::string SerializeCalibration(const CalibrationModel& model, const TensorMap& tensors, TensorMetadata metadata) {
  metadata["format"] = kFormat;
  metadata["model"] = model.model;
  metadata["revision"] = model.revision;
  metadata["layers"] = absl::StrCat(model.layers);
  metadata["kv_heads"] = absl::StrCat(model.kv_heads);
  metadata["query_heads"] = absl::StrCat(model.query_heads);
  metadata["head_dim"] = absl::StrCat(model.head_dim);
  metadata["digest"] = CalibrationDigest(tensors, metadata);
  return SerializeSafetensors(tensors, metadata);
}

absl::StatusOr<std::shared_ptr<const Calibration>> Calibration::Parse(std::string bytes, absl::string_view source) {
  std::shared_ptr<Calibration> parsed(new Calibration);
  parsed->source_ = std::string(source);
  const auto file = absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
  KV_RETURN_IF_ERROR(ParseSafetensors(file, source, &parsed->tensors_, &parsed->metadata_));
  const TensorMetadata& metadata = parsed->metadata_;
  const auto text = [&](const char* key) {
    const auto found = metadata.find(key);
    return found == metadata.end() ? std::string() : found->second;
  };
  if (text("format") != kFormat) {
    return InvalidField(absl::StrCat(source, ": metadata format"), absl::CHexEscape(text("format").substr(0, 64)),
                        absl::StrCat(kFormat, "; kvctl calibrate writes such files"));
  }
  const std::string digest = CalibrationDigest(parsed->tensors_, metadata);
  if (text("digest") != digest) {
    return InvalidField(absl::StrCat(source, ": metadata digest"), absl::CHexEscape(text("digest").substr(0, 64)),
                        absl::StrCat(digest, ", the digest of its content: the file is damaged, or was changed"));
  }
  parsed->digest_ = digest;
  CalibrationModel& model = parsed->model_;
  model.model = text("model");
  model.revision = text("revision");
  if (model.model.empty()) return InvalidField(absl::StrCat(source, ": metadata model"), "empty", "a model's name");
  KV_ASSIGN_OR_RETURN(model.layers, Number(parsed->source_, metadata, "layers", 1024));
  KV_ASSIGN_OR_RETURN(model.kv_heads, Number(parsed->source_, metadata, "kv_heads", PageLayout::kKvHeadsMax));
  KV_ASSIGN_OR_RETURN(model.query_heads,
                      Number(parsed->source_, metadata, "query_heads", 64 * PageLayout::kKvHeadsMax));
  KV_ASSIGN_OR_RETURN(model.head_dim, Number(parsed->source_, metadata, "head_dim", PageLayout::kHeadDimMax));
  if (model.query_heads % model.kv_heads != 0) {
    return InvalidField(absl::StrCat(source, ": metadata query_heads"), model.query_heads,
                        absl::StrCat("a multiple of kv_heads ", model.kv_heads));
  }
  // Every tensor into aligned memory of its own.
  uint64_t total = kAlign;
  for (const auto& [name, tensor] : parsed->tensors_) total += (tensor.bytes.size() + kAlign - 1) / kAlign * kAlign;
  parsed->memory_ = std::shared_ptr<uint8_t>(static_cast<uint8_t*>(std::aligned_alloc(kAlign, total)),
                                             [](uint8_t* p) { std::free(p); });
  if (parsed->memory_ == nullptr) return absl::ResourceExhaustedError(absl::StrCat("no memory for ", source));
  uint8_t* at = parsed->memory_.get();
  for (auto& [name, tensor] : parsed->tensors_) {
    if (!tensor.bytes.empty()) std::memcpy(at, tensor.bytes.data(), tensor.bytes.size());
    tensor.bytes = absl::MakeConstSpan(at, tensor.bytes.size());
    at += (tensor.bytes.size() + kAlign - 1) / kAlign * kAlign;
  }
  return std::shared_ptr<const Calibration>(std::move(parsed));
}

absl::StatusOr<std::shared_ptr<const Calibration>> Calibration::Load(const std::string& path) {
  KV_ASSIGN_OR_RETURN(std::string bytes, ReadFile(path));
  return Parse(std::move(bytes), path);
}

absl::StatusOr<const Tensor*> Calibration::Find(absl::string_view name, absl::string_view dtype,
                                                absl::Span<const uint64_t> shape, absl::string_view made_by) const {
  const auto found = tensors_.find(std::string(name));
  const std::string where = absl::StrCat("calibration ", source_, " tensor ", name);
  if (found == tensors_.end()) {
    return FieldError(absl::StatusCode::kFailedPrecondition, where, "absent",
                      absl::StrCat("present: make the artifact with kvctl calibrate --codec ", made_by));
  }
  const Tensor& tensor = found->second;
  if (tensor.dtype != dtype) return InvalidField(where + " dtype", tensor.dtype, dtype);
  if (absl::MakeConstSpan(tensor.shape) != shape) {
    return InvalidField(where + " shape", ShapeText(tensor.shape), ShapeText(shape));
  }
  return &tensor;
}

absl::StatusOr<absl::Span<const float>> Calibration::Floats(absl::string_view name, absl::Span<const uint64_t> shape,
                                                            absl::string_view made_by) const {
  KV_ASSIGN_OR_RETURN(const Tensor* tensor, Find(name, "F32", shape, made_by));
  const auto values =
      absl::MakeConstSpan(reinterpret_cast<const float*>(tensor->bytes.data()), tensor->bytes.size() / sizeof(float));
  for (size_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values[i])) {
      return InvalidField(absl::StrCat("calibration ", source_, " tensor ", name, " element ", i), values[i], "finite");
    }
  }
  return values;
}

absl::StatusOr<absl::Span<const uint16_t>> Calibration::Halves(absl::string_view name, absl::Span<const uint64_t> shape,
                                                               absl::string_view made_by) const {
  KV_ASSIGN_OR_RETURN(const Tensor* tensor, Find(name, "F16", shape, made_by));
  const auto values = absl::MakeConstSpan(reinterpret_cast<const uint16_t*>(tensor->bytes.data()),
                                          tensor->bytes.size() / sizeof(uint16_t));
  for (size_t i = 0; i < values.size(); ++i) {
    if ((values[i] & 0x7c00) == 0x7c00) {
      return InvalidField(absl::StrCat("calibration ", source_, " tensor ", name, " element ", i),
                          HalfToFloat(values[i]), "finite");
    }
  }
  return values;
}

absl::StatusOr<absl::Span<const int32_t>> Calibration::Integers(absl::string_view name,
                                                                absl::Span<const uint64_t> shape, int32_t min,
                                                                int32_t max, absl::string_view made_by) const {
  KV_ASSIGN_OR_RETURN(const Tensor* tensor, Find(name, "I32", shape, made_by));
  const auto values = absl::MakeConstSpan(reinterpret_cast<const int32_t*>(tensor->bytes.data()),
                                          tensor->bytes.size() / sizeof(int32_t));
  for (size_t i = 0; i < values.size(); ++i) {
    if (values[i] < min || values[i] > max) {
      return InvalidField(absl::StrCat("calibration ", source_, " tensor ", name, " element ", i), values[i],
                          absl::StrCat(min, "..", max));
    }
  }
  return values;
}

namespace {

/// Artifacts in use, by path, so that codecs of one artifact share it.
class Files : public CalibrationSource {
 public:
  absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view name) override {
    return GetFile(std::string(name));
  }

 protected:
  absl::StatusOr<std::shared_ptr<const Calibration>> GetFile(const std::string& path) {
    std::error_code error;
    const auto written = fs::last_write_time(path, error);
    const uint64_t bytes = error ? 0 : fs::file_size(path, error);
    {
      MutexLock lock(mutex_);
      const auto found = known_.find(path);
      if (!error && found != known_.end() && found->second.written == written && found->second.bytes == bytes) {
        if (auto calibration = found->second.calibration.lock()) return calibration;
      }
    }
    KV_ASSIGN_OR_RETURN(auto calibration, Calibration::Load(path));
    MutexLock lock(mutex_);
    known_[path] = {written, bytes, calibration};
    // The newest stays, so that what Prefetch has read is there for Create.
    newest_ = calibration;
    return calibration;
  }

 private:
  struct Known {
    fs::file_time_type written;
    uint64_t bytes = 0;
    std::weak_ptr<const Calibration> calibration;
  };
  Mutex mutex_;
  std::map<std::string, Known> known_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const Calibration> newest_ ABSL_GUARDED_BY(mutex_);
};

class Directory final : public Files {
 public:
  explicit Directory(std::string directory) : directory_(std::move(directory)) {}

  absl::StatusOr<std::shared_ptr<const Calibration>> Get(absl::string_view name) override {
    if (directory_.empty()) {
      return InvalidField("codec parameter calibration", absl::CHexEscape(name.substr(0, 80)),
                          "absent, or the daemon started with --calibration-dir DIR");
    }
    if (name.empty() || name.size() > 255 || name.find('/') != absl::string_view::npos || name[0] == '.' ||
        name.find('\0') != absl::string_view::npos) {
      return InvalidField("codec parameter calibration", absl::CHexEscape(name.substr(0, 80)),
                          "the name of a file in the daemon's --calibration-dir, or its digest");
    }
    if (IsDigest(name)) return ByDigest(name);
    std::string file(name);
    if (!absl::EndsWith(file, kSuffix)) file += kSuffix;
    absl::StatusOr<std::shared_ptr<const Calibration>> got = GetFile(directory_ + "/" + file);
    return absl::IsNotFound(got.status()) ? NotFound(name) : got;
  }

 private:
  /// Of regular files alone: opening a pipe would wait for its writer.
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    std::error_code error;
    for (fs::directory_iterator it(directory_, error), end; !error && it != end; it.increment(error)) {
      std::error_code gone;
      if (it->path().extension() != kSuffix || !it->is_regular_file(gone)) continue;
      names.push_back(it->path().filename().string());
    }
    std::sort(names.begin(), names.end());
    return names;
  }

  absl::Status NotFound(absl::string_view name) const {
    std::vector<std::string> names = Names();
    if (names.size() > kNamesShownMax) names.resize(kNamesShownMax);
    return FieldError(absl::StatusCode::kNotFound, "codec parameter calibration", name,
                      names.empty() ? absl::StrCat("a file in ", directory_, ", which has none")
                                    : absl::StrCat("one of those in ", directory_, ": ", absl::StrJoin(names, ", ")));
  }

  /// A damaged copy does not hide a good one: its error is returned only where no claimant is good.
  absl::StatusOr<std::shared_ptr<const Calibration>> ByDigest(absl::string_view digest) {
    absl::Status first_error;
    for (const std::string& name : Names()) {
      // What the file says of itself is enough to choose it; loading it checks that it is true.
      const absl::StatusOr<std::unique_ptr<Safetensors>> file = Safetensors::Open(directory_ + "/" + name);
      if (!file.ok()) continue;
      const auto said = (*file)->metadata().find("digest");
      if (said == (*file)->metadata().end() || said->second != digest) continue;
      absl::StatusOr<std::shared_ptr<const Calibration>> got = GetFile(directory_ + "/" + name);
      if (got.ok()) return got;
      if (first_error.ok()) first_error = got.status();
    }
    return first_error.ok() ? NotFound(digest) : first_error;
  }

  const std::string directory_;
};

}  // namespace

std::unique_ptr<CalibrationSource> MakeCalibrationDirectory(std::string directory) {
  return std::make_unique<Directory>(std::move(directory));
}

std::unique_ptr<CalibrationSource> MakeCalibrationFiles() { return std::make_unique<Files>(); }

}  // namespace kvmanager
