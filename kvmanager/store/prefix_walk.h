// Where the next block of a prefix is: the order in which memories and the disk are asked, and why a walk ends. Values
// that name caches and the disk, which outlive them: made for a piece of a walk. On the store's thread.
//
// Matches, creations that fetch and loads from the disk walk so, each over its own places. What asks one memory alone
// calls BlockIndex::Find, the first step of a walk: a sequence begins with what its memory has by then, and a transfer
// reads only from there. An explanation and a retention look for keys, whatever their tokens, in all memories.
#pragma once

#include <cstdint>

#include "kvmanager/disk/block_disk.h"
#include "kvmanager/store/block.h"
#include "kvmanager/store/explanation.h"
#include "kvmanager/store/miss_reason.h"

namespace kvmanager {

struct Cache;

/// What a walk asks.
struct PrefixPlaces {
  struct Memory {
    const Cache* cache = nullptr;  // nullptr: not asked
    bool arriving = false;         // also blocks on their way to it
  };
  Memory own;
  Memory other;                     // the cache's counterpart in another memory
  const BlockDisk* disk = nullptr;  // nullptr: not asked
};

struct NextBlock {
  BlockPlace place = BlockPlace::kNowhere;
  MissReason reason = MissReason::kNotFound;  // kNone unless it is nowhere
  Block* block = nullptr;                     // kMemory, kArriving: not held; its cache says in which memory
  const DiskBlock* on_disk = nullptr;         // kDisk: until the next call of the disk
};

/// The block `name` at place `index` of a sequence. A place that has its key with other tokens ends the search; one on
/// its way does not. Allocates nothing.
NextBlock FindNextBlock(const PrefixPlaces& places, const BlockName& name, uint32_t index);

}  // namespace kvmanager
