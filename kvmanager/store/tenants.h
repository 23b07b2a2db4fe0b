// The numbers of tenants in pools, and who pays for them. On the store's thread.
#pragma once

#include <cstddef>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "kvmanager/memory/slot_pool.h"
#include "kvmanager/store/payers.h"

namespace kvmanager {

class Tenants {
 public:
  struct Tenant {
    TenantId id = 0;
    PayerId payer = 0;
    size_t holds = 0;
  };

  /// payers: outlives it.
  explicit Tenants(Payers* payers) : payers_(payers) {}
  Tenants(const Tenants&) = delete;
  Tenants& operator=(const Tenants&) = delete;

  /// Of a tenant's full name: the number stays until as many calls of Drop.
  Tenant Hold(const std::string& name) {
    Tenant& tenant = tenants_[name];
    if (tenant.holds++ == 0) {
      tenant.id = next_++;
      tenant.payer = payers_->Hold(name, tenant.id);
    }
    return tenant;
  }
  void Drop(const std::string& name) {
    const auto tenant = tenants_.find(name);
    if (--tenant->second.holds > 0) return;
    payers_->Drop(name, tenant->second.id);
    tenants_.erase(tenant);
  }
  /// REQUIRES: it is held.
  const Tenant& at(const std::string& name) const { return tenants_.at(name); }

 private:
  Payers* const payers_;
  TenantId next_ = 1;
  absl::flat_hash_map<std::string, Tenant> tenants_;
};

}  // namespace kvmanager
