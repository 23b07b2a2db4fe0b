// kvctl explain: where the blocks of a prompt are, or why they are not there.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/client.h"

namespace kvmanager::client::cli {

struct ExplainArguments {
  std::optional<uint32_t> cache;  // an id
  std::string tokens;             // a file with token ids; empty: of keys
  std::vector<std::string> keys;  // hexadecimal
};

constexpr uint64_t kTokensFileBytesMax = uint64_t{64} << 20;

/// What was asked, and the daemon's answers.
struct ExplainedPrompt {
  std::vector<BlockName> names;  // of keys, without digests of tokens
  int page_tokens = 0;           // of the cache; 0: keys were given
  uint64_t unnamed_tokens = 0;   // at the end, that fill no block
  Explanation explanation;
  /// The same tokens cut into pages of another size, as some other cache has them.
  struct OtherPages {
    int page_tokens = 0;
    Explanation explanation;  // of which same_tokens_cache_id and `others` mean something
  };
  std::vector<OtherPages> other_pages;
};

/// A list of token ids in JSON, each 0..2^32 - 1. Errors: INVALID_ARGUMENT.
absl::StatusOr<std::vector<uint32_t>> ParseTokenIds(absl::string_view json);
/// Keys of 64 hexadecimal digits. Errors: INVALID_ARGUMENT.
absl::StatusOr<std::vector<BlockName>> ParseKeys(absl::Span<const std::string> keys);

/// Names the blocks as the client library does, and asks. Errors: INVALID_ARGUMENT (arguments, file), NOT_FOUND (cache,
/// file), the client's.
absl::StatusOr<ExplainedPrompt> Explain(Client& client, const ExplainArguments& arguments);

/// A summary, and a table in which neighbours with the same answer share a row, whose time is that of the last to go.
std::string FormatExplained(const ExplainedPrompt& prompt);
/// An entry per block, as the daemon said it.
nlohmann::json ToJson(const ExplainedPrompt& prompt);

}  // namespace kvmanager::client::cli
