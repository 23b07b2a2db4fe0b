#include "kvmanager/base/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <set>
#include <system_error>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "nlohmann/json.hpp"

namespace kvmanager {
namespace {

using Json = nlohmann::json;

constexpr int kHeaderDepthMax = 4;  // of JSON: tensor, field, list

/// Bits of an element; 0: not a type of the format.
int DTypeBits(absl::string_view dtype) {
  if (dtype == "BOOL" || dtype == "U8" || dtype == "I8" || dtype == "F8_E4M3" || dtype == "F8_E5M2") return 8;
  if (dtype == "F16" || dtype == "BF16" || dtype == "I16" || dtype == "U16") return 16;
  if (dtype == "F32" || dtype == "I32" || dtype == "U32") return 32;
  if (dtype == "F64" || dtype == "I64" || dtype == "U64") return 64;
  return 0;
}

/// A hostile string, short and printable.
std::string Printable(absl::string_view s) {
  constexpr size_t kShownBytesMax = 120;
  return absl::StrCat(absl::CHexEscape(s.substr(0, kShownBytesMax)), s.size() > kShownBytesMax ? "..." : "");
}

std::string Printable(const Json& value) {
  const std::string text = value.dump(-1, ' ', true, Json::error_handler_t::replace);
  return Printable(absl::string_view(text));
}

struct Extent {
  uint64_t begin, end;
  const std::string* name;
};

/// Checks one header entry. `where`: "FILE: tensor NAME: ".
absl::Status ParseTensor(const std::string& where, const Json& entry, absl::Span<const uint8_t> data, Tensor* tensor,
                         Extent* extent) {
  if (!entry.is_object()) return InvalidField(where + "entry", Printable(entry), "an object");
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!entry.contains(key)) return InvalidField(where + key, "absent", "present");
  }
  const Json& dtype = entry["dtype"];
  const int bits = dtype.is_string() ? DTypeBits(dtype.get_ref<const std::string&>()) : 0;
  if (bits == 0) return InvalidField(where + "dtype", Printable(dtype), "a safetensors type such as F16, BF16 or F32");
  tensor->dtype = dtype.get<std::string>();

  const Json& shape = entry["shape"];
  if (!shape.is_array() || shape.size() > kTensorRankMax) {
    return InvalidField(where + "shape", Printable(shape),
                        absl::StrCat("an array of at most ", kTensorRankMax, " sizes"));
  }
  uint64_t elements = 1;
  for (const Json& size : shape) {
    if (!size.is_number_unsigned()) return InvalidField(where + "shape", Printable(shape), "unsigned integers");
    const uint64_t n = size.get<uint64_t>();
    tensor->shape.push_back(n);
    if (__builtin_mul_overflow(elements, n, &elements))
      return InvalidField(where + "shape", Printable(shape), "a product below 2^64");
  }
  uint64_t tensor_bytes = 0;
  if (__builtin_mul_overflow(elements, uint64_t(bits / 8), &tensor_bytes)) {
    return InvalidField(where + "shape", Printable(shape), "below 2^64 bytes");
  }

  const Json& offsets = entry["data_offsets"];
  if (!offsets.is_array() || offsets.size() != 2 || !offsets[0].is_number_unsigned() ||
      !offsets[1].is_number_unsigned()) {
    return InvalidField(where + "data_offsets", Printable(offsets), "two unsigned integers");
  }
  extent->begin = offsets[0].get<uint64_t>();
  extent->end = offsets[1].get<uint64_t>();
  if (extent->end > data.size()) {
    return InvalidField(where + "data_offsets end", extent->end,
                        absl::StrCat("at most ", data.size(), " (the file's bytes of data)"));
  }
  if (extent->begin > extent->end) {
    return InvalidField(where + "data_offsets begin", extent->begin, absl::StrCat("at most its end ", extent->end));
  }
  if (extent->end - extent->begin != tensor_bytes) {
    return InvalidField(where + "data_offsets size", extent->end - extent->begin,
                        absl::StrCat(tensor_bytes, " (bytes of shape ", Printable(shape), " of ", tensor->dtype, ")"));
  }
  tensor->bytes = data.subspan(extent->begin, tensor_bytes);
  return absl::OkStatus();
}

