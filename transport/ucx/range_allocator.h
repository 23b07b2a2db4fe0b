// Allocates ranges of a piece of memory, first fit. A value of one thread; it does not touch the memory.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>

#include "absl/types/optional.h"
#include "kvmanager/base/status.h"

namespace kvmanager::ucx {

class RangeAllocator {
 public:
  static constexpr uint64_t kAlign = 64;  // bytes: of a range's begin and length

  /// bytes: a multiple of kAlign, at least 1.
  explicit RangeAllocator(uint64_t bytes) : bytes_(bytes) { free_[0] = bytes; }

  /// The begin of a free range of `bytes` bytes, at least 1; nothing if no free range is large enough.
  absl::optional<uint64_t> Take(uint64_t bytes) {
    const uint64_t length = Length(bytes);
    for (auto free = free_.begin(); free != free_.end(); ++free) {
      if (free->second < length) continue;
      const uint64_t at = free->first;
      const uint64_t rest = free->second - length;
      free_.erase(free);
      if (rest > 0) free_[at + length] = rest;
      return at;
    }
    return absl::nullopt;
  }

  /// Frees a range of Take, by its begin and the same number of bytes.
  void GiveBack(uint64_t at, uint64_t bytes) {
    uint64_t length = Length(bytes);
    auto next = free_.lower_bound(at);
    KV_CHECK(next == free_.end() || at + length <= next->first);
    if (next != free_.end() && next->first == at + length) {
      length += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      KV_CHECK(before->first + before->second <= at);
      if (before->first + before->second == at) {
        before->second += length;
        return;
      }
    }
    free_[at] = length;
  }

  bool all_free() const { return free_.size() == 1 && free_.begin()->second == bytes_; }

 private:
  static uint64_t Length(uint64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

  const uint64_t bytes_;
  std::map<uint64_t, uint64_t> free_;  // begin to length; no two touch
};

}  // namespace kvmanager::ucx
