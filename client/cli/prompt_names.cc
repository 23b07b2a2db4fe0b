#include "client/cli/prompt_names.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/json_text.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client::cli {
namespace {

using nlohmann::json;

constexpr char kWanted[] =
    "a file with the prompt's token ids, a list in JSON of numbers 0..4294967295, such as [1, 15043, 3186]";

// `found`: what is wrong, behind the file's name.
absl::Status WrongTokens(absl::string_view file, absl::string_view found, absl::string_view advice = "",
                         absl::StatusCode code = absl::StatusCode::kInvalidArgument) {
  return FieldError(code, "--tokens", absl::StrCat(file, found), absl::StrCat(kWanted, advice));
}

// Text of a file as an error shows it.
std::string Shown(absl::string_view text) {
  constexpr size_t kShown = 24;
  return JsonText(json(std::string(text.substr(0, kShown))));
}

// Takes token ids from a list; of anything else, finds out what it is.
class TokenIdsReader final : public nlohmann::json_sax<json> {
 public:
  explicit TokenIdsReader(absl::string_view text) : text_(text) {}

  std::vector<uint32_t> ids;
  std::string found;  // what is not as wanted, behind the file's name; empty: nothing
  std::string advice;

  bool null() override { return Value("null"); }
  bool boolean(bool value) override { return Value(value ? "true" : "false"); }
  bool number_integer(int64_t value) override { return Value(absl::StrCat(value)); }
  bool number_unsigned(uint64_t value) override {
    if (depth_ != 1 || is_object_ || value > UINT32_MAX) return Value(absl::StrCat(value));
    ids.push_back(static_cast<uint32_t>(value));
    return true;
  }
  bool number_float(double, const std::string& text) override { return Value(text); }
  bool string(std::string& value) override { return Value(Shown(value)); }
  bool binary(nlohmann::json::binary_t&) override { return Value("bytes"); }
  bool start_object(size_t) override {
    if (depth_ == 1 && !is_object_) return Value("an object");
    is_object_ |= depth_++ == 0;
    return true;
  }
  bool key(std::string& name) override {
    if (depth_ == 1) key_ = name;
    return true;
  }
  bool end_object() override {
    if (--depth_ == 0) found = ", which is a JSON object";
    return depth_ > 0;
  }
  bool start_array(size_t) override {
    if (depth_ == 1 && !is_object_) {
      advice = ": of several prompts give one";
      return Value("a list");
    }
    if (depth_ == 1) {
      found = absl::StrCat(", which is a JSON object with a list in ", Shown(key_));
      const bool plain =
          std::all_of(key_.begin(), key_.end(), [](char c) { return absl::ascii_isalnum(c) || c == '_'; });
      if (plain) advice = absl::StrCat(": `jq .", key_, "` takes that out");
      return false;
    }
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::json::exception&) override {
    size_t at = std::min(text_.size(), position == 0 ? 0 : position - 1);
    const auto in_word = [&](size_t i) { return i < text_.size() && absl::ascii_isalnum(text_[i]); };
    while (at > 0 && in_word(at) && in_word(at - 1)) --at;
    found = at == text_.size()
                ? ", which ends before the list does"
                : absl::StrCat(", which is no JSON from byte ", at + 1, " on (", Shown(text_.substr(at)), ")");
    return false;
  }

 private:
  // A value that is no token id, or not of the list.
  bool Value(const std::string& text) {
    if (is_object_) return true;
    found = depth_ == 0 ? absl::StrCat(", which begins with ", text, " and not with a list")
                        : absl::StrCat(", whose entry ", ids.size() + 1, " is ", text);
    return false;
  }

  const absl::string_view text_;
  int depth_ = 0;
  bool is_object_ = false;  // what the text begins with
  std::string key_;         // the last one of that
};

absl::StatusOr<std::string> ReadTokensFile(const std::string& path) {
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) return WrongTokens(path, ", which is a directory");
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open()) {
    const int why = errno;
    if (why == 0 || why == ENOENT) {
      return WrongTokens(path, ", which does not exist", "", absl::StatusCode::kNotFound);
    }
    return WrongTokens(path, absl::StrCat(", which cannot be read (", std::strerror(why), ")"));
  }
  std::string text;
  char chunk[1 << 16];
  while (file.read(chunk, sizeof chunk), file.gcount() > 0) {
    text.append(chunk, static_cast<size_t>(file.gcount()));
    if (text.size() <= kTokensFileBytesMax) continue;
    return WrongTokens(path, absl::StrCat(", which has more than ", kTokensFileBytesMax, " bytes"));
  }
  return text;
}

}  // namespace

absl::StatusOr<std::vector<uint32_t>> ParseTokenIds(absl::string_view text, absl::string_view file) {
  if (absl::StripAsciiWhitespace(text).empty()) return WrongTokens(file, ", which is empty");
  const bool is_text = std::none_of(text.begin(), text.end(), [](char c) {
    return static_cast<unsigned char>(c) < ' ' && !absl::ascii_isspace(static_cast<unsigned char>(c));
  });
  if (!is_text) return WrongTokens(file, ", which is binary");
  TokenIdsReader reader(text);
  json::sax_parse(text.begin(), text.end(), &reader);
  if (!reader.found.empty()) return WrongTokens(file, reader.found, reader.advice);
  return std::move(reader.ids);
}

absl::StatusOr<std::vector<BlockName>> ParseKeys(absl::Span<const std::string> keys) {
  std::vector<BlockName> names;
  for (const std::string& key : keys) {
    BlockName& name = names.emplace_back();
    const bool is_hex = std::all_of(key.begin(), key.end(), [](char c) { return absl::ascii_isxdigit(c); });
    if (!is_hex || key.size() != 2 * name.key.bytes.size()) {
      return InvalidField(absl::StrCat("--keys[", names.size() - 1, "]"),
                          absl::StrCat(key.size(), " characters", is_hex ? "" : ", not all of them hexadecimal digits"),
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
  KV_ASSIGN_OR_RETURN(prompt.ids, ParseTokenIds(text, arguments.tokens));
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
    return InvalidField(
        "--tokens", absl::StrCat(arguments.tokens, ", which has ", prompt.ids.size(), " token ids"),
        absl::StrCat("a file with at least ", prompt.page_tokens, ", those of one block of cache ", id));
  }
  NameBlocks(prompt.digest, prompt.ids, prompt.page_tokens, &prompt.names);
  prompt.unnamed_tokens = prompt.ids.size() % static_cast<size_t>(prompt.page_tokens);
  return prompt;
}

}  // namespace kvmanager::client::cli