absl::Status ParseMetadata(const std::string& in, const Json& entry, TensorMetadata* metadata) {
  if (!entry.is_object()) return InvalidField(in + "__metadata__", Printable(entry), "an object");
  for (const auto& [key, value] : entry.items()) {
    if (!value.is_string()) {
      return InvalidField(absl::StrCat(in, "__metadata__ ", Printable(absl::string_view(key))), Printable(value),
                          "a string");
    }
    metadata->emplace(key, value.get<std::string>());
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ParseSafetensors(absl::Span<const uint8_t> file, absl::string_view source, TensorMap* tensors,
                              TensorMetadata* metadata) {
  const std::string in = absl::StrCat(source, ": ");
  if (file.size() < 8) return InvalidField(in + "file bytes", file.size(), "at least 8");
  uint64_t header_bytes = 0;
  for (int i = 7; i >= 0; --i) header_bytes = header_bytes << 8 | file[i];
  const uint64_t header_bytes_max = std::min<uint64_t>(kHeaderBytesMax, file.size() - 8);
  if (header_bytes < 2 || header_bytes > header_bytes_max) {
    return InvalidField(in + "header bytes", header_bytes, absl::StrCat("2..", header_bytes_max));
  }

  std::set<std::string> names;
  std::string repeated;
  bool too_deep = false;
  const auto note = [&](int depth, Json::parse_event_t event, Json& parsed) {
    too_deep |= depth > kHeaderDepthMax;
    if (event == Json::parse_event_t::key && depth == 1 && repeated.empty() &&
        !names.insert(parsed.get_ref<const std::string&>()).second) {
      repeated = parsed.get<std::string>();
    }
    return !too_deep;  // what is deeper is dropped: printing it would recurse
  };
  const char* text = reinterpret_cast<const char*>(file.data()) + 8;
  // The parser would take a zero for the end, and not look at what follows.
  if (std::memchr(text, 0, header_bytes) != nullptr) return InvalidField(in + "header", "text with a zero", "JSON");
  const Json header = Json::parse(text, text + header_bytes, note, /*allow_exceptions=*/false);
  if (too_deep)
    return InvalidField(in + "header nesting", "deeper", absl::StrCat("at most ", kHeaderDepthMax, " levels"));
  if (!header.is_object())
    return InvalidField(in + "header", header.is_discarded() ? "malformed JSON" : Printable(header), "a JSON object");
  if (!repeated.empty())
    return InvalidField(in + "tensor name", Printable(absl::string_view(repeated)), "unique in the header");
  if (header.size() > kTensorsMax)
    return InvalidField(in + "tensors", header.size(), absl::StrCat("at most ", kTensorsMax));

  const absl::Span<const uint8_t> data = file.subspan(8 + header_bytes);
  TensorMap parsed;
  TensorMetadata texts;
  std::vector<Extent> extents;
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") {
      if (metadata != nullptr) KV_RETURN_IF_ERROR(ParseMetadata(in, entry, &texts));
      continue;
    }
    const std::string where = absl::StrCat(in, "tensor ", Printable(absl::string_view(name)), ": ");
    if (tensors->count(name) != 0) return InvalidField(where + "name", "present", "absent from the other files");
    const auto place = parsed.try_emplace(name).first;
    Extent extent{0, 0, &place->first};
    KV_RETURN_IF_ERROR(ParseTensor(where, entry, data, &place->second, &extent));
    extents.push_back(extent);
  }
  std::sort(extents.begin(), extents.end(),
            [](const Extent& a, const Extent& b) { return std::tie(a.begin, a.end) < std::tie(b.begin, b.end); });
  uint64_t end = 0;
  for (const Extent& extent : extents) {
    if (extent.begin != end) {
      return InvalidField(
          absl::StrCat(in, "tensor ", Printable(absl::string_view(*extent.name)), ": data_offsets begin"), extent.begin,
          absl::StrCat(end, " (the end of the tensor before it: no overlaps, no holes)"));
    }
    end = extent.end;
  }
  if (end != data.size())
    return InvalidField(in + "file bytes of data", data.size(), absl::StrCat(end, " (the end of the last tensor)"));
  tensors->merge(parsed);
  if (metadata != nullptr) *metadata = std::move(texts);
  return absl::OkStatus();
}

