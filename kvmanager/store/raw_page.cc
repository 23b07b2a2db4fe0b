#include "kvmanager/store/raw_page.h"

#include <cstring>

#include "kvmanager/base/finite.h"

namespace kvmanager {

void CopyRawPrefix(const PageLayout& layout, const uint8_t* from, uint8_t* to, int tokens) {
  const size_t row_bytes = layout.head_dim * DTypeBytes(layout.dtype);
  for (int side = 0; side < 2; ++side) {
    for (int head = 0; head < layout.kv_heads; ++head) {
      const size_t offset = layout.raw_offset(side, head, 0);
      std::memcpy(to + offset, from + offset, tokens * row_bytes);
    }
  }
}

void ZeroRawTail(const PageLayout& layout, uint8_t* page, int first) {
  const size_t row_bytes = layout.head_dim * DTypeBytes(layout.dtype);
  for (int side = 0; side < 2; ++side) {
    for (int head = 0; head < layout.kv_heads; ++head) {
      std::memset(page + layout.raw_offset(side, head, first), 0, (layout.page_tokens - first) * row_bytes);
    }
  }
}

bool FindNonFinite(const PageLayout& layout, const uint8_t* page, int first, int tokens, NonFinite* where) {
  const size_t count = size_t(tokens) * layout.head_dim;
  for (int side = 0; side < 2; ++side) {
    for (int head = 0; head < layout.kv_heads; ++head) {
      const size_t i = FindNonFinite(layout.dtype, page + layout.raw_offset(side, head, first), count);
      if (i == count) continue;
      *where = {side, head, first + static_cast<int>(i / layout.head_dim), static_cast<int>(i % layout.head_dim)};
      return true;
    }
  }
  return false;
}

}  // namespace kvmanager
