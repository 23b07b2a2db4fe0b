// Safetensors files for tests, wrong ones among them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"

namespace kvmanager {

struct FileTensor {
  std::string name, dtype;
  std::vector<uint64_t> shape;
  std::string bytes;
};

/// A safetensors file: header length, `header`, data.
inline std::string SafetensorsFile(const std::string& header, const std::string& data) {
  std::string file;
  for (int i = 0; i < 8; ++i) file.push_back(char(header.size() >> (8 * i) & 0xff));
  return file + header + data;
}

inline std::string SafetensorsFile(const std::vector<FileTensor>& tensors) {
  std::vector<std::string> entries;
  std::string data;
  for (const FileTensor& t : tensors) {
    entries.push_back(absl::StrCat("\"", t.name, "\":{\"dtype\":\"", t.dtype, "\",\"shape\":[",
                                   absl::StrJoin(t.shape, ","), "],\"data_offsets\":[", data.size(), ",",
                                   data.size() + t.bytes.size(), "]}"));
    data += t.bytes;
  }
  return SafetensorsFile("{" + absl::StrJoin(entries, ",") + "}", data);
}

inline absl::Span<const uint8_t> Bytes(const std::string& s) {
  return absl::MakeConstSpan(reinterpret_cast<const uint8_t*>(s.data()), s.size());
}

}  // namespace kvmanager
