#include "client/cli/explain.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/format.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client::cli {
namespace {

using nlohmann::json;

constexpr size_t kKeyBytesShown = 6;
constexpr size_t kNamesMax = 65536;  // of one call

bool IsThere(const BlockExplanation& block) { return block.place != BlockPlace::kNowhere && !block.other_tokens; }

std::string Where(const BlockExplanation& block) {
  if (block.place == BlockPlace::kNowhere) return "-";
  return block.place == BlockPlace::kArriving ? absl::StrCat("to ", block.tier) : block.tier;
}

std::string OtherName(const Explanation::Other& other) {
  const std::string cache = absl::StrCat("cache ", other.cache_id, " (", other.tier, ", tenant ", other.tenant, ")");
  return other.differs.empty()
             ? absl::StrCat(cache, " has these tokens behind others")
             : absl::StrCat(cache, " has these tokens: it differs in ", absl::StrJoin(other.differs, ", "));
}

std::string Loss(const BlockExplanation& block) {
  switch (block.loss) {
    case BlockLoss::kUnknown:
      return "never stored, as far as the daemon remembers";
    case BlockLoss::kEvicted:
      return absl::StrCat("evicted from ", block.tier, block.taker.empty() ? "" : " for tenant ", block.taker,
                          block.owner.empty() ? "" : "; it was of tenant ", block.owner);
    case BlockLoss::kPurged:
      return absl::StrCat("purged by an operator, from ", block.tier);
    case BlockLoss::kChecksum:
      return absl::StrCat("dropped from ", block.tier, ": its bytes had changed");
    case BlockLoss::kDiskRecord:
      return "dropped from the disk: its record was wrong, or could not be read";
  }
  return "";
}

std::string Why(const BlockExplanation& block, const Explanation& explanation) {
  if (block.other_tokens) return "its name was given to other tokens: a client names blocks wrongly";
  if (block.place != BlockPlace::kNowhere) return "-";
  std::string why = Loss(block);
  for (const Explanation::Other& other : explanation.others) {
    if (block.same_tokens_cache_id == other.cache_id) absl::StrAppend(&why, "; ", OtherName(other));
  }
  return why;
}

// Of neighbours with the same answer.
struct Row {
  size_t first = 0, last = 0;
  std::string where, why;
  double seconds_ago = 0;  // of the one that went last
  bool went = false;
  int priority = 0;
  uint64_t retained_ms = 0;  // of the one whose retention ends first; 0: none ends

  bool IsLike(const Row& other) const {
    return where == other.where && why == other.why && priority == other.priority &&
           (retained_ms == 0) == (other.retained_ms == 0);
  }
};

// "-": the daemon's eviction decides.
std::string Retained(const Row& row) {
  if (row.priority == RetentionOptions().priority) return "-";
  if (row.retained_ms == 0) return absl::StrCat(row.priority);
  return absl::StrCat(row.priority, " for ", FormatSeconds(static_cast<double>(row.retained_ms) * 1e-3));
}

std::vector<Row> RowsOf(const ExplainedPrompt& prompt) {
  std::vector<Row> rows;
  for (size_t i = 0; i < prompt.explanation.blocks.size(); ++i) {
    const BlockExplanation& block = prompt.explanation.blocks[i];
    const bool went = block.place == BlockPlace::kNowhere && block.loss != BlockLoss::kUnknown;
    Row row{
        i, i, Where(block), Why(block, prompt.explanation), block.seconds_ago, went, block.priority, block.retained_ms};
    if (rows.empty() || !rows.back().IsLike(row)) {
      rows.push_back(std::move(row));
      continue;
    }
    rows.back().last = i;
    rows.back().seconds_ago = std::min(rows.back().seconds_ago, row.seconds_ago);
    rows.back().retained_ms = std::min(rows.back().retained_ms, row.retained_ms);
  }
  return rows;
}

size_t WithSameTokens(const Explanation& explanation) {
  return static_cast<size_t>(std::count_if(explanation.blocks.begin(), explanation.blocks.end(),
                                           [](const auto& block) { return block.same_tokens_cache_id != 0; }));
}

json OthersToJson(const Explanation& explanation) {
  json others = json::array();
  for (const Explanation::Other& other : explanation.others) {
    json differs = json::array();
    for (const std::string& field : other.differs) differs.push_back(Utf8(field));
    others.push_back({{"cache_id", other.cache_id},
                      {"tenant", Utf8(other.tenant)},
                      {"tier", Utf8(other.tier)},
                      {"differs", std::move(differs)}});
  }
  return others;
}

}  // namespace

