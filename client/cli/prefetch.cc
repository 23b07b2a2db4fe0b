#include "client/cli/prefetch.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "client/cli/format.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client::cli {
namespace {

constexpr size_t kBlocksOfCall = 256;

const char* Reason(Miss reason) {
  switch (reason) {
    case Miss::kNone:
      return "none";
    case Miss::kNotFound:
      return "not_found";
    case Miss::kTokenMismatch:
      return "token_mismatch";
    case Miss::kChecksum:
      return "checksum";
    case Miss::kIncomplete:
      return "incomplete";
  }
  return "unknown";
}

}  // namespace

absl::StatusOr<PrefetchedPrompt> Prefetch(Client& client, const PromptArguments& prompt,
                                          const std::function<void(size_t done, size_t of)>& progress) {
  KV_ASSIGN_OR_RETURN(const NamedPrompt named, NamePrompt(client, prompt));
  PrefetchedPrompt prefetched{.asked = named.names.size(), .match = {}};
  for (size_t done = 0; done < named.names.size();) {
    progress(done, named.names.size());
    done = std::min(done + kBlocksOfCall, named.names.size());
    KV_ASSIGN_OR_RETURN(prefetched.match,
                        client.Prefetch(prompt.cache.value_or(0), absl::MakeConstSpan(named.names).first(done)));
    if (static_cast<size_t>(prefetched.match.in_memory) < done) break;  // it is not there, or has no room
  }
  return prefetched;
}

std::string FormatPrefetched(const PrefetchedPrompt& prompt) {
  const PrefixMatch& match = prompt.match;
  std::string text = absl::StrCat(match.in_memory, " of ", prompt.asked, " blocks are in the cache's memory");
  if (match.in_memory < match.hit_blocks) {
    absl::StrAppend(&text, "; the next ones are in another memory or on the disk: there was no room for them");
  } else if (match.reason != Miss::kNone) {
    absl::StrAppend(&text, "; the next one is not there: ", Reason(match.reason), " (`kvctl explain` says why)");
  }
  return text + "\n";
}

nlohmann::json ToJson(const PrefetchedPrompt& prompt) {
  return {{"asked", prompt.asked},
          {"in_memory", prompt.match.in_memory},
          {"hit_blocks", prompt.match.hit_blocks},
          {"reason", Reason(prompt.match.reason)}};
}

}  // namespace kvmanager::client::cli
