#include "kvmanager/store/prefix_walk.h"

#include "kvmanager/store/cache.h"

namespace kvmanager {
namespace {

// Whether the search ends here.
bool FindIn(const PrefixPlaces::Memory& memory, const BlockName& name, uint32_t index, NextBlock* next) {
  if (memory.cache == nullptr) return false;
  next->block = memory.cache->table.Find(name, index, &next->reason);
  if (next->block != nullptr) next->place = BlockPlace::kMemory;
  if (next->reason != MissReason::kNotFound) return true;
  if (!memory.arriving) return false;
  const auto arriving = memory.cache->arriving.find(name.key);
  if (arriving == memory.cache->arriving.end() || !arriving->second->Is(name, index)) return false;
  *next = {BlockPlace::kArriving, MissReason::kNone, arriving->second};
  return true;
}

}  // namespace

NextBlock FindNextBlock(const PrefixPlaces& places, const BlockName& name, uint32_t index) {
  NextBlock next;
  if (FindIn(places.own, name, index, &next) || FindIn(places.other, name, index, &next)) return next;
  if (places.disk == nullptr) return next;
  const DiskBlock* const there = places.disk->Find(places.own.cache->digest, name.key);
  if (there == nullptr) return next;
  if (there->index == index && there->tokens == name.tokens) {
    return {BlockPlace::kDisk, MissReason::kNone, nullptr, there};
  }
  next.reason = MissReason::kTokenMismatch;
  return next;
}

}  // namespace kvmanager
