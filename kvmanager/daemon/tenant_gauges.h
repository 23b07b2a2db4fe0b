// Gauges of what each tenant holds, set anew once a second from listings of the caches and of the shares of the pools.
//
// Owned by the Server; the event loop's thread alone. Tenants come and go as clients open caches, so series go, too,
// and are bounded: the largest have series of their own.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kvmanager/store/page_store.h"
#include "monitoring/metrics.h"

namespace kvmanager {

class TenantGauges {
 public:
  static constexpr size_t kTenantsMax = 64;  // with series of their own: the largest; the rest is tenant "others"

  explicit TenantGauges(Metrics* metrics);

  void Set(PageStore& store);

 private:
  using Series = std::map<MetricLabels, double>;
  struct Family {
    std::string name, help;
    std::map<MetricLabels, prometheus::Gauge*> gauges;
  };
  void SetUse(const CacheDirectory& caches);
  void SetShares(const std::vector<PoolShare>& shares);
  void Set(Family* family, const Series& series);

  Metrics* const metrics_;
  Family bytes_, sequences_, published_blocks_, pool_bytes_;
};

}  // namespace kvmanager
