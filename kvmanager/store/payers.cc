#include "kvmanager/store/payers.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/store/payer_name.h"

namespace kvmanager {
namespace {

// Apart from the numbers of tenants, by which a pool knows those of whom it was told nothing.
constexpr PayerId kFirstPayer = PayerId{1} << 31;

}  // namespace

PoolQuota Payers::QuotaIn(const std::string& name, const Tier& tier) const {
  const auto found = quotas_.tenants.find(name);
  const Quotas::Tenant none;
  const Quotas::Tenant& tenant = found == quotas_.tenants.end() ? none : found->second;
  const Quotas::InPool& of = tenant.In(tier.device());
  const uint64_t most = tier.pool()->capacity_bytes() * quotas_.most_percent / 100;
  return {of.guaranteed_bytes, std::max(of.guaranteed_bytes, of.most_bytes.value_or(most))};
}

void Payers::SetQuota(const std::string& name, PayerId id) {
  for (const auto& tier : *tiers_) tier->pool()->shares().SetQuota(id, QuotaIn(name, *tier));
}

Payers::Payer& Payers::Of(const std::string& name) {
  Payer& payer = payers_[name];
  if (payer.id == 0) payer.id = kFirstPayer + next_++;
  return payer;
}

PayerId Payers::Hold(absl::string_view tenant, TenantId id) {
  const std::string name(PayerName(tenant));
  if (!payers_.contains(name)) ForgetIdle();
  Payer& payer = Of(name);
  if (payer.tenants++ == 0) SetQuota(name, payer.id);
  for (const auto& tier : *tiers_) tier->pool()->SetPayer(id, payer.id);
  return payer.id;
}

void Payers::Drop(absl::string_view tenant, TenantId id) {
  const auto payer = payers_.find(PayerName(tenant));
  KV_CHECK(payer != payers_.end() && payer->second.tenants > 0);
  for (const auto& tier : *tiers_) tier->pool()->ForgetTenant(id);
  // What it has may outlast its tenants: slots that kernels may read, slabs that processes map.
  if (--payer->second.tenants == 0) ForgetIdle();
}

void Payers::ForgetIdle() {
  for (auto it = payers_.begin(); it != payers_.end();) {
    const auto payer = it++;
    if (payer->second.tenants > 0) continue;
    bool forgotten = true;
    for (const auto& tier : *tiers_) {
      if (QuotaIn(payer->first, *tier).guaranteed_bytes > 0) {
        forgotten = false;
      } else {
        forgotten &= tier->pool()->shares().Forget(payer->second.id);
      }
    }
    if (forgotten) payers_.erase(payer);
  }
}

absl::Status Payers::SetQuotas(Quotas quotas) {
  for (const auto& tier : *tiers_) {
    const uint64_t slab_bytes = tier->pool()->slab_bytes();
    uint64_t slabs = 0, tenants = 0, largest = 0;
    absl::string_view largest_name;
    for (const auto& [name, tenant] : quotas.tenants) {
      const uint64_t guaranteed = tenant.In(tier->device()).guaranteed_bytes;
      slabs += std::min<uint64_t>(guaranteed / slab_bytes + (guaranteed % slab_bytes > 0), UINT32_MAX);
      tenants += guaranteed > 0;
      if (guaranteed > largest || (guaranteed == largest && name < largest_name)) {
        largest = guaranteed;
        largest_name = name;
      }
    }
    if (slabs > tier->pool()->slabs()) {
      return InvalidField(
          tier->lower() == nullptr ? "host_bytes.guaranteed" : "gpu_bytes.guaranteed",
          absl::StrCat(std::min<uint64_t>(slabs, UINT32_MAX) * slab_bytes, " bytes for ", tenants,
                       " tenants, in whole slabs of ", slab_bytes, "; the most, ", largest, ", for ", largest_name),
          absl::StrCat("at most ", tier->pool()->slabs() * slab_bytes, " together, all that ", tier->pool()->limit(),
                       " has"));
    }
  }
  quotas_ = std::move(quotas);
  // Guarantees hold for those who have nothing yet, too.
  for (const auto& [name, tenant] : quotas_.tenants) Of(name);
  for (const auto& [name, payer] : payers_) SetQuota(name, payer.id);
  ForgetIdle();
  return absl::OkStatus();
}

std::vector<PoolShare> Payers::List() const {
  std::vector<PoolShare> all;
  for (const auto& [name, payer] : payers_) {
    for (const auto& tier : *tiers_) {
      const PoolShares::Account* const account = tier->pool()->shares().Find(payer.id);
      if (account == nullptr) continue;
      all.push_back({name, tier->device(), account->charge, account->guaranteed_bytes, account->most_bytes});
    }
  }
  return all;
}

void Payers::CheckInvariants() const {
  for (const auto& [name, payer] : payers_) {
    KV_CHECK(payer.id > kFirstPayer && payer.id < kFirstPayer + next_ && PayerName(name) == name);
    for (const auto& tier : *tiers_) KV_CHECK(payer.tenants == 0 || tier->pool()->shares().Find(payer.id) != nullptr);
  }
}

}  // namespace kvmanager
