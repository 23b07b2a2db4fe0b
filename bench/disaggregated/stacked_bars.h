// A chart of horizontal stacked bars in groups, as SVG with nothing but the standard library. Values; any thread.
#pragma once

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace kvmanager::bench {

struct StackedBar {
  std::string label;
  std::vector<double> parts;  // one per part of the chart, each at least 0
  std::string note;           // behind the bar
};

struct BarGroup {
  std::string title;
  std::vector<StackedBar> bars;
};

/// parts: names, at most 7. unit: of the axis, which all groups share.
std::string StackedBarsSvg(absl::string_view title, absl::string_view unit, absl::Span<const std::string> parts,
                           absl::Span<const BarGroup> groups);

}  // namespace kvmanager::bench
