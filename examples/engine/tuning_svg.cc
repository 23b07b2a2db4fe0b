// The plot of a TuneResult.
#include <algorithm>
#include <cmath>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "examples/engine/tuning.h"

namespace kvmanager::engine {
namespace {

constexpr double kWidth = 760, kHeight = 460, kLeft = 70, kRight = 190, kTop = 40, kBottom = 60;
// Distinguishable without colour vision (Okabe and Ito).
constexpr const char* kColours[] = {"#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000"};
constexpr size_t kColourCount = sizeof(kColours) / sizeof(kColours[0]);
/// Losses below this are drawn at it: the axis is logarithmic.
constexpr double kLossMin = 1e-4;

std::string Escaped(absl::string_view text) {
  return absl::StrReplaceAll(text, {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}});
}

struct Axis {
  double low, high;  // logarithms
  double from, to;   // pixels
  double At(double value) const { return from + (std::log(value) - low) / (high - low) * (to - from); }
};

}  // namespace

std::string TuneSvg(const TuneResult& result, double max_loss, absl::string_view title) {
  double bytes_min = result.raw.bytes_per_token_head, bytes_max = 1, loss_max = std::max(max_loss, kLossMin) * 2;
  for (const RatePoint& p : result.points) {
    bytes_min = std::min(bytes_min, p.bytes_per_token_head);
    bytes_max = std::max(bytes_max, p.bytes_per_token_head);
    loss_max = std::max(loss_max, p.loss * 1.3);
  }
  bytes_max = std::max(bytes_max, bytes_min * 1.01);
  const Axis x{std::log(bytes_min * 0.92), std::log(bytes_max * 1.08), kLeft, kWidth - kRight};
  const Axis y{std::log(kLossMin), std::log(loss_max), kHeight - kBottom, kTop};
  std::string svg = absl::StrFormat(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" font-family=\"sans-serif\" font-size=\"12\">\n"
      "<rect width=\"100%%\" height=\"100%%\" fill=\"white\"/>\n<text x=\"%g\" y=\"22\" font-size=\"15\">%s</text>\n",
      kWidth, kHeight, kLeft, Escaped(title));
  const auto label = [&](double at_x, double at_y, const char* anchor, const std::string& text) {
    absl::StrAppendFormat(&svg, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>\n", at_x, at_y, anchor,
                          Escaped(text));
  };
  const auto rule = [&](double x1, double y1, double x2, double y2, const char* style) {
    absl::StrAppendFormat(&svg, "<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" %s/>\n", x1, y1, x2, y2, style);
  };
  for (const double bytes : {16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 512}) {
    if (std::log(bytes) < x.low || std::log(bytes) > x.high) continue;
    rule(x.At(bytes), kTop, x.At(bytes), kHeight - kBottom, "stroke=\"#ddd\"");
    label(x.At(bytes), kHeight - kBottom + 18, "middle", absl::StrCat(bytes));
  }
  for (const double loss : {1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 0.1, 0.2, 0.5}) {
    if (std::log(loss) > y.high) continue;
    rule(kLeft, y.At(loss), kWidth - kRight, y.At(loss), "stroke=\"#ddd\"");
    label(kLeft - 8, y.At(loss) + 4, "end", absl::StrFormat("%g%%", 100 * loss));
  }
  label((kLeft + kWidth - kRight) / 2, kHeight - 18, "middle", "bytes per token and KV head (K and V)");
  absl::StrAppendFormat(&svg,
                        "<text transform=\"translate(18 %g) rotate(-90)\" text-anchor=\"middle\">loss of per-byte "
                        "perplexity</text>\n",
                        kHeight / 2);
  if (max_loss > kLossMin) {
    rule(kLeft, y.At(max_loss), kWidth - kRight, y.At(max_loss), "stroke=\"#c00\" stroke-dasharray=\"6 4\"");
    label(kWidth - kRight + 6, y.At(max_loss) + 4, "start", absl::StrFormat("bound %g%%", 100 * max_loss));
  }
  std::string frontier;
  for (size_t i = 0; i < result.points.size(); ++i) {
    if (!OnFrontier(result.points, i)) continue;
    const RatePoint& p = result.points[i];
    absl::StrAppendFormat(&frontier, "%.1f,%.1f ", x.At(p.bytes_per_token_head), y.At(std::max(p.loss, kLossMin)));
  }
  absl::StrAppend(&svg, "<polyline points=\"", frontier, "\" fill=\"none\" stroke=\"#999\"/>\n");
  std::map<std::string, const char*> colours;
  for (size_t i = 0; i < result.points.size(); ++i) {
    const RatePoint& p = result.points[i];
    const char* colour = colours.emplace(p.family, kColours[colours.size() % kColourCount]).first->second;
    absl::StrAppendFormat(
        &svg, "<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%d\" fill=\"%s\"><title>%s: %.1f B, %+.2f%%</title></circle>\n",
        x.At(p.bytes_per_token_head), y.At(std::max(p.loss, kLossMin)), int(i) == result.best ? 7 : 4, colour,
        Escaped(p.codec), p.bytes_per_token_head, 100 * p.loss);
  }
  double at = kTop + 8;
  for (const auto& [family, colour] : colours) {
    absl::StrAppendFormat(&svg, "<circle cx=\"%g\" cy=\"%g\" r=\"4\" fill=\"%s\"/>\n", kWidth - kRight + 14, at,
                          colour);
    label(kWidth - kRight + 24, at + 4, "start", family);
    at += 18;
  }
  return svg + "</svg>\n";
}

}  // namespace kvmanager::engine
