#include "codecs/registry.h"

#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

constexpr size_t kSpecBytesMax = 4096;
constexpr absl::string_view kWordBound = "1 or more of a-z, 0-9 and _";

bool IsWord(absl::string_view text) {
  for (char c : text) {
    if (!absl::ascii_islower(c) && !absl::ascii_isdigit(c) && c != '_') return false;
  }
  return !text.empty();
}

}  // namespace

absl::StatusOr<CodecSpec> ParseCodecSpec(absl::string_view text) {
  if (text.size() > kSpecBytesMax) {
    return InvalidField("codec", absl::StrCat(text.size(), " bytes long"),
                        absl::StrCat("at most ", kSpecBytesMax, " bytes"));
  }
  const size_t colon = text.find(':');
  CodecSpec spec;
  spec.name = std::string(text.substr(0, colon));
  if (!IsWord(spec.name)) {
    return InvalidField("codec", absl::StrCat("\"", text, "\""),
                        "NAME[:key=value,...], NAME being 1 or more of a-z, 0-9 and _");
  }
  if (colon == absl::string_view::npos) return spec;
  for (absl::string_view part : absl::StrSplit(text.substr(colon + 1), ',')) {
    const size_t equals = part.find('=');
    if (equals == absl::string_view::npos) {
      return InvalidField(absl::StrCat("codec ", spec.name, " parameter"), absl::StrCat("\"", part, "\""), "key=value");
    }
    const std::string key(part.substr(0, equals));
    const std::string value(part.substr(equals + 1));
    if (!IsWord(key)) {
      return InvalidField(absl::StrCat("codec ", spec.name, " parameter name"), absl::StrCat("\"", key, "\""),
                          kWordBound);
    }
    if (value.empty()) return InvalidField(absl::StrCat("codec parameter ", key), "empty", "a value");
    if (!spec.parameters.emplace(key, value).second) {
      return InvalidField(absl::StrCat("codec parameter ", key), "given twice", "given once");
    }
  }
  return spec;
}

void CodecRegistry::Register(std::string name, std::string help, Factory factory) {
  KV_CHECK(IsWord(name));
  KV_CHECK(entries_.emplace(std::move(name), Entry{std::move(help), std::move(factory)}).second);
}

absl::StatusOr<std::unique_ptr<Codec>> CodecRegistry::Create(absl::string_view spec, const PageLayout& layout) const {
  KV_ASSIGN_OR_RETURN(const CodecSpec parsed, ParseCodecSpec(spec));
  const auto found = entries_.find(parsed.name);
  if (found == entries_.end()) {
    std::vector<std::string> names;
    for (const auto& [name, entry] : entries_) names.push_back(name);
    return InvalidField("codec", absl::StrCat("\"", parsed.name, "\""),
                        absl::StrCat("one of ", absl::StrJoin(names, ", ")));
  }
  return found->second.factory(layout, parsed.parameters);
}

std::map<std::string, std::string> CodecRegistry::Names() const {
  std::map<std::string, std::string> names;
  for (const auto& [name, entry] : entries_) names.emplace(name, entry.help);
  return names;
}

}  // namespace kvmanager
