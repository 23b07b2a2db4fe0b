// Allocates ranges of a piece of memory, the smallest free one that is large enough. A value of one thread; it does not
// touch the memory.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "absl/types/optional.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

class RangeAllocator {
 public:
  static constexpr uint64_t kAlign = 64;  // bytes: of a range's begin and length

  /// bytes: a multiple of kAlign, at least 1. all_free: else all of it is taken, and given back range by range.
  explicit RangeAllocator(uint64_t bytes, bool all_free = true) : bytes_(bytes) {
    if (all_free) Add(0, bytes);
  }

  /// The begin of a free range of `bytes` bytes, at least 1; nothing if no free range is large enough. O(log n).
  absl::optional<uint64_t> Take(uint64_t bytes) {
    const uint64_t length = Length(bytes);
    const auto fits = by_length_.lower_bound({length, 0});
    if (fits == by_length_.end()) return absl::nullopt;
    const auto [free, at] = *fits;
    Remove(free_.find(at));
    if (free > length) Add(at + length, free - length);
    return at;
  }

  /// Frees a range of Take, by its begin and the same number of bytes. O(log n).
  void GiveBack(uint64_t at, uint64_t bytes) {
    uint64_t length = Length(bytes);
    auto next = free_.lower_bound(at);
    KV_CHECK(next == free_.end() || at + length <= next->first);
    if (next != free_.end() && next->first == at + length) {
      length += next->second;
      next = Remove(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      KV_CHECK(before->first + before->second <= at);
      if (before->first + before->second == at) {
        at = before->first;
        length += before->second;
        Remove(before);
      }
    }
    Add(at, length);
  }

  bool all_free() const { return free_.size() == 1 && free_.begin()->second == bytes_; }

 private:
  using Free = std::map<uint64_t, uint64_t>;

  static uint64_t Length(uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
  void Add(uint64_t at, uint64_t length) {
    free_.emplace(at, length);
    by_length_.emplace(length, at);
  }
  Free::iterator Remove(Free::iterator range) {
    by_length_.erase({range->second, range->first});
    return free_.erase(range);
  }

  uint64_t bytes_;
  Free free_;                                          // begin to length; no two touch
  std::set<std::pair<uint64_t, uint64_t>> by_length_;  // and begin
};

}  // namespace kvmanager
