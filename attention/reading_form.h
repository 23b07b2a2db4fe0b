// Which form of a page a query reads: the one rule that plans for the CPU and for a GPU share.
#pragma once

#include <cstdint>

namespace kvmanager {

/// distance: pages from this one to the query's own. A page is read raw while it is the query's own or within the lag,
/// if its raw form is there, and wherever it has no other.
inline bool ReadsRaw(bool has_raw, bool has_encoded, bool lag_applies, uint32_t distance, uint32_t lag_pages) {
  return !has_encoded || (has_raw && (distance == 0 || (lag_applies && distance <= lag_pages)));
}

}  // namespace kvmanager
