// Names of what a store (page_store.h) has.
#pragma once

#include <cstdint>

namespace kvmanager {

/// A cache of this store; never reused while the store lives.
using CacheId = uint32_t;
/// A sequence of this store; never reused while the store lives.
using SequenceId = uint64_t;

}  // namespace kvmanager
