#include "attention/table_regions.h"

#include <iterator>

#include "kvmanager/base/status.h"

namespace kvmanager {

TableRegions::TableRegions(uint32_t entries) : free_entries_(entries) {
  if (entries > 0) free_.emplace(0, entries);
}

// The first `count` entries of a free extent.
void TableRegions::Take(std::map<uint32_t, uint32_t>::iterator extent, uint32_t count) {
  const auto [first, size] = *extent;
  KV_CHECK(count <= size);
  free_.erase(extent);
  if (count < size) free_.emplace(first + count, size - count);
  free_entries_ -= count;
}

std::optional<uint32_t> TableRegions::Allocate(uint32_t count) {
  KV_CHECK(count > 0);
  for (auto extent = free_.begin(); extent != free_.end(); ++extent) {
    if (extent->second < count) continue;
    const uint32_t first = extent->first;
    Take(extent, count);
    return first;
  }
  return std::nullopt;
}

bool TableRegions::Extend(uint32_t first, uint32_t count, uint32_t more) {
  const auto behind = free_.find(first + count);
  if (behind == free_.end() || behind->second < more) return false;
  Take(behind, more);
  return true;
}

void TableRegions::Free(uint32_t first, uint32_t count) {
  KV_CHECK(count > 0);
  free_entries_ += count;
  const auto behind = free_.lower_bound(first);
  KV_CHECK(behind == free_.end() || behind->first >= first + count);
  if (behind != free_.end() && behind->first == first + count) {
    count += behind->second;
    free_.erase(behind);
  }
  const auto next = free_.lower_bound(first);
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    KV_CHECK(before->first + before->second <= first);
    if (before->first + before->second == first) {
      before->second += count;
      return;
    }
  }
  free_.emplace(first, count);
}

}  // namespace kvmanager
