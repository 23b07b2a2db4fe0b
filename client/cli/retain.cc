#include "client/cli/retain.h"

#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "client/cli/format.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client::cli {
namespace {

struct BlockRange {
  size_t first = 0, last = 0;
};

absl::StatusOr<BlockRange> ParseBlocks(const std::string& blocks) {
  const std::vector<std::string> ends = absl::StrSplit(blocks, "..");
  BlockRange range;
  if (ends.size() != 2 || !absl::SimpleAtoi(ends[0], &range.first) || !absl::SimpleAtoi(ends[1], &range.last) ||
      range.first > range.last) {
    return InvalidField("--blocks", blocks, "FIRST..LAST, such as 12..40, counted from 0");
  }
  return range;
}

absl::StatusOr<absl::Span<const BlockName>> Chosen(absl::Span<const BlockName> names, const std::string& blocks) {
  if (blocks.empty()) return names;
  KV_ASSIGN_OR_RETURN(const BlockRange range, ParseBlocks(blocks));
  if (range.last >= names.size()) {
    return InvalidField("--blocks", blocks,
                        absl::StrCat("within 0..", names.size() - 1, ", the blocks of the prompt or keys"));
  }
  return names.subspan(range.first, range.last - range.first + 1);
}

}  // namespace

absl::Status CheckRetain(const RetainArguments& arguments) {
  // CLI11 lets "nan" pass.
  if (!(arguments.ttl_s >= 0 && arguments.ttl_s <= kTtlSMax)) {
    return InvalidField("--ttl-s", arguments.ttl_s, absl::StrCat("0..", kTtlSMax, " seconds"));
  }
  if (!arguments.blocks.empty()) KV_RETURN_IF_ERROR(ParseBlocks(arguments.blocks).status());
  return ParseKeys(arguments.prompt.keys).status();
}

absl::StatusOr<RetainedPrompt> Retain(Client& client, const RetainArguments& arguments) {
  KV_RETURN_IF_ERROR(CheckRetain(arguments));
  RetainedPrompt prompt{.retention = {.priority = arguments.priority, .ttl_ms = std::llround(arguments.ttl_s * 1000)}};
  if (arguments.ttl_s > 0 && prompt.retention.ttl_ms == 0) prompt.retention.ttl_ms = 1;  // 0 would be no end
  KV_ASSIGN_OR_RETURN(const NamedPrompt named, NamePrompt(client, arguments.prompt));
  KV_ASSIGN_OR_RETURN(const auto names, Chosen(named.names, arguments.blocks));
  prompt.asked = names.size();
  KV_ASSIGN_OR_RETURN(prompt.outcome, client.Retain(arguments.prompt.cache.value_or(0), names, prompt.retention));
  return prompt;
}

std::string FormatRetained(const RetainedPrompt& prompt) {
  const RetentionOptions& retention = prompt.retention;
  const int usual = RetentionOptions().priority;
  const std::string how = retention.priority == usual  ? "the daemon's eviction decides on them"
                          : retention.priority < usual ? "they go before others of their tenant"
                                                       : "they go after others of their tenant";
  const std::string until = retention.ttl_ms == 0 || retention.priority == usual
                                ? ""
                                : absl::StrCat(", for ", FormatSeconds(static_cast<double>(retention.ttl_ms) * 1e-3));
  return absl::StrCat(prompt.outcome.blocks, " of ", prompt.asked, " blocks are there, ",
                      FormatBytes(prompt.outcome.bytes), " with their copies: ", how, until, "\n");
}

nlohmann::json ToJson(const RetainedPrompt& prompt) {
  return {{"asked", prompt.asked},
          {"blocks", prompt.outcome.blocks},
          {"bytes", prompt.outcome.bytes},
          {"priority", prompt.retention.priority},
          {"ttl_seconds", static_cast<double>(prompt.retention.ttl_ms) * 1e-3}};
}

}  // namespace kvmanager::client::cli
