// Copies of pages that lie side by side, joined: the copy engines take a large copy at the speed of the bus, and need
// 1.1 us for each small one (docs/kernels.md, "Moving pages").
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kvmanager/memory/page_mover.h"

namespace kvmanager {

/// Makes one copy of copies that follow one another in the list and on both sides, up to kPageCopyBytesMax. end_of:
/// where what was pinned with a byte of the host's ends; no copy goes beyond that.
inline std::vector<PageCopy> JoinNeighbours(std::vector<PageCopy> copies,
                                            absl::FunctionRef<const uint8_t*(const uint8_t*)> end_of) {
  size_t last = 0;
  const uint8_t* end = copies.empty() ? nullptr : end_of(copies[0].host);
  for (size_t i = 1; i < copies.size(); ++i) {
    PageCopy& joined = copies[last];
    const PageCopy& next = copies[i];
    if (joined.device + joined.bytes == next.device && joined.host + joined.bytes == next.host &&
        next.host + next.bytes <= end && next.bytes <= kPageCopyBytesMax - joined.bytes) {
      joined.bytes += next.bytes;
    } else {
      copies[++last] = next;
      end = end_of(next.host);
    }
  }
  if (!copies.empty()) copies.resize(last + 1);
  return copies;
}

}  // namespace kvmanager
