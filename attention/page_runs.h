// Sets of page numbers, as ascending runs: few where whole stretches of a context are alike.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/types/span.h"

namespace kvmanager {

/// Pages [first, end), not empty.
struct PageRun {
  uint32_t first = 0;
  uint32_t end = 0;
  friend bool operator==(const PageRun&, const PageRun&) = default;
};

/// A set of page numbers; a value. Its runs are ascending, and neither overlap nor touch.
class PageRuns {
 public:
  static constexpr uint32_t kAll = UINT32_MAX;  // the end of a run without end

  absl::Span<const PageRun> runs() const { return runs_; }
  bool empty() const { return runs_.empty(); }
  friend bool operator==(const PageRuns&, const PageRuns&) = default;

  void Add(uint32_t first, uint32_t end) {
    if (first >= end) return;
    // Runs that the new one overlaps or touches become part of it.
    const auto from = std::find_if(runs_.begin(), runs_.end(), [&](const PageRun& r) { return r.end >= first; });
    const auto to = std::find_if(from, runs_.end(), [&](const PageRun& r) { return r.first > end; });
    if (from == to) {
      runs_.insert(from, {first, end});
      return;
    }
    from->end = std::max(end, (to - 1)->end);
    from->first = std::min(first, from->first);
    runs_.erase(from + 1, to);
  }

  void Remove(uint32_t first, uint32_t end) {
    if (first >= end) return;
    for (size_t i = 0; i < runs_.size();) {
      PageRun& run = runs_[i];
      if (run.end <= first || run.first >= end) {
        ++i;
      } else if (run.first < first && run.end > end) {
        const PageRun rest = {end, run.end};
        run.end = first;
        runs_.insert(runs_.begin() + i + 1, rest);
        return;
      } else if (run.first < first) {
        run.end = first;
        ++i;
      } else if (run.end > end) {
        run.first = end;
        ++i;
      } else {
        runs_.erase(runs_.begin() + i);
      }
    }
  }

  /// Calls visit(run) for what of each run lies in [first, end), ascending, until it returns false.
  template <typename Visit>
  void ForEachIn(uint32_t first, uint32_t end, Visit visit) const {
    for (const PageRun& run : runs_) {
      if (run.first >= end) return;
      const PageRun part = {std::max(run.first, first), std::min(run.end, end)};
      if (part.first < part.end && !visit(part)) return;
    }
  }
  /// The first member in [first, end), or `end`.
  uint32_t FirstIn(uint32_t first, uint32_t end) const {
    uint32_t found = end;
    ForEachIn(first, end, [&](const PageRun& run) {
      found = run.first;
      return false;
    });
    return found;
  }

 private:
  std::vector<PageRun> runs_;
};

}  // namespace kvmanager
