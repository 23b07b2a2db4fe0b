// What the daemon's page shows: a frame of its metrics each second, five minutes of history, and the last errors, as
// JSON.
//
// Owned by the WebPage that serves it, whose thread alone calls it. It reads the Metrics object as a scrape does, once
// per Sample however many look, and nothing else of the daemon.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "monitoring/frame.h"
#include "monitoring/metrics.h"
#include "monitoring/recent_errors.h"

namespace kvmanager {

/// What does not change while the daemon runs. Nothing here or in the JSON is secret: tenants are labels of them.
struct DashboardFacts {
  std::string version;
  std::string listen, peer_listen, metrics_listen;  // empty: none
  std::string cpu_target;
  std::string gpus;
  int threads = 0;
  int64_t start_ns = 0;  // of the clock that Sample is told
};

class Dashboard {
 public:
  static constexpr size_t kHistoryMax = 300;  // samples: five minutes of one a second
  static constexpr size_t kRowsMax = 32;      // of the tables of memory by form, by tenant, and of quality

  /// Both outlive it.
  Dashboard(const Metrics* metrics, const RecentErrors* errors, DashboardFacts facts)
      : metrics_(metrics), errors_(errors), facts_(std::move(facts)) {}

  /// Reads the metrics. unix_ms: the wall clock, for people. At most once a millisecond.
  void Sample(int64_t now_ns, int64_t unix_ms);
  /// The state as of the last Sample; "{}" before the first. docs/operating.md says what is in it.
  std::shared_ptr<const std::string> Json() const { return json_; }

 private:
  struct Moment {
    int64_t unix_ms;
    Frame frame;
  };

  const Metrics* const metrics_;
  const RecentErrors* const errors_;
  const DashboardFacts facts_;
  std::optional<Readings> last_;
  int64_t last_ns_ = 0;
  std::deque<Moment> history_;
  std::shared_ptr<const std::string> json_ = std::make_shared<const std::string>("{}");
};

}  // namespace kvmanager
