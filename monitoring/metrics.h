// Metrics of the daemon: a thin use of prometheus-cpp that fixes names, units and label sets, and knows its own
// catalogue.
//
// main() owns one Metrics object and hands it to the constructors of each module's metrics struct, so that every series
// exists from the start. Adding series is for start-up and for the thread that owns the module; the counters, gauges
// and histograms that it returns live as long as the Metrics object and may be touched by any thread.
#pragma once

#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "kvmanager/base/mutex.h"

namespace kvmanager {

using MetricLabels = std::map<std::string, std::string>;

/// One line of docs/metrics.md.
struct MetricInfo {
  std::string name;                 // with the prefix
  std::string type;                 // "counter", "gauge", "histogram"
  std::vector<std::string> labels;  // names, sorted
  std::string help;
  friend bool operator==(const MetricInfo&, const MetricInfo&) = default;
};

class Metrics {
 public:
  static constexpr char kPrefix[] = "kvmanager_";

  Metrics();

  /// The series `name{labels}`, made on first use. `name` is without the prefix; a counter ends in _total, a histogram
  /// in _seconds, _bytes or _error (a ratio), a gauge in neither _total. All series of a name have the same type, help
  /// and label names (aborts).
  prometheus::Counter& Counter(const std::string& name, const std::string& help, const MetricLabels& labels = {});
  prometheus::Gauge& Gauge(const std::string& name, const std::string& help, const MetricLabels& labels = {});
  /// Takes a series away again, which nobody may touch any more; its name stays in the catalogue.
  void RemoveGauge(const std::string& name, const std::string& help, prometheus::Gauge* gauge);
  /// bounds: upper edges of the buckets, rising.
  prometheus::Histogram& Histogram(const std::string& name, const std::string& help, const std::vector<double>& bounds,
                                   const MetricLabels& labels = {});

  /// Every metric made so far, by name.
  std::vector<MetricInfo> Catalogue() const;
  /// The catalogue as the table of docs/metrics.md.
  std::string CatalogueMarkdown() const;
  /// All series in the text format that the exporter serves.
  std::string Text() const;

 private:
  void Declare(MetricInfo info, const MetricLabels& labels);

  std::shared_ptr<prometheus::Registry> registry_;
  mutable Mutex mutex_;
  std::map<std::string, MetricInfo> catalogue_ ABSL_GUARDED_BY(mutex_);
};

/// Bucket edges `first`, first * factor, ... : `count` of them.
std::vector<double> ExponentialBounds(double first, double factor, int count);

}  // namespace kvmanager
