// The blocks of a disk in memory: found by name, and the next to go when room is short.
//
// On the loop's thread. About 190 bytes a block: entries are in slabs, what many blocks share (cache, payer, layers
// with raw pages) is kept once, and the eviction policy has a node for each.
//
// Invariants (CheckInvariants): 1. the policy knows exactly the learned blocks that are found and not being read.
// 2. bytes() is the sum of the entries, and of a payer's likewise.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/hash/hash.h"
#include "absl/types/span.h"
#include "kvmanager/disk/block_disk.h"
#include "kvmanager/disk/index_record.h"
#include "kvmanager/disk/record.h"
#include "kvmanager/eviction/retaining_eviction.h"

namespace kvmanager {

/// A block of the disk. Its key is `id`, the first 8 bytes, and the rest.
struct DiskEntry : Evictable {
  std::array<uint8_t, 24> key_rest{};
  TokenDigest token_digest;
  uint32_t segment = 0;
  uint32_t at = 0;            // of its segment, in units of kRecordAlign
  uint32_t header_check = 0;  // the lower half of its header's checksum
  uint32_t cache = 0;         // of DiskIndex
  uint32_t shape = 0;
  uint16_t readers = 0;
  bool learned = false;  // the policy has been told of it
  bool gone = false;     // it is found no more, and stays for its readers

  BlockKey key() const {
    BlockKey key;
    std::memcpy(key.bytes.data(), &id, sizeof id);
    std::memcpy(key.bytes.data() + sizeof id, key_rest.data(), key_rest.size());
    return key;
  }
  SegmentPlace place() const { return {segment, at * kRecordAlign, bytes}; }
};

class DiskIndex {
 public:
  /// clock: outlives it.
  DiskIndex(EvictionKind eviction, const Clock* clock);

  uint64_t blocks() const { return blocks_; }
  uint64_t bytes() const { return bytes_; }
  /// Of those that Victim may name.
  uint64_t evictable_bytes() const { return evictable_bytes_; }

  DiskEntry* Find(const CacheDigest& cache, const BlockKey& key) const;
  CacheDigest CacheOf(const DiskEntry& entry) const { return caches_[entry.cache].digest; }
  /// Until the next call.
  const DiskBlock* Describe(const DiskEntry& entry) const;

  /// A block that is not there. Found at once; the policy knows it after Learn.
  DiskEntry* Insert(const IndexRecord& record);
  void Learn(DiskEntry* entry);
  void NoteUse(const CacheDigest& cache, absl::Span<const BlockName> names);
  /// BlockDisk's.
  uint64_t Retain(const CacheDigest& cache, const BlockKey& key, const Retention& retention);
  /// Notices some retentions that have ended; returns what is kept longer.
  RetainingEviction::Use EndRetentions();
  void BeginRead(DiskEntry* entry);
  /// False: it is gone, and this was its last reader.
  bool EndRead(DiskEntry* entry);
  /// The next to go, of the payer who has most; nullptr: none can.
  DiskEntry* Victim();
  /// It is found no more. It stays until Free.
  void Remove(DiskEntry* entry, bool evicted);
  void Free(DiskEntry* entry);

  /// All that are found, of a cache or at all. fn may remove the entry that it is called with.
  void ForEach(const CacheDigest& cache, absl::FunctionRef<void(DiskEntry*)> fn);
  void ForEach(absl::FunctionRef<void(DiskEntry*)> fn);

  /// While it is on, the n-th entry that was ever inserted is At(n), and what is freed is not used again.
  void SetLoading(bool loading);
  DiskEntry* At(uint64_t inserted) { return &slabs_[inserted / kSlabEntries][inserted % kSlabEntries]; }

  void CheckInvariants() const;

 private:
  static constexpr size_t kSlabEntries = 1024;
  struct Key {
    uint32_t cache = 0;
    uint64_t id = 0;
    std::array<uint8_t, 24> rest;
    Key(uint32_t cache_number, const BlockKey& key) : cache(cache_number) {
      std::memcpy(&id, key.bytes.data(), sizeof id);
      std::memcpy(rest.data(), key.bytes.data() + sizeof id, rest.size());
    }
  };
  struct Hash {
    using is_transparent = void;
    size_t operator()(const DiskEntry* entry) const { return absl::HashOf(entry->cache, entry->id, entry->key_rest); }
    size_t operator()(const Key& key) const { return absl::HashOf(key.cache, key.id, key.rest); }
  };
  struct Equal {
    using is_transparent = void;
    template <typename A, typename B>
    bool operator()(const A& a, const B& b) const {
      return Of(a) == Of(b);
    }
    static auto Of(const DiskEntry* entry) { return std::tie(entry->id, entry->cache, entry->key_rest); }
    static auto Of(const Key& key) { return std::tie(key.id, key.cache, key.rest); }
  };
  using Entries = absl::flat_hash_set<DiskEntry*, Hash, Equal>;
  static constexpr size_t kShards = 1024;  // a table that grows looks at all of its entries: of many small ones, few do
  struct Cache {
    CacheDigest digest;
    uint64_t users = 0;  // entries, with those that are gone and not freed
  };
  // What many entries share, by number.
  struct Shared {
    std::string text;
    uint64_t users = 0, bytes = 0;
  };
  class SharedTexts {
   public:
    uint32_t Use(absl::string_view text);
    bool Leave(uint32_t number);  // true: that was the last one
    Shared& operator[](uint32_t number) { return texts_[number]; }
    const Shared& operator[](uint32_t number) const { return texts_[number]; }

   private:
    std::vector<Shared> texts_;
    std::vector<uint32_t> unused_;
    absl::flat_hash_map<std::string, uint32_t> numbers_;
  };

  // Keys are digests; a name that was chosen to be bad makes one shard large, no more.
  static size_t ShardOf(uint64_t id) { return id % kShards; }
  DiskEntry* Allocate();
  uint32_t UseCache(const CacheDigest& digest);
  void LeaveCache(uint32_t number);
  void Count(uint32_t payer, uint64_t bytes, bool more);
  void MakeEvictable(DiskEntry* entry);
  void MakeUnevictable(DiskEntry* entry);

  const std::unique_ptr<RetainingEviction> eviction_;
  std::vector<std::unique_ptr<DiskEntry[]>> slabs_;
  uint64_t allocated_ = 0;  // of the slabs, ever
  std::vector<DiskEntry*> free_;
  bool loading_ = false;
  std::vector<Entries> shards_;  // [kShards], by ShardOf
  std::vector<Cache> caches_;
  std::vector<uint32_t> unused_caches_;
  absl::flat_hash_map<CacheDigest, uint32_t> cache_numbers_;
  SharedTexts shapes_;  // of 2 bytes of layers and the raw bits
  SharedTexts payers_;
  std::set<std::pair<uint64_t, uint32_t>> by_bytes_;  // payers
  uint64_t blocks_ = 0, bytes_ = 0, evictable_bytes_ = 0;
  mutable DiskBlock described_;
};

}  // namespace kvmanager
