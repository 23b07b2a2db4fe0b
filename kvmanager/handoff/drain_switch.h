// Whether this daemon drains: it then accepts no new sequences and no hand-offs. The loop's thread.
#pragma once

#include "monitoring/metrics.h"

namespace kvmanager {

class DrainSwitch {
 public:
  explicit DrainSwitch(Metrics* metrics)
      : gauge_(metrics->Gauge("draining", "1 while no new sequences are accepted")) {}
  DrainSwitch(const DrainSwitch&) = delete;
  DrainSwitch& operator=(const DrainSwitch&) = delete;

  bool on() const { return on_; }
  void Set(bool on) {
    on_ = on;
    gauge_.Set(on ? 1 : 0);
  }

 private:
  bool on_ = false;
  prometheus::Gauge& gauge_;
};

}  // namespace kvmanager
