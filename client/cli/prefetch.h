// kvctl prefetch: brings the blocks of a prompt into memory before somebody asks for them.
#pragma once

#include <cstddef>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "client/cli/prompt_names.h"
#include "client/client.h"

namespace kvmanager::client::cli {

struct PrefetchedPrompt {
  size_t asked = 0;  // blocks
  PrefixMatch match;
};

/// prompt: with a cache, and token ids. A part of the names goes in each call, so that none outlives its deadline for
/// long prompts; progress: called before each with the blocks before it, and all. Errors: INVALID_ARGUMENT;
/// NamePrompt's, the client's.
absl::StatusOr<PrefetchedPrompt> Prefetch(Client& client, const PromptArguments& prompt,
                                          const std::function<void(size_t done, size_t of)>& progress);

std::string FormatPrefetched(const PrefetchedPrompt& prompt);
nlohmann::json ToJson(const PrefetchedPrompt& prompt);

}  // namespace kvmanager::client::cli
