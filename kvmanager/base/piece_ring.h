// Which places of a ring are taken: pieces in one piece each, given back in the order in which they were taken.
//
// Single-threaded; knows no memory.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include "kvmanager/base/status.h"

namespace kvmanager {

class PieceRing {
 public:
  explicit PieceRing(uint32_t places) : places_(places) {}

  /// The first place of a piece of `count`, which is 1 or more. nullopt: there is no room now; a piece of up to half of
  /// the ring finds room once all others are given back, whatever was taken before.
  std::optional<uint32_t> Take(uint32_t count) {
    KV_CHECK(count > 0);
    if (pieces_.empty()) next_ = used_ = 0;
    const bool wraps = count > places_ - next_;
    const uint32_t skipped = wraps ? places_ - next_ : 0;  // a piece does not go past the end
    if (count > places_ || skipped + count > places_ - used_) return std::nullopt;
    const uint32_t first = wraps ? 0 : next_;
    pieces_.push_back(skipped + count);
    used_ += skipped + count;
    next_ = first + count;
    return first;
  }
  /// The oldest piece is given back.
  void Release() {
    KV_CHECK(!pieces_.empty());
    used_ -= pieces_.front();
    pieces_.pop_front();
  }
  /// Of pieces that are taken, with what was left out before them.
  uint32_t used() const { return pieces_.empty() ? 0 : used_; }
  uint32_t places() const { return places_; }

 private:
  const uint32_t places_;
  uint32_t next_ = 0, used_ = 0;
  std::deque<uint32_t> pieces_;  // places of each, oldest first
};

}  // namespace kvmanager
