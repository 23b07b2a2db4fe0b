// Codecs by name: an ordinary object that main() fills; read-only afterwards, so any thread may ask it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "codecs/codec.h"

namespace kvmanager {

/// Parameters as written: "k_bits" -> "3".
using CodecParameters = std::map<std::string, std::string>;

struct CodecSpec {
  std::string name;
  CodecParameters parameters;
};

/// Parses "NAME[:key=value,...]". Errors: INVALID_ARGUMENT naming the field.
absl::StatusOr<CodecSpec> ParseCodecSpec(absl::string_view text);

class CodecRegistry {
 public:
  using Factory = std::function<absl::StatusOr<std::unique_ptr<Codec>>(const PageLayout&, const CodecParameters&)>;

  /// `name` must be new. `help`: one line for --help and for errors.
  void Register(std::string name, std::string help, Factory factory);

  /// A codec for `layout` from "NAME[:key=value,...]". Errors: INVALID_ARGUMENT naming the codec or the parameter, its
  /// value and what is allowed (an unknown codec lists the known ones).
  absl::StatusOr<std::unique_ptr<Codec>> Create(absl::string_view spec, const PageLayout& layout) const;

  /// name -> help.
  std::map<std::string, std::string> Names() const;

 private:
  struct Entry {
    std::string help;
    Factory factory;
  };
  std::map<std::string, Entry> entries_;
};

}  // namespace kvmanager
