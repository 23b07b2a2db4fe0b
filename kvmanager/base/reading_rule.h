// Which form of a page a query reads, and when a page ages: the one place that says it. The store's leases, the plans
// of the CPU and of a GPU, and hand-offs derive what they read from here.
//
// Of the pages that its sequence appended, a query reads its own page and the `lag_pages` before it raw, older ones
// encoded. A page has *aged* for a sequence once an append, or a crop's newest token, was more than lag_pages pages
// beyond it: from then on it is read encoded whatever the distance. A page that the codec declined is read raw; it
// declines *sinks*, the pages at the beginning of every context, whatever is in them.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvmanager {

struct ReadingRule {
  int page_tokens = 0;
  int lag_pages = 0;

  uint32_t PageOf(uint64_t position) const { return static_cast<uint32_t>(position / page_tokens); }
  /// Pages 0 .. n - 1 that have aged once an append begins at `position`: those more than lag_pages before its page. Of
  /// a query at `position` the pages that are beyond its lag.
  uint32_t AgedPages(uint64_t position) const {
    const uint32_t page = PageOf(position), lag = static_cast<uint32_t>(lag_pages);
    return page > lag ? page - lag : 0;
  }
  /// The first token that a batch of queries which begins at `position` must not reach, if it appends its own tokens:
  /// its queries would read a page encoded that the batch fills.
  uint64_t EndOfAppendAndAttend(uint64_t position) const {
    return (position / page_tokens + static_cast<uint64_t>(lag_pages) + 1) * page_tokens;
  }
  /// Pages 0 .. n - 1 that are sinks: those that begin before `sink_tokens` (CodecInfo::keeps_raw).
  uint64_t SinkPages(uint64_t sink_tokens) const {
    return sink_tokens / page_tokens + (sink_tokens % page_tokens != 0);
  }

  /// The first page that a query on page `own` may read raw, where pages before `aged` have aged; what comes before is
  /// read encoded. lag: pages.
  static uint32_t FirstRawPage(uint32_t own, uint32_t aged, uint32_t lag) {
    return std::min(own, std::max(aged, own > lag ? own - lag : 0));
  }
  /// The same for one page, `distance` pages before the query's own, in the forms that there are. may_lag: the page has
  /// not aged.
  static bool ReadsRaw(bool has_raw, bool has_encoded, bool may_lag, uint32_t distance, uint32_t lag) {
    return !has_encoded || (has_raw && (distance == 0 || (may_lag && distance <= lag)));
  }
};

}  // namespace kvmanager
