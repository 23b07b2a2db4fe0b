#include "monitoring/readings.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace kvmanager {
namespace {

// 'a="b",c="d"}' into labels; what follows the brace stays in `text`. False: it is none.
bool TakeLabels(absl::string_view* text, ReadingLabels* labels) {
  while (!text->empty() && text->front() != '}') {
    const size_t equals = text->find("=\"");
    if (equals == absl::string_view::npos) return false;
    const absl::string_view name = text->substr(0, equals);
    std::string value;
    size_t at = equals + 2;
    for (; at < text->size() && (*text)[at] != '"'; ++at) {
      char c = (*text)[at];
      if (c == '\\' && at + 1 < text->size()) {
        c = (*text)[++at];
        if (c == 'n') c = '\n';
      }
      value += c;
    }
    if (at == text->size()) return false;
    (*labels)[std::string(name)] = std::move(value);
    text->remove_prefix(at + 1);
    if (!text->empty() && text->front() == ',') text->remove_prefix(1);
  }
  if (text->empty()) return false;
  text->remove_prefix(1);
  return true;
}

bool Matches(const ReadingLabels& labels, const ReadingLabels& wanted) {
  return std::all_of(wanted.begin(), wanted.end(), [&](const auto& label) {
    const auto found = labels.find(label.first);
    return found != labels.end() && found->second == label.second;
  });
}

}  // namespace

Readings Readings::Parse(absl::string_view text) {
  Readings readings;
  for (absl::string_view line : absl::StrSplit(text.substr(0, kTextBytesMax), '\n')) {
    const size_t end = line.find_first_of("{ ");
    if (line.empty() || line.front() == '#' || end == 0 || end == absl::string_view::npos) continue;
    const absl::string_view name = line.substr(0, end);
    Reading reading;
    const bool labelled = line[end] == '{';
    line.remove_prefix(end + 1);
    if (labelled && !TakeLabels(&line, &reading.labels)) continue;
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (words.empty() || !absl::SimpleAtod(words.front(), &reading.value)) continue;
    readings.samples_[name].push_back(std::move(reading));
  }
  return readings;
}

const std::vector<Reading>& Readings::Of(absl::string_view name) const {
  static const auto& kNone = *new std::vector<Reading>;
  const auto found = samples_.find(name);
  return found == samples_.end() ? kNone : found->second;
}

double Readings::Sum(absl::string_view name, const ReadingLabels& labels) const {
  double sum = 0;
  for (const Reading& reading : Of(name)) {
    if (Matches(reading.labels, labels)) sum += reading.value;
  }
  return sum;
}

std::map<double, double> Readings::Buckets(absl::string_view histogram, const ReadingLabels& labels) const {
  std::map<double, double> buckets;
  for (const Reading& reading : Of(absl::StrCat(histogram, "_bucket"))) {
    const auto edge = reading.labels.find("le");
    double upper;
    if (edge == reading.labels.end() || !absl::SimpleAtod(edge->second, &upper) || std::isnan(upper)) continue;
    if (Matches(reading.labels, labels)) buckets[upper] += reading.value;
  }
  return buckets;
}

double QuantileOf(const std::map<double, double>& buckets, double quantile) {
  if (buckets.empty() || !(buckets.rbegin()->second > 0)) return std::numeric_limits<double>::quiet_NaN();
  const double wanted = quantile * buckets.rbegin()->second;
  double lower = 0, below = 0;
  for (const auto& [upper, count] : buckets) {
    if (count >= wanted && count > below) {
      return std::isinf(upper) ? lower : lower + (upper - lower) * std::max(0.0, wanted - below) / (count - below);
    }
    lower = upper;
    below = count;
  }
  return lower;
}

}  // namespace kvmanager
