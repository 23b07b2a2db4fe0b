#include "bench/disaggregated/stacked_bars.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace kvmanager::bench {
namespace {

constexpr double kWidth = 860, kLeft = 150, kRight = 130, kTop = 70, kBar = 16, kGap = 5, kGroupGap = 34, kBottom = 40;
// Distinguishable without colour vision (Okabe and Ito), in an order in which neighbours differ in lightness.
constexpr const char* kColours[] = {"#0072b2", "#e69f00", "#d55e00", "#56b4e9", "#009e73", "#cc79a7", "#000000"};
constexpr size_t kColourCount = sizeof(kColours) / sizeof(kColours[0]);

std::string Escaped(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

/// A step of the axis, 1, 2 or 5 times a power of ten, of which at most eight fit below `top`.
double Step(double top) {
  const double power = std::pow(10, std::floor(std::log10(top / 8)));
  for (const double factor : {1, 2, 5}) {
    if (top / (factor * power) <= 8) return factor * power;
  }
  return 10 * power;
}

}  // namespace

std::string StackedBarsSvg(absl::string_view title, absl::string_view unit, absl::Span<const std::string> parts,
                           absl::Span<const BarGroup> groups) {
  double longest = 1e-9, height = kTop;
  for (const BarGroup& group : groups) {
    height += kGroupGap + double(group.bars.size()) * (kBar + kGap);
    for (const StackedBar& bar : group.bars) {
      double sum = 0;
      for (const double part : bar.parts) sum += part;
      longest = std::max(longest, sum);
    }
  }
  const double scale = (kWidth - kLeft - kRight) / longest, foot = height + 8;
  height += kBottom;

  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n<text x=\"%g\" y=\"22\" font-size=\"15\">%s</text>\n",
      kWidth, height, 12.0, Escaped(title));
  const auto label = [&](double x, double y, const char* anchor, absl::string_view text, const char* more = "") {
    absl::StrAppendFormat(&svg, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\"%s>%s</text>\n", x, y, anchor, more,
                          Escaped(text));
  };
  const auto box = [&](double x, double y, double width, double h, const char* colour, const std::string& said) {
    absl::StrAppendFormat(&svg, "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%g\" fill=\"%s\">", x, y, width, h,
                          colour);
    absl::StrAppend(&svg, "<title>", Escaped(said), "</title></rect>\n");
  };
  double legend = 12;
  for (size_t i = 0; i < parts.size(); ++i) {
    box(legend, 36, 12, 12, kColours[i % kColourCount], parts[i]);
    label(legend + 17, 46, "start", parts[i]);
    legend += 38 + 6.6 * double(parts[i].size());
  }
  const double step = Step(longest);
  for (int i = 0; i * step <= longest * 1.0001; ++i) {
    const double x = kLeft + i * step * scale;
    absl::StrAppendFormat(&svg, "<line x1=\"%.1f\" y1=\"%g\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"#ddd\"/>\n", x, kTop, x,
                          foot);
    label(x, foot + 16, "middle", absl::StrFormat("%g", i * step));
  }
  label(kWidth - kRight + 8, foot + 16, "start", unit);

  double y = kTop;
  for (const BarGroup& group : groups) {
    label(12, y + kGroupGap - 10, "start", group.title, " font-weight=\"bold\"");
    y += kGroupGap;
    for (const StackedBar& bar : group.bars) {
      label(kLeft - 8, y + kBar - 4, "end", bar.label);
      double x = kLeft;
      for (size_t i = 0; i < bar.parts.size(); ++i) {
        const double width = bar.parts[i] * scale;
        const std::string name = i < parts.size() ? parts[i] : std::string();
        box(x, y, width, kBar, kColours[i % kColourCount], absl::StrFormat("%s: %.4g %s", name, bar.parts[i], unit));
        x += width;
      }
      label(x + 6, y + kBar - 4, "start", bar.note);
      y += kBar + kGap;
    }
  }
  return svg + "</svg>\n";
}

}  // namespace kvmanager::bench
