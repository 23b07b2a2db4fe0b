#include "kvmanager/daemon/tenant_gauges.h"

#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/tenant_label.h"

namespace kvmanager {
namespace {

constexpr char kOthers[] = "others";

struct Use {
  std::map<std::pair<std::string, std::string>, uint64_t> bytes;  // by tier and form
  uint64_t all_bytes = 0, sequences = 0, published_blocks = 0;
};

}  // namespace

TenantGauges::TenantGauges(Metrics* metrics)
    : metrics_(metrics),
      bytes_{"tenant_bytes", "Bytes of a tenant's pages, shared ones once, looked at once a second", {}},
      sequences_{"tenant_sequences", "A tenant's open sequences, looked at once a second", {}},
      published_blocks_{"tenant_published_blocks", "A tenant's blocks that can be found by name", {}},
      pool_bytes_{"tenant_pool_bytes", "Bytes of whole slabs that a payer's tenants have, and may have", {}} {}

void TenantGauges::Set(PageStore& store) {
  SetUse(store.caches());
  SetShares(store.report().Shares());
}

void TenantGauges::SetShares(const std::vector<PoolShare>& shares) {
  std::map<std::string, uint64_t> payers;
  for (const PoolShare& share : shares) payers[share.payer] += share.bytes;
  std::vector<std::pair<uint64_t, std::string>> by_size;
  by_size.reserve(payers.size());
  for (const auto& [payer, bytes] : payers) by_size.emplace_back(bytes, payer);
  std::sort(by_size.rbegin(), by_size.rend());
  std::map<std::string, std::string> labels;
  for (size_t i = 0; i < by_size.size() && i < kTenantsMax; ++i)
    labels[by_size[i].second] = TenantLabel(by_size[i].second);
  Series series;
  for (const PoolShare& share : shares) {
    const auto label = labels.find(share.payer);
    const bool named = label != labels.end();
    const auto add = [&](const char* of, uint64_t bytes) {
      const std::string tier = share.device == CacheConfig::kHost ? "host" : absl::StrCat("gpu", share.device);
      series[{{"tenant", named ? label->second : kOthers}, {"tier", tier}, {"of", of}}] += double(bytes);
    };
    add("used", share.bytes);
    add("guaranteed", share.guaranteed_bytes);
    if (named) add("most", share.most_bytes);  // no sum of bounds says anything
  }
  Set(&pool_bytes_, series);
}

void TenantGauges::SetUse(const CacheDirectory& caches) {
  // A tenant may have thousands of caches: they are added up before they get names.
  absl::flat_hash_map<std::pair<std::string, int>, CacheUse> sums;
  caches.ForEachUse([&sums](const CacheUse& cache) {
    CacheUse& sum = sums[{std::string(cache.tenant), cache.device}];
    sum.sequences += cache.sequences;
    sum.published_blocks += cache.published_blocks;
    sum.raw_bytes += cache.raw_bytes;
    sum.encoded_bytes += cache.encoded_bytes;
    sum.activation_bytes += cache.activation_bytes;
  });
  std::map<std::string, Use> tenants;
  for (const auto& [of, sum] : sums) {
    const auto& [tenant, device] = of;
    Use& use = tenants[tenant];
    const std::string tier = device == CacheConfig::kHost ? "host" : absl::StrCat("gpu", device);
    use.bytes[{tier, "raw"}] += sum.raw_bytes;
    use.bytes[{tier, "encoded"}] += sum.encoded_bytes;
    use.bytes[{tier, "activation"}] += sum.activation_bytes;
    use.all_bytes += sum.raw_bytes + sum.encoded_bytes + sum.activation_bytes;
    use.sequences += sum.sequences;
    use.published_blocks += sum.published_blocks;
  }
  std::vector<std::pair<uint64_t, std::string>> by_size;
  by_size.reserve(tenants.size());
  for (const auto& [tenant, use] : tenants) by_size.emplace_back(use.all_bytes, tenant);
  std::sort(by_size.rbegin(), by_size.rend());
  Series bytes, sequences, published_blocks;
  for (size_t i = 0; i < by_size.size(); ++i) {
    const Use& use = tenants[by_size[i].second];
    const std::string label = i < kTenantsMax ? TenantLabel(by_size[i].second) : kOthers;
    for (const auto& [key, of] : use.bytes) {
      bytes[{{"tenant", label}, {"tier", key.first}, {"form", key.second}}] += double(of);
    }
    sequences[{{"tenant", label}}] += double(use.sequences);
    published_blocks[{{"tenant", label}}] += double(use.published_blocks);
  }
  Set(&bytes_, bytes);
  Set(&sequences_, sequences);
  Set(&published_blocks_, published_blocks);
}

void TenantGauges::Set(Family* family, const Series& series) {
  for (auto it = family->gauges.begin(); it != family->gauges.end();) {
    if (series.contains(it->first)) {
      ++it;
      continue;
    }
    metrics_->RemoveGauge(family->name, family->help, it->second);
    it = family->gauges.erase(it);
  }
  for (const auto& [labels, value] : series) {
    prometheus::Gauge*& gauge = family->gauges[labels];
    if (gauge == nullptr) gauge = &metrics_->Gauge(family->name, family->help, labels);
    gauge->Set(value);
  }
}

}  // namespace kvmanager
