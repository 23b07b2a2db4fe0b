// Least recently used first.
#pragma once

#include <memory>

#include "kvmanager/eviction/eviction_policy.h"

namespace kvmanager {

std::unique_ptr<EvictionPolicy> MakeLruEviction();

}  // namespace kvmanager
