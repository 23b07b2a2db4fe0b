// The blocks that lost their names last, and why: what an operator who asks for one is told (explanation.h).
//
// A ring with an index by key, allocated once: a note takes the place of the oldest, whatever there is. Nothing else of
// a block is kept. Owned by the store, on its thread.
//
// Invariants (CheckInvariants): 1. a linked entry is in the chain of its key's bucket once, any other in none. 2. At
// most one entry of a key is linked: its newest.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "kvmanager/base/clock.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/store/store_ids.h"

namespace kvmanager {

/// Why a block lost its name. kChecksum: a page of it had other bytes than its checksum says, in memory or (kDiskTier)
/// on the disk. kDiskRecord: the header of its record on the disk was wrong, or the file that had it was cut or gone.
enum class GoneReason : uint8_t { kEvicted = 0, kPurged, kChecksum, kDiskRecord };

/// Beside CacheConfig::device, where a block was.
constexpr int kDiskTier = -2;

struct GoneBlock {
  GoneReason reason = GoneReason::kEvicted;
  int tier = 0;       // a GPU's ordinal, CacheConfig::kHost or kDiskTier
  CacheId cache = 0;  // 0: not open when it went
  // Of tenants (TenantLabel), at most 8 bytes.
  std::string owner;  // whose it was; empty: not known
  std::string taker;  // who took its room; empty: nobody
  double seconds_ago = 0;
};

class GoneBlocks {
 public:
  static constexpr size_t kBlocksMax = 1 << 16;

  /// clock: outlives it. blocks_max: a power of two.
  explicit GoneBlocks(const Clock* clock, size_t blocks_max = kBlocksMax);
  GoneBlocks(const GoneBlocks&) = delete;
  GoneBlocks& operator=(const GoneBlocks&) = delete;

  struct Note {
    GoneReason reason = GoneReason::kEvicted;
    int tier = 0;
    CacheId cache = 0;
    absl::string_view owner, taker;  // longer ones are cut
  };
  /// The block with this key has lost its name now. Takes the same short time however many there are.
  void Add(const BlockKey& key, const Note& note);
  /// How the block went the last time; nothing: it did not, as far as this goes back.
  std::optional<GoneBlock> Find(const BlockKey& key) const;

  /// Keys that Find knows, at most blocks_max().
  size_t size() const { return linked_; }
  size_t blocks_max() const { return ring_.size(); }
  /// How far it goes back: to its making, or to the oldest entry if one was overwritten. Seconds.
  double seconds() const;

  void CheckInvariants() const;

 private:
  using Label = std::array<char, 8>;  // zeros behind the text
  struct Entry {
    std::array<uint8_t, 16> key{};  // its first half tells keys apart
    int64_t gone_ns = 0;
    Label owner{}, taker{};
    CacheId cache = 0;
    int16_t tier = 0;
    GoneReason reason = GoneReason::kEvicted;
    bool linked = false;
  };
  static_assert(sizeof(Entry) <= 48);
  static constexpr uint32_t kNone = UINT32_MAX;

  static std::array<uint8_t, 16> KeyOf(const BlockKey& key);
  size_t BucketOf(const std::array<uint8_t, 16>& key) const;
  /// The place in a chain that has the entry of this key, or kNone at the chain's end.
  const uint32_t* LinkOf(const std::array<uint8_t, 16>& key) const;
  void Unlink(uint32_t* link);

  const Clock* const clock_;
  const int64_t made_ns_;
  std::vector<Entry> ring_;
  std::vector<uint32_t> heads_;  // [ring_.size()] of chains of entries, by BucketOf
  std::vector<uint32_t> next_;   // [ring_.size()] of a linked entry in its chain
  uint64_t added_ = 0;           // the next one's place is added_ % ring_.size()
  size_t linked_ = 0;
};

}  // namespace kvmanager