std::string SerializeSafetensors(const TensorMap& tensors, const TensorMetadata& metadata) {
  Json header = Json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t end = 0;
  for (const auto& [name, tensor] : tensors) {
    uint64_t bytes = DTypeBits(tensor.dtype) / 8;
    for (const uint64_t size : tensor.shape) bytes *= size;
    KV_CHECK(bytes == tensor.bytes.size());
    header[name] = {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {end, end + bytes}}};
    end += bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 8 + 63) / 64 * 64 - 8, ' ');
  std::string file;
  file.reserve(8 + text.size() + end);
  for (int i = 0; i < 8; ++i) file.push_back(char(text.size() >> (8 * i) & 0xff));
  file += text;
  for (const auto& [name, tensor] : tensors) {
    file.append(reinterpret_cast<const char*>(tensor.bytes.data()), tensor.bytes.size());
  }
  return file;
}

absl::Status WriteFileAtomically(const std::string& path, absl::string_view bytes) {
  std::string temporary = path + ".XXXXXX";
  const int fd = mkostemp(temporary.data(), O_CLOEXEC);
  if (fd < 0) return absl::UnavailableError(absl::StrCat("cannot write beside ", path, ": ", std::strerror(errno)));
  absl::Status status;
  const auto fail = [&](const char* what) {
    if (status.ok())
      status = absl::UnavailableError(absl::StrCat("cannot ", what, " ", path, ": ", std::strerror(errno)));
  };
  while (status.ok() && !bytes.empty()) {
    const ssize_t n = write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) {
      fail("write");
    } else {
      bytes.remove_prefix(n);
    }
  }
  if (status.ok() && (fchmod(fd, 0644) != 0 || fsync(fd) != 0)) fail("write");
  close(fd);
  if (status.ok() && rename(temporary.c_str(), path.c_str()) != 0) fail("rename");
  if (!status.ok()) unlink(temporary.c_str());
  return status;
}

absl::StatusOr<std::unique_ptr<Safetensors>> Safetensors::Open(const std::string& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  std::vector<std::string> files;
  if (fs::is_directory(path, error)) {
    for (fs::directory_iterator it(path, error), end; !error && it != end; it.increment(error)) {
      if (it->path().extension() == ".safetensors") files.push_back(it->path().string());
    }
    if (error) return absl::UnavailableError(absl::StrCat("cannot list ", path, ": ", error.message()));
    if (files.empty()) return absl::NotFoundError(absl::StrCat("no *.safetensors in ", path));
    if (files.size() > kShardsMax)
      return InvalidField(path + ": shards", files.size(), absl::StrCat("at most ", kShardsMax));
    std::sort(files.begin(), files.end());
  } else {
    files.push_back(path);
  }
  std::unique_ptr<Safetensors> opened(new Safetensors);
  for (const std::string& file : files) KV_RETURN_IF_ERROR(opened->Map(file));
  return opened;
}

Safetensors::~Safetensors() {
  for (const auto& mapping : mappings_) munmap(const_cast<uint8_t*>(mapping.data()), mapping.size());
}

absl::Status Safetensors::Map(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return absl::NotFoundError(absl::StrCat("cannot open ", path, ": ", std::strerror(errno)));
  struct stat facts = {};
  void* mapped = MAP_FAILED;
  if (fstat(fd, &facts) == 0 && S_ISREG(facts.st_mode) && facts.st_size > 0) {
    mapped = mmap(nullptr, facts.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
  }
  close(fd);
  if (mapped == MAP_FAILED)
    return InvalidField(path + ": file bytes", facts.st_size, "a regular file that is not empty and can be mapped");
  mappings_.emplace_back(static_cast<const uint8_t*>(mapped), facts.st_size);
  return ParseSafetensors(mappings_.back(), path, &tensors_, &metadata_);
}

}  // namespace kvmanager
