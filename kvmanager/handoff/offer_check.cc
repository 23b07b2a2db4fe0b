#include "kvmanager/handoff/offer_check.h"

#include <optional>
#include <utility>
#include <vector>

namespace kvmanager {

CacheDigest DigestOfOffer(const HandOffHeader& first, const Codec& codec) {
  CacheConfig config = first.config;
  config.codec = codec.info().spec;
  config.calibration_digest = codec.info().calibration_digest;
  return DigestOf(config, codec.info().version);
}

std::shared_ptr<BlockCheck> CheckOfOffer(PageStore& store, const HandOffHeader& first, const Codec& codec) {
  const std::optional<CacheId> cache = store.caches().FindOpen(DigestOfOffer(first, codec), CacheConfig::kHost);
  if (!cache.has_value()) return nullptr;
  std::vector<BlockName> names;
  for (const HandOffBlock& block : first.blocks) names.push_back(block.named ? block.name : BlockName());
  auto check = store.caches().Check(*cache, names, CacheDirectory::Which::kAll);
  return check.ok() ? std::shared_ptr<BlockCheck>(*std::move(check)) : nullptr;
}

}  // namespace kvmanager
