// A metrics page that was read: values by name and labels. What the daemon's own page and kvctl calculate from.
//
// Values that copy; any thread.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"

namespace kvmanager {

using ReadingLabels = std::map<std::string, std::string>;

struct Reading {
  ReadingLabels labels;
  double value = 0;
};

class Readings {
 public:
  static constexpr size_t kTextBytesMax = 16 << 20;  // what is behind is not read

  /// The text format of Prometheus. Lines that are none of it are skipped, so text from anywhere may be given.
  static Readings Parse(absl::string_view text);

  /// The samples of a name ("kvmanager_encode_seconds_bucket" of a histogram); empty if there are none.
  const std::vector<Reading>& Of(absl::string_view name) const;
  bool Has(absl::string_view name) const { return samples_.contains(name); }
  /// Over the samples that have all of these labels; 0 if there are none.
  double Sum(absl::string_view name, const ReadingLabels& labels = {}) const;
  /// A histogram's observations at or below each bucket's upper edge, summed over the samples with these labels.
  std::map<double, double> Buckets(absl::string_view histogram, const ReadingLabels& labels = {}) const;

 private:
  absl::flat_hash_map<std::string, std::vector<Reading>> samples_;
};

/// The value below which `quantile` (0..1) of a histogram's observations lie, linear inside a bucket and beginning at
/// 0; the last finite edge for those beyond it. NaN without observations.
double QuantileOf(const std::map<double, double>& buckets, double quantile);

}  // namespace kvmanager
