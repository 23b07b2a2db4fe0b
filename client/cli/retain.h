// kvctl retain: how long the blocks of a prompt are kept.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "client/cli/prompt_names.h"
#include "client/client.h"

namespace kvmanager::client::cli {

struct RetainArguments {
  PromptArguments prompt;  // with a cache
  std::string blocks;      // "FIRST..LAST" of them; empty: all
  int priority = 0;        // 0..100
  double ttl_s = 0;        // 0..kTtlSMax
};
constexpr double kTtlSMax = 315360000;  // ten years

struct RetainedPrompt {
  size_t asked = 0;  // blocks
  RetentionOptions retention;
  RetainOutcome outcome;
};

/// What is wrong whatever the daemon and the file are: INVALID_ARGUMENT naming the option.
absl::Status CheckRetain(const RetainArguments& arguments);
/// Errors: CheckRetain's; INVALID_ARGUMENT naming --blocks, beyond the prompt; NamePrompt's, the client's.
absl::StatusOr<RetainedPrompt> Retain(Client& client, const RetainArguments& arguments);

std::string FormatRetained(const RetainedPrompt& prompt);
nlohmann::json ToJson(const RetainedPrompt& prompt);

}  // namespace kvmanager::client::cli
