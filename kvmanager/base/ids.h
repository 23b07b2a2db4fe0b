// Names of things: values that copy, compare and hash. No ownership, no threads.
#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmanager {

/// A slot of a pool and the generation it was handed out in, so that a stale use is detected.
struct PageId {
  uint32_t slot = UINT32_MAX;
  uint32_t generation = 0;
  bool valid() const { return slot != UINT32_MAX; }
  friend auto operator<=>(const PageId&, const PageId&) = default;
};

/// 32 bytes of SHA-256.
struct Digest {
  std::array<uint8_t, 32> bytes{};
  friend auto operator<=>(const Digest&, const Digest&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const Digest& d) {
    return H::combine_contiguous(std::move(h), d.bytes.data(), d.bytes.size());
  }
  /// Lower-case hexadecimal; `bytes_max` of the 32 bytes.
  std::string ToHex(size_t bytes_max = 32) const;
};

/// Content name of a block inside a cache: SHA-256(parent key, cache digest, token ids as u32 little-endian).
/// The root's parent is all zeros. Computed by the client; the store never recomputes it.
using BlockKey = Digest;

/// SHA-256 of a block's token ids (u32 little-endian) alone: what a hit is verified against.
using TokenDigest = Digest;

/// Digest of a cache's identity; part of every block key.
using CacheDigest = Digest;

/// What a client says of one full block: its name, and the digest of its token ids.
struct BlockName {
  BlockKey key;
  TokenDigest tokens;
};

Digest Sha256(absl::Span<const uint8_t> data);

/// The digest of `token_ids` as u32 little-endian.
TokenDigest DigestTokens(absl::Span<const uint32_t> token_ids);

/// The key of the block that holds `token_ids`, after the block named `parent` (zeros for the first).
BlockKey ChainBlockKey(const BlockKey& parent, const CacheDigest& cache, absl::Span<const uint32_t> token_ids);

/// The names of all full blocks of `token_ids`, from the first one on; a trailing partial block has no name.
/// page_tokens: 16..256.
void NameBlocks(const CacheDigest& cache, absl::Span<const uint32_t> token_ids, int page_tokens,
                std::vector<BlockName>* names);

}  // namespace kvmanager