absl::StatusOr<ExplainedPrompt> Explain(Client& client, const PromptArguments& arguments) {
  ExplainedPrompt prompt;
  const uint32_t id = arguments.cache.value_or(0);
  KV_ASSIGN_OR_RETURN(NamedPrompt named, NamePrompt(client, arguments));
  prompt.names = std::move(named.names);
  prompt.page_tokens = named.page_tokens;
  prompt.unnamed_tokens = named.unnamed_tokens;
  KV_ASSIGN_OR_RETURN(prompt.explanation, client.Explain(id, prompt.names));
  const auto& blocks = prompt.explanation.blocks;
  if (prompt.page_tokens == 0 || std::all_of(blocks.begin(), blocks.end(), IsThere)) return prompt;
  // What other caches have of these tokens in pages of another size has other digests of tokens.
  std::set<int> sizes;
  for (const CacheDescription& each : named.caches) {
    if (each.published_blocks > 0) sizes.insert(each.options.page_tokens);
  }
  sizes.erase(prompt.page_tokens);
  for (const int page_tokens : sizes) {
    std::vector<BlockName> names;
    NameBlocks(named.digest, named.ids, page_tokens, &names);
    names.resize(std::min(names.size(), kNamesMax));
    KV_ASSIGN_OR_RETURN(Explanation explanation, client.Explain(id, names));
    if (WithSameTokens(explanation) > 0) prompt.other_pages.push_back({page_tokens, std::move(explanation)});
  }
  return prompt;
}

std::string FormatExplained(const ExplainedPrompt& prompt) {
  const std::vector<BlockExplanation>& blocks = prompt.explanation.blocks;
  const auto miss = std::find_if_not(blocks.begin(), blocks.end(), IsThere);
  const auto there = std::count_if(blocks.begin(), blocks.end(), IsThere);
  std::string text = absl::StrCat(there, " of ", blocks.size(), " blocks are there");
  if (prompt.page_tokens > 0 && miss != blocks.end()) {
    absl::StrAppend(&text, ", ", miss - blocks.begin(), " before the first miss");
  }
  absl::StrAppend(&text, "\n");
  if (prompt.unnamed_tokens > 0) {
    absl::StrAppend(&text, "the last ", prompt.unnamed_tokens, " tokens fill no block and have no name\n");
  }
  std::vector<std::vector<std::string>> rows;
  for (const Row& row : RowsOf(prompt)) {
    const size_t page_tokens = static_cast<size_t>(prompt.page_tokens);
    rows.push_back({absl::StrCat(row.first), absl::StrCat(row.last - row.first + 1),
                    page_tokens == 0 ? "-" : absl::StrCat(row.first * page_tokens),
                    prompt.names[row.first].key.ToHex(kKeyBytesShown), row.where, Retained(row),
                    row.went ? FormatSeconds(row.seconds_ago) : "-", row.why});
  }
  absl::StrAppend(&text, "\n",
                  FormatTable({"BLOCK", "BLOCKS", "TOKEN", "KEY", "WHERE", "RETAINED", "WENT AGO", "WHY NOT"}, rows),
                  "\n");
  for (const ExplainedPrompt::OtherPages& other : prompt.other_pages) {
    absl::StrAppend(&text, "in pages of ", other.page_tokens, " tokens ", WithSameTokens(other.explanation), " of ",
                    other.explanation.blocks.size(), " blocks' tokens are there:\n");
    for (const Explanation::Other& each : other.explanation.others) {
      absl::StrAppend(&text, "  ", Printable(OtherName(each)), "\n");
    }
  }
  const Explanation& e = prompt.explanation;
  absl::StrAppend(&text, "The daemon remembers how ", e.remembered, " blocks went, of at most ", e.remembered_max,
                  ", and goes back ", FormatSeconds(e.remembered_seconds),
                  ". What it kept over a restart it finds once an engine has opened the cache again.\n");
  return text;
}

json ToJson(const ExplainedPrompt& prompt) {
  json blocks = json::array();
  for (size_t i = 0; i < prompt.explanation.blocks.size(); ++i) {
    const BlockExplanation& block = prompt.explanation.blocks[i];
    blocks.push_back({{"block", i},
                      {"key", prompt.names[i].key.ToHex()},
                      {"place", PlaceName(block.place)},
                      {"loss", block.place == BlockPlace::kNowhere ? json(LossName(block.loss)) : json()},
                      {"tier", Utf8(block.tier)},
                      {"cache_id", block.cache_id},
                      {"seconds_ago", block.seconds_ago},
                      {"owner", Utf8(block.owner)},
                      {"taker", Utf8(block.taker)},
                      {"other_tokens", block.other_tokens},
                      {"priority", block.priority},
                      {"retained_seconds", static_cast<double>(block.retained_ms) * 1e-3},
                      {"same_tokens_cache_id", block.same_tokens_cache_id}});
  }
  json pages = json::array();
  for (const ExplainedPrompt::OtherPages& other : prompt.other_pages) {
    pages.push_back({{"page_tokens", other.page_tokens},
                     {"blocks", other.explanation.blocks.size()},
                     {"same_tokens_blocks", WithSameTokens(other.explanation)},
                     {"others", OthersToJson(other.explanation)}});
  }
  return {{"blocks", blocks},
          {"page_tokens", prompt.page_tokens},
          {"unnamed_tokens", prompt.unnamed_tokens},
          {"others", OthersToJson(prompt.explanation)},
          {"other_page_sizes", pages},
          {"remembered", prompt.explanation.remembered},
          {"remembered_max", prompt.explanation.remembered_max},
          {"remembered_seconds", prompt.explanation.remembered_seconds}};
}

}  // namespace kvmanager::client::cli
