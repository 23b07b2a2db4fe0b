// Remembers what was evicted, by id, in memory of a fixed size.
//
// A table of sets of four: a new entry takes the place of the oldest of its set. So Put, Take and Find take O(1) and
// never allocate. Owned by a policy, on its thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>

namespace kvmanager {

/// 16 bytes.
struct Ghost {
  uint64_t id = 0;       // 0: none
  uint32_t entry = 0;    // the policy's: of its ReturnModel, or when it was evicted
  uint16_t put = 0;      // the table's: when
  uint8_t from_end = 0;  // Evictable::Notes'
};

class GhostTable {
 public:
  static constexpr size_t kWays = 4;
  /// 4 MiB of address space, which takes memory as it fills.
  static constexpr size_t kDefaultSize = size_t{1} << 18;

  /// size: entries, a power of two from kWays on.
  explicit GhostTable(size_t size = kDefaultSize);

  /// ghost.id: not 0; `put` is the table's. Returns the ghost that lost its place, of equal id perhaps; its id is 0:
  /// none did.
  Ghost Put(Ghost ghost);
  /// Takes the ghost with this id out. False: there is none, and *ghost is as before.
  bool Take(uint64_t id, Ghost* ghost);

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  Ghost* SetOf(uint64_t id) { return &entries_[(id >> 8) % sets_ * kWays]; }

  const size_t sets_;
  const std::unique_ptr<Ghost[], Free> entries_;  // zeroed by calloc, so that untouched pages take no memory
  uint64_t puts_ = 0;
};

}  // namespace kvmanager
