// ARC (Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003), to compare with.
//
// Blocks used once and blocks used more often are two LRU lists; ghosts of either say which is to be longer. It is of
// the simulator alone, and of one payer. Sizes are counted in blocks.
#pragma once

#include <memory>

#include "kvmanager/eviction/eviction_policy.h"

namespace kvmanager::simulator {

std::unique_ptr<EvictionPolicy> MakeArcEviction();

}  // namespace kvmanager::simulator
