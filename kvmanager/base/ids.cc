#include "kvmanager/base/ids.h"

#include <algorithm>

#include "kvmanager/base/sha256.h"

namespace kvmanager {
std::string Digest::ToHex(size_t bytes_max) const {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < bytes.size() && i < bytes_max; ++i) {
    text += kHex[bytes[i] >> 4];
    text += kHex[bytes[i] & 15];
  }
  return text;
}

Digest Sha256(absl::Span<const uint8_t> data) { return Sha256Stream().Add(data).Finish(); }

namespace {
// As little-endian words.
Sha256Stream& AddTokens(Sha256Stream& stream, absl::Span<const uint32_t> token_ids) {
  constexpr size_t kTokensAtOnce = 64;
  uint8_t bytes[kTokensAtOnce * sizeof(uint32_t)];
  while (!token_ids.empty()) {
    const auto some = token_ids.first(std::min(token_ids.size(), kTokensAtOnce));
    uint8_t* to = bytes;
    for (const uint32_t id : some) {
      for (int shift = 0; shift < 32; shift += 8) *to++ = static_cast<uint8_t>(id >> shift);
    }
    stream.Add({bytes, some.size() * sizeof(uint32_t)});
    token_ids.remove_prefix(some.size());
  }
  return stream;
}
}  // namespace

TokenDigest DigestTokens(absl::Span<const uint32_t> token_ids) {
  Sha256Stream stream;
  return AddTokens(stream, token_ids).Finish();
}

BlockKey ChainBlockKey(const BlockKey& parent, const CacheDigest& cache, absl::Span<const uint32_t> token_ids) {
  Sha256Stream stream;
  stream.Add(parent.bytes).Add(cache.bytes);
  return AddTokens(stream, token_ids).Finish();
}

void NameBlocks(const CacheDigest& cache, absl::Span<const uint32_t> token_ids, int page_tokens,
                std::vector<BlockName>* names) {
  names->clear();
  BlockKey parent;
  for (size_t at = 0; at + page_tokens <= token_ids.size(); at += page_tokens) {
    const auto block = token_ids.subspan(at, page_tokens);
    parent = ChainBlockKey(parent, cache, block);
    names->push_back({parent, DigestTokens(block)});
  }
}

}  // namespace kvmanager
