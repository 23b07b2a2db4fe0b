#include "monitoring/metrics.h"

#include <prometheus/text_serializer.h>

#include "absl/strings/match.h"
#include "absl/strings/str_join.h"
#include "kvmanager/base/status.h"

namespace kvmanager {

Metrics::Metrics() : registry_(std::make_shared<prometheus::Registry>()) {}

void Metrics::Declare(MetricInfo info, const MetricLabels& labels) {
  KV_CHECK(!info.help.empty());
  for (const auto& [label, value] : labels) info.labels.push_back(label);
  MutexLock lock(mutex_);
  const auto [it, is_new] = catalogue_.emplace(info.name, info);
  KV_CHECK(it->second == info);
}

prometheus::Counter& Metrics::Counter(const std::string& name, const std::string& help, const MetricLabels& labels) {
  KV_CHECK(absl::EndsWith(name, "_total"));
  Declare({kPrefix + name, "counter", {}, help}, labels);
  return prometheus::BuildCounter().Name(kPrefix + name).Help(help).Register(*registry_).Add(labels);
}

prometheus::Gauge& Metrics::Gauge(const std::string& name, const std::string& help, const MetricLabels& labels) {
  KV_CHECK(!absl::EndsWith(name, "_total"));
  Declare({kPrefix + name, "gauge", {}, help}, labels);
  return prometheus::BuildGauge().Name(kPrefix + name).Help(help).Register(*registry_).Add(labels);
}

void Metrics::RemoveGauge(const std::string& name, const std::string& help, prometheus::Gauge* gauge) {
  prometheus::BuildGauge().Name(kPrefix + name).Help(help).Register(*registry_).Remove(gauge);
}

prometheus::Histogram& Metrics::Histogram(const std::string& name, const std::string& help,
                                          const std::vector<double>& bounds, const MetricLabels& labels) {
  KV_CHECK(absl::EndsWith(name, "_seconds") || absl::EndsWith(name, "_bytes") || absl::EndsWith(name, "_error"));
  Declare({kPrefix + name, "histogram", {}, help}, labels);
  return prometheus::BuildHistogram().Name(kPrefix + name).Help(help).Register(*registry_).Add(labels, bounds);
}

std::vector<MetricInfo> Metrics::Catalogue() const {
  MutexLock lock(mutex_);
  std::vector<MetricInfo> all;
  for (const auto& [name, info] : catalogue_) all.push_back(info);
  return all;
}

std::string Metrics::CatalogueMarkdown() const {
  std::string text = "| metric | type | labels | meaning |\n| --- | --- | --- | --- |\n";
  for (const MetricInfo& info : Catalogue()) {
    absl::StrAppend(&text, "| `", info.name, "` | ", info.type, " | ", absl::StrJoin(info.labels, ", "), " | ",
                    info.help, " |\n");
  }
  return text;
}

std::string Metrics::Text() const { return prometheus::TextSerializer().Serialize(registry_->Collect()); }

std::vector<double> ExponentialBounds(double first, double factor, int count) {
  std::vector<double> bounds;
  for (double edge = first; static_cast<int>(bounds.size()) < count; edge *= factor) bounds.push_back(edge);
  return bounds;
}

}  // namespace kvmanager
