// S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023): a small queue for blocks that
// were seen once, a main queue for those used again, and ghosts of what left the small one.
//
// A block enters the small queue, or the main one if it is a ghost. While the small queue has kSmallPercent of a
// payer's bytes or more, its front goes: out, or to the main queue if it was used more than once since. Else the main
// queue's front goes, unless it was used: then it goes to the back, and counts one use less. A block that is in use
// keeps its place. Of a chain children enter before their parents, so they go first among equals; what a chain has in
// common with others counts more uses.
#pragma once

#include <memory>

#include "kvmanager/eviction/eviction_policy.h"

namespace kvmanager {

struct S3Fifo {
  static constexpr uint64_t kSmallPercent = 10;
  static constexpr uint8_t kFrequencyMax = 3;
  static constexpr int kMovesMax = 64;  // blocks that one Victim moves between queues at most
  enum Queue : uint8_t { kNone = 0, kSmall, kMain };
};

std::unique_ptr<EvictionPolicy> MakeS3FifoEviction();

}  // namespace kvmanager
