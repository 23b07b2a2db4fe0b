// The digest of the cache that an offered sequence is of, as the receiver's store names it.
#pragma once

#include "codecs/codec.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/store/hand_off_lease.h"

namespace kvmanager {

/// codec: made for first.config.
CacheDigest DigestOfOffer(const HandOffHeader& header, const Codec& codec);

}  // namespace kvmanager
