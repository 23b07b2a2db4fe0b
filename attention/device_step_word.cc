#include "attention/device_step.h"
#include "attention/device_step_kernels.h"

namespace kvmanager {

std::optional<NonFinitePlace> ParseNonFiniteWord(uint64_t word) {
  if (word == 0) return std::nullopt;  // an engine's kernels may write anything else
  const auto take = [&](int bits) {
    const uint64_t value = word & ((uint64_t{1} << bits) - 1);
    word >>= bits;
    return value;
  };
  NonFinitePlace place;
  place.channel = int(take(step::kChannelBits));
  place.kv_head = int(take(step::kHeadBits));
  place.side = int(take(step::kSideBits));
  place.layer = int(take(step::kLayerBits));
  place.position = take(step::kPositionBits);
  return place;
}

}  // namespace kvmanager
