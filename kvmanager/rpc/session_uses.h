// What each connection has of what is bounded, so that the most of any can be told.
//
// The loop's thread. Outlives its entries.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/container/flat_hash_set.h"

namespace kvmanager {

/// Of one connection, or the most that any has of each.
struct SessionUse {
  uint64_t sequences = 0;                       // limits::kSequencesMax
  uint64_t arenas = 0;                          // limits::kArenasMax, on GPUs too
  uint64_t arena_bytes = 0;                     // limits::kArenaBytesTotalMax
  uint64_t caches = 0;                          // limits::kCachesHeldMax
  uint64_t block_leases = 0, mapped_pages = 0;  // limits::kBlockLeasesMax, kMappedPagesHeldMax
  uint64_t prefetch_names = 0;                  // limits::kPrefetchNamesMax
};

class SessionUses {
 public:
  /// One connection's. Counted while it lives.
  class Entry {
   public:
    explicit Entry(SessionUses* all) : all_(*all) { all_.entries_.insert(this); }
    ~Entry() { all_.entries_.erase(this); }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;
    SessionUse* operator->() { return &use_; }
    const SessionUse* operator->() const { return &use_; }

   private:
    friend class SessionUses;
    SessionUses& all_;
    SessionUse use_;
  };

  SessionUses() = default;
  SessionUses(const SessionUses&) = delete;
  SessionUses& operator=(const SessionUses&) = delete;

  SessionUse Most() const {
    SessionUse most;
    for (const Entry* const entry : entries_) {
      most.sequences = std::max(most.sequences, entry->use_.sequences);
      most.arenas = std::max(most.arenas, entry->use_.arenas);
      most.arena_bytes = std::max(most.arena_bytes, entry->use_.arena_bytes);
      most.caches = std::max(most.caches, entry->use_.caches);
      most.block_leases = std::max(most.block_leases, entry->use_.block_leases);
      most.mapped_pages = std::max(most.mapped_pages, entry->use_.mapped_pages);
      most.prefetch_names = std::max(most.prefetch_names, entry->use_.prefetch_names);
    }
    return most;
  }

 private:
  absl::flat_hash_set<const Entry*> entries_;
};

}  // namespace kvmanager
