// Small values of a BlockDisk: how its bytes are shared out, when it may write again, what cannot be read
// now, which names went early.
//
// On the loop's thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/disk/index_record.h"

namespace kvmanager {

/// Of the bytes that a disk may have: those of records, and the rest.
struct DiskShares {
  static constexpr uint64_t kIndexBytesMin = uint64_t{12} << 20;  // RocksDB's log and smallest tables
  static constexpr uint64_t kLeavingBytesMax = uint64_t{256} << 20;
  static constexpr uint64_t kReserveBytesMax = uint64_t{32} << 20;

  explicit DiskShares(uint64_t bytes) {
    const uint64_t index = kIndexBytesMin + bytes / 128;
    leaving_max = std::min(bytes / 16, kLeavingBytesMax);
    reserve = std::min(bytes / 32, kReserveBytesMax);
    records = bytes - index - leaving_max - reserve;
  }
  uint64_t records;      // with what the file system cannot give back
  uint64_t leaving_max;  // of records that were given up, until the file system has their bytes back
  uint64_t reserve;      // of the segment that is written
};

/// After an error nothing is written for a second, after each further one for twice as long, a minute at most.
class WriteBackOff {
 public:
  static constexpr int64_t kNsMin = 1000000000, kNsMax = 60 * kNsMin;

  bool is_over(int64_t now_ns) const { return now_ns >= until_ns_; }
  /// Seconds, or 0: it is on already.
  int64_t Begin(int64_t now_ns) {
    if (!is_over(now_ns)) return 0;
    ns_ = ns_ == 0 ? kNsMin : std::min(ns_ * 2, kNsMax);
    until_ns_ = now_ns + ns_;
    try_again_ = true;
    return ns_ / kNsMin;
  }
  void NoteSuccess() { ns_ = 0; }
  /// Once after each Begin: what failed is to be tried again.
  bool TakeTryAgain() { return std::exchange(try_again_, false); }

 private:
  int64_t ns_ = 0, until_ns_ = INT64_MIN;
  bool try_again_ = false;
};

struct BlockId {
  CacheDigest cache;
  BlockKey key;
  friend bool operator==(const BlockId&, const BlockId&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const BlockId& id) {
    return H::combine(std::move(h), id.cache, id.key);
  }
};

/// Blocks that could not be read lately: they are not found for a while, as each attempt may take as long as the device
/// goes on trying. What a device says it cannot read now it may read later, so the block stays.
class FailedReads {
 public:
  static constexpr int64_t kNs = 10000000000;
  static constexpr size_t kMax = 4096;  // of more, all are tried again

  void Note(const BlockId& id, int64_t now_ns) {
    if (until_ns_.size() >= kMax) until_ns_.clear();
    until_ns_[id] = now_ns + kNs;
  }
  bool Has(const BlockId& id, int64_t now_ns) const {
    if (until_ns_.empty()) return false;
    const auto found = until_ns_.find(id);
    return found != until_ns_.end() && now_ns < found->second;
  }
  void Forget(const BlockId& id) { until_ns_.erase(id); }

 private:
  absl::flat_hash_map<BlockId, int64_t> until_ns_;
};

/// Which names were erased before their records were known.
struct ErasedEarly {
  bool all = false;
  absl::flat_hash_set<CacheDigest> caches;
  absl::flat_hash_set<BlockId> blocks;
  bool Has(const IndexRecord& record) const {
    return all || caches.contains(record.cache) || blocks.contains({record.cache, record.key});
  }
};

}  // namespace kvmanager
