// What an offered hand-off shares with a cache that is open here.
#pragma once

#include <memory>

#include "codecs/codec.h"
#include "kvmanager/store/block_check.h"
#include "kvmanager/store/page_store.h"

namespace kvmanager {

/// Of the cache, as the store names it: the offered configuration may not be canonical yet.
CacheDigest DigestOfOffer(const HandOffHeader& first, const Codec& codec);

/// For the bytes of named blocks that are here, in host memory, to be compared away from the loop before the offer is
/// accepted; nullptr: there are none, or they were compared lately.
std::shared_ptr<BlockCheck> CheckOfOffer(PageStore& store, const HandOffHeader& first, const Codec& codec);

}  // namespace kvmanager
