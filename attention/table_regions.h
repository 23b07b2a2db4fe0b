// Which part of a table is whose: extents of a fixed range of entries, first fit.
//
// Single-threaded; knows no memory. Invariant: free extents neither overlap nor touch.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace kvmanager {

class TableRegions {
 public:
  explicit TableRegions(uint32_t entries);

  /// count: 1 or more. nullopt: no free extent is as large.
  std::optional<uint32_t> Allocate(uint32_t count);
  /// Adds `more` entries behind an allocated extent, if they are free.
  bool Extend(uint32_t first, uint32_t count, uint32_t more);
  void Free(uint32_t first, uint32_t count);

  uint32_t free_entries() const { return free_entries_; }

 private:
  void Take(std::map<uint32_t, uint32_t>::iterator extent, uint32_t count);

  std::map<uint32_t, uint32_t> free_;  // by first entry: how many
  uint32_t free_entries_;
};

}  // namespace kvmanager
