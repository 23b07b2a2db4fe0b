#include "client/cli/prompt_names.h"

#include <algorithm>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client::cli {
namespace {

using nlohmann::json;

absl::StatusOr<std::string> ReadTokensFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open()) {
    return FieldError(absl::StatusCode::kNotFound, "--tokens", path, "a file that can be read");
  }
  std::string text;
  char chunk[1 << 16];
  while (file.read(chunk, sizeof chunk), file.gcount() > 0) {
    text.append(chunk, static_cast<size_t>(file.gcount()));
    if (text.size() <= kTokensFileBytesMax) continue;
    return InvalidField("--tokens", "more bytes", absl::StrCat("at most ", kTokensFileBytesMax, " bytes"));
  }
  return text;
}

}  // namespace

absl::StatusOr<std::vector<uint32_t>> ParseTokenIds(absl::string_view text) {
  const auto wrong = [] {
    return FieldError(absl::StatusCode::kInvalidArgument, "--tokens", "something else",
                      "a JSON list of token ids, each 0..4294967295: [1, 15043, 3186]");
  };
  bool nested = false;
  const json list = json::parse(
      text.begin(), text.end(),
      [&nested](int depth, json::parse_event_t event, json&) {
        nested |=
            depth > 0 && (event == json::parse_event_t::array_start || event == json::parse_event_t::object_start);
        return !nested;
      },
      /*allow_exceptions=*/false);
  if (nested || !list.is_array()) return wrong();
  std::vector<uint32_t> ids;
  ids.reserve(list.size());
  for (const json& id : list) {
    if (!id.is_number_unsigned() || id.get<uint64_t>() > UINT32_MAX) return wrong();
    ids.push_back(id.get<uint32_t>());
  }
  return ids;
}

absl::StatusOr<std::vector<BlockName>> ParseKeys(absl::Span<const std::string> keys) {
  std::vector<BlockName> names;
  for (const std::string& key : keys) {
    BlockName& name = names.emplace_back();
    const bool is_hex = std::all_of(key.begin(), key.end(), [](char c) { return absl::ascii_isxdigit(c); });
    if (!is_hex || key.size() != 2 * name.key.bytes.size()) {
      return InvalidField(absl::StrCat("--keys[", names.size() - 1, "]"), absl::StrCat(key.size(), " characters"),
                          "64 hexadecimal digits");
    }
    const std::string bytes = absl::HexStringToBytes(key);
    std::memcpy(name.key.bytes.data(), bytes.data(), bytes.size());
  }
  return names;
}

absl::StatusOr<NamedPrompt> NamePrompt(Client& client, const PromptArguments& arguments) {
  NamedPrompt prompt;
  if (arguments.tokens.empty()) {
    KV_ASSIGN_OR_RETURN(prompt.names, ParseKeys(arguments.keys));
    return prompt;
  }
  KV_ASSIGN_OR_RETURN(const std::string text, ReadTokensFile(arguments.tokens));
  KV_ASSIGN_OR_RETURN(prompt.ids, ParseTokenIds(text));
  KV_ASSIGN_OR_RETURN(prompt.caches, client.Caches());
  const uint32_t id = arguments.cache.value_or(0);
  const auto cache =
      std::find_if(prompt.caches.begin(), prompt.caches.end(), [&](const auto& each) { return each.id == id; });
  if (cache == prompt.caches.end()) {
    return FieldError(absl::StatusCode::kNotFound, "--cache", absl::StrCat(id), "an id that `kvctl caches` shows");
  }
  prompt.page_tokens = cache->options.page_tokens;
  prompt.digest = cache->digest;
  if (prompt.ids.size() < static_cast<size_t>(prompt.page_tokens)) {
    return InvalidField("--tokens (ids)", prompt.ids.size(),
                        absl::StrCat("at least ", prompt.page_tokens, ", the tokens of one block of cache ", id));
  }
  NameBlocks(prompt.digest, prompt.ids, prompt.page_tokens, &prompt.names);
  prompt.unnamed_tokens = prompt.ids.size() % static_cast<size_t>(prompt.page_tokens);
  return prompt;
}

}  // namespace kvmanager::client::cli
