#include "kvmanager/handoff/offer_digest.h"

namespace kvmanager {

CacheDigest DigestOfOffer(const HandOffHeader& header, const Codec& codec) {
  CacheConfig config = header.config;
  config.codec = codec.info().spec;
  config.calibration_digest = codec.info().calibration_digest;
  return DigestOf(config, codec.info().version);
}

}  // namespace kvmanager
