// Room for what the host passes to the device: pieces of pinned memory, taken in turn, each free again when the device
// has stored its number.
//
// Single-threaded but for `done`, which the device writes. Does not own the memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "kvmanager/base/status.h"

namespace kvmanager {

class UploadRing {
 public:
  static constexpr size_t kAlign = 64;

  UploadRing(uint8_t* memory, size_t bytes, uint64_t* done) : memory_(memory), bytes_(bytes), done_(done) {}

  /// A piece of `bytes`, 1..largest(); aligned. nullptr: the device has yet to read others. What was taken and not
  /// submitted is taken back by the next call.
  uint8_t* Take(size_t bytes) {
    KV_CHECK(bytes > 0 && bytes <= largest());
    Reclaim();
    // Positions count on for ever; a piece does not go past the memory's end.
    uint64_t first = (end_ + kAlign - 1) / kAlign * kAlign;
    if (first % bytes_ + bytes > bytes_) first = (first / bytes_ + 1) * bytes_;
    if (first + bytes - begin_ > bytes_) return nullptr;
    taken_end_ = first + bytes;
    return memory_ + first % bytes_;
  }
  /// The piece taken last is on its way: the number that the device shall store to `done` when it has read it. Numbers
  /// grow by one.
  uint64_t Submit() {
    end_ = taken_end_;
    pieces_.push_back({++submitted_, end_});
    return submitted_;
  }
  /// Whatever is under way, a piece of this size can be taken in the end.
  size_t largest() const { return bytes_ / 2 / kAlign * kAlign; }

 private:
  struct Piece {
    uint64_t number;
    uint64_t end;
  };
  void Reclaim() {
    const uint64_t done = std::atomic_ref<uint64_t>(*done_).load(std::memory_order_acquire);
    while (!pieces_.empty() && pieces_.front().number <= done) {
      begin_ = pieces_.front().end;
      pieces_.pop_front();
    }
    if (pieces_.empty()) begin_ = end_ = 0;
  }

  uint8_t* const memory_;
  const size_t bytes_;
  uint64_t* const done_;
  uint64_t begin_ = 0, end_ = 0, taken_end_ = 0;  // positions: what is under way lies in [begin_, end_)
  uint64_t submitted_ = 0;
  std::deque<Piece> pieces_;
};

}  // namespace kvmanager
