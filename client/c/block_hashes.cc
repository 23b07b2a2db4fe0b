#include "client/c/block_hashes.h"

#include <numeric>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/sha256.h"
#include "kvmanager/base/status.h"

namespace kvmanager::client::c {
namespace {

constexpr uint32_t kHashBytesMax = 64;

BlockName Name(const CacheDigest& cache, absl::Span<const uint8_t> hash) {
  // The words' last byte is 0.
  static constexpr char kBlock[] = "kvmanager external block", kTokens[] = "kvmanager external tokens";
  Sha256Stream stream;
  const auto digest = [&](absl::Span<const char> word) {
    stream.Add({reinterpret_cast<const uint8_t*>(word.data()), word.size()});
    return stream.Add(cache.bytes).Add(hash).Finish();
  };
  const BlockKey key = digest(kBlock);
  return {key, digest(kTokens)};
}

}  // namespace

absl::Status CheckHashes(const kvm_hashes& hashes) {
  for (uint32_t i = 0; i < hashes.count; ++i) {
    if (hashes.sizes[i] < 1 || hashes.sizes[i] > kHashBytesMax) {
      return InvalidField(absl::StrCat("hash ", i), absl::StrCat(hashes.sizes[i], " bytes"),
                          absl::StrCat("1..", kHashBytesMax));
    }
  }
  return absl::OkStatus();
}

NamedByHashes::NamedByHashes(const kvm_hashes& hashes)
    : sizes_(hashes.sizes, hashes.sizes + hashes.count),
      bytes_(hashes.bytes, hashes.bytes + std::accumulate(sizes_.begin(), sizes_.end(), size_t{0})) {
  names_.reserve(sizes_.size());
}

absl::Span<const BlockName> NamedByHashes::Names(const CacheDigest& cache, uint32_t at, uint32_t count) {
  while (names_.size() < size_t{at} + count) {
    const uint32_t size = sizes_[names_.size()];
    names_.push_back(Name(cache, {bytes_.data() + named_bytes_, size}));
    named_bytes_ += size;
  }
  return absl::MakeConstSpan(names_).subspan(at, count);
}

}  // namespace kvmanager::client::c
