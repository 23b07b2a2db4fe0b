// Compares the bytes of found blocks with their checksums, away from the store's thread: a sequence that begins with
// them then need not.
#pragma once

#include <cstdint>

namespace kvmanager {

/// Holds its blocks. Made and destroyed on the store's thread, perhaps after the store has closed. Whoever uses it says
/// Next, then CompareOne on any one thread until that is false, and Next again.
class BlockCheck {
 public:
  /// Bytes that were compared are taken for right for so long.
  static constexpr int64_t kVerifiedForNs = int64_t{60} * 1'000'000'000;

  virtual ~BlockCheck() = default;
  /// On the store's thread: drops a block that proved corrupt, and lists the pages to compare next. False: the others
  /// are as they were written, or the store has closed.
  virtual bool Next() = 0;
  /// Compares one page of those listed, which takes as long as reading it. False: none is left.
  virtual bool CompareOne() = 0;
};

}  // namespace kvmanager
