// Who pays for the memory of tenants: what each payer is guaranteed, and may have at most, in each memory. On the
// store's thread.
//
// One user has one share however many names it gives its tenants: PayerName says whose they are.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kvmanager/memory/slot_pool.h"
#include "kvmanager/store/quotas.h"
#include "kvmanager/store/tier.h"

namespace kvmanager {

class Payers {
 public:
  /// tiers: outlive it.
  explicit Payers(const std::vector<std::unique_ptr<Tier>>* tiers) : tiers_(tiers) {}
  Payers(const Payers&) = delete;
  Payers& operator=(const Payers&) = delete;

  /// Who pays for a tenant of this full name and number, in every memory. One call of Drop for each.
  PayerId Hold(absl::string_view tenant, TenantId id);
  void Drop(absl::string_view tenant, TenantId id);

  absl::Status SetQuotas(Quotas quotas);  // StoreReport's
  std::vector<PoolShare> List() const;
  void CheckInvariants() const;

 private:
  struct Payer {
    PayerId id = 0;
    size_t tenants = 0;
  };
  Payer& Of(const std::string& name);
  void SetQuota(const std::string& name, PayerId id);
  PoolQuota QuotaIn(const std::string& name, const Tier& tier) const;
  /// Forgets those without tenants, memory and guarantees.
  void ForgetIdle();

  const std::vector<std::unique_ptr<Tier>>* const tiers_;
  PayerId next_ = 1;
  absl::flat_hash_map<std::string, Payer> payers_;
  Quotas quotas_;
};

}  // namespace kvmanager
