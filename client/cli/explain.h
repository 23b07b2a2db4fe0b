// kvctl explain: where the blocks of a prompt are, or why they are not there.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/prompt_names.h"
#include "client/client.h"

namespace kvmanager::client::cli {

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

/// Names the blocks, and asks. Errors: NamePrompt's, the client's.
absl::StatusOr<ExplainedPrompt> Explain(Client& client, const PromptArguments& arguments);

/// A summary, and a table in which neighbours with the same answer share a row, whose time is that of the last to go.
std::string FormatExplained(const ExplainedPrompt& prompt);
/// An entry per block, as the daemon said it.
nlohmann::json ToJson(const ExplainedPrompt& prompt);

}  // namespace kvmanager::client::cli
