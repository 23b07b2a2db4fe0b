// What of a pool's memory is published, written down beside it: a later process finds the blocks again, wherever this
// one was killed.
//
// A region of its own that is kept as the pool's are (memory_keeper.h). It has an entry for each block: who it is,
// where its pages are, and their checksums. An entry counts once its checksum is right, which is written last; it is
// taken back before a page of the block changes. So what is found is what was published, or was on its way out; whoever
// uses a page compares it with its checksum first. Clients choose some bytes of an entry; checksums have a seed that no
// client knows, so nothing within an entry passes for one.
//
//   64 bytes: "kvkept01", bytes of this region, bytes of the pool and of a slab, seed, checksum of these
//   entries, each from a multiple of 64 on: 8 checksum of what follows (0: none), 4 bytes of the entry, 4 index, 4
//   tokens, 2 pages, 2 bytes of the tenant's name, 32 cache, 64 name, then for each page 4 slot, 2 size of its area,
//   1 raw, 1 rung, 8 bytes of the slot, 8 checksum; last the tenant's name
//
// On the store's thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/base/range_allocator.h"
#include "kvmanager/memory/region.h"
#include "kvmanager/memory/slab_allocator.h"

namespace kvmanager {

/// One page of a block, in the one form that stays.
struct KeptPage {
  SlabAllocator::SlotPlace place;
  bool raw = false;       // else encoded
  uint64_t checksum = 0;  // XXH3-64
  uint8_t rung = 0;       // of the encoded form (Codec::rung)
};

struct KeptBlock {
  CacheDigest cache;
  BlockName name;
  uint32_t index = 0;           // its place in its sequence
  uint32_t tokens = 0;          // of a block
  std::string tenant;           // the cache's
  std::vector<KeptPage> pages;  // [layers], 1..kPagesMax
};

class KeptManifest {
 public:
  static constexpr size_t kPagesMax = 1024, kTenantBytesMax = 512;
  static constexpr uint64_t kBytesMin = 1 << 20;
  static constexpr char kFormat[] = "kvkept01";

  /// The pool that it is of.
  struct Pool {
    uint64_t bytes = 0, slab_bytes = 0;
  };
  /// Errors: Region's.
  static absl::StatusOr<std::unique_ptr<KeptManifest>> Create(const Pool& pool);
  /// Of a process that has ended; takes its keeper_fd(). Recover comes next. Errors: FAILED_PRECONDITION (it is none,
  /// or of another pool or format).
  static absl::StatusOr<std::unique_ptr<KeptManifest>> TakeOver(int fd, const Pool& pool);

  /// Calls `fn` with each entry that is whole; what is no entry is room. Before anything else; of a new manifest there
  /// is none.
  void Recover(absl::FunctionRef<void(uint64_t entry, const KeptBlock& block)> fn);
  /// The block as it was written.
  KeptBlock Read(uint64_t entry) const;
  /// The entry of a block; 0: there is no room, or its parts are out of range.
  uint64_t Write(const KeptBlock& block);
  /// The pages of the block are about to change.
  void Erase(uint64_t entry);

  int keeper_fd() const { return region_->keeper_fd(); }
  static uint64_t BytesFor(const Pool& pool) { return std::max(kBytesMin, pool.bytes / kPoolShare / kPage * kPage); }

 private:
  static constexpr uint64_t kAlign = RangeAllocator::kAlign;
  static constexpr uint64_t kPage = 4096;     // of a region
  static constexpr uint64_t kPoolShare = 32;  // an entry takes 120 bytes, and 24 a page
  struct Head;
  struct PageEntry;
  struct RegionHead;

  KeptManifest(std::unique_ptr<Region> region, uint64_t seed, bool all_free);
  static RegionHead HeadOf(const Pool& pool, uint64_t seed);
  void ReadInto(uint64_t at, KeptBlock* block) const;
  uint64_t CheckOf(const uint8_t* entry, uint64_t bytes) const;
  /// Bytes of the entry that is at `at`; 0: there is none that is whole.
  uint64_t EntryBytes(uint64_t at) const;

  const std::unique_ptr<Region> region_;
  const uint64_t seed_;
  RangeAllocator room_;  // behind the head of the region
  bool is_recovered_;
};

}  // namespace kvmanager
