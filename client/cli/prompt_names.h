// The names of the blocks that a person asks about: of a prompt's token ids, or of keys.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "client/client.h"

namespace kvmanager::client::cli {

struct PromptArguments {
  std::optional<uint32_t> cache;  // an id
  std::string tokens;             // a file with token ids; empty: of keys
  std::vector<std::string> keys;  // hexadecimal
};

constexpr uint64_t kTokensFileBytesMax = uint64_t{64} << 20;

struct NamedPrompt {
  std::vector<BlockName> names;  // of keys, without digests of tokens
  // Of token ids alone.
  int page_tokens = 0;          // of the cache; 0: keys were given
  uint64_t unnamed_tokens = 0;  // at the end, that fill no block
  std::vector<uint32_t> ids;
  CacheDigest digest;  // of the cache
  std::vector<CacheDescription> caches;
};

/// A list of token ids in JSON, each 0..2^32 - 1. Errors: INVALID_ARGUMENT, which say what `file` has instead.
absl::StatusOr<std::vector<uint32_t>> ParseTokenIds(absl::string_view json, absl::string_view file);
/// Keys of 64 hexadecimal digits. Errors: INVALID_ARGUMENT.
absl::StatusOr<std::vector<BlockName>> ParseKeys(absl::Span<const std::string> keys);

/// Names blocks as the client library does. Errors: INVALID_ARGUMENT (arguments, file), NOT_FOUND (cache, file), the
/// client's.
absl::StatusOr<NamedPrompt> NamePrompt(Client& client, const PromptArguments& arguments);

}  // namespace kvmanager::client::cli
