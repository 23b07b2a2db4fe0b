#include "kvmanager/base/ids.h"

#include <openssl/evp.h>

#include <memory>

#include "kvmanager/base/status.h"

namespace kvmanager {
namespace {

// One SHA-256 in progress.
class Sha256Stream {
 public:
  Sha256Stream() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    KV_CHECK(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1);
  }
  Sha256Stream& Add(absl::Span<const uint8_t> data) {
    KV_CHECK(EVP_DigestUpdate(context_.get(), data.data(), data.size()) == 1);
    return *this;
  }
  Sha256Stream& AddTokens(absl::Span<const uint32_t> token_ids) {
    for (uint32_t id : token_ids) Add({uint8_t(id), uint8_t(id >> 8), uint8_t(id >> 16), uint8_t(id >> 24)});
    return *this;
  }
  Digest Finish() {
    Digest digest;
    KV_CHECK(EVP_DigestFinal_ex(context_.get(), digest.bytes.data(), nullptr) == 1);
    return digest;
  }

 private:
  std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context_;
};

}  // namespace

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

TokenDigest DigestTokens(absl::Span<const uint32_t> token_ids) { return Sha256Stream().AddTokens(token_ids).Finish(); }

BlockKey ChainBlockKey(const BlockKey& parent, const CacheDigest& cache, absl::Span<const uint32_t> token_ids) {
  return Sha256Stream().Add(parent.bytes).Add(cache.bytes).AddTokens(token_ids).Finish();
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
