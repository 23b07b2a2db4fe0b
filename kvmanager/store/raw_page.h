// The bytes of raw pages (PageLayout): copied, zeroed, looked at. Any thread.
#pragma once

#include <cstdint>

#include "kvmanager/base/page_layout.h"

namespace kvmanager {

/// Copies the first `tokens` tokens of a raw page.
void CopyRawPrefix(const PageLayout& layout, const uint8_t* from, uint8_t* to, int tokens);
/// Zeroes the tokens of a raw page from `first` on.
void ZeroRawTail(const PageLayout& layout, uint8_t* page, int first);
/// The first NaN or Inf among tokens `first` .. `first + tokens - 1` of a raw page.
struct NonFinite {
  int side = 0;  // 0 = K, 1 = V
  int head = 0;
  int token = 0;  // of the page
  int channel = 0;
};
bool FindNonFinite(const PageLayout& layout, const uint8_t* page, int first, int tokens, NonFinite* where);

}  // namespace kvmanager
