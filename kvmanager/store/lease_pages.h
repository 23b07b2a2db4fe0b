// How many pages leases read, each time that one names it, and their bounds: of all, and of one payer, so that another
// finds room. The store's thread.
#pragma once

#include <algorithm>
#include <cstdint>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/slot_pool.h"
#include "kvmanager/store/step_lease.h"

namespace kvmanager {

class LeasePages {
 public:
  /// Whether leases of a payer may read `pages` more. Errors: RESOURCE_EXHAUSTED.
  absl::Status Check(PayerId payer, uint64_t pages) const {
    const auto of_payer = of_payer_.find(payer);
    const uint64_t own = of_payer == of_payer_.end() ? 0 : of_payer->second;
    KV_RETURN_IF_ERROR(Check("pages under this tenant's attend leases", own, pages, kTenantLeasePagesMax));
    return Check("pages under attend leases", all_, pages, kLeasePagesMax);
  }
  /// They may.
  void Add(PayerId payer, uint64_t pages) {
    if (pages == 0) return;
    all_ += pages;
    of_payer_[payer] += pages;
  }
  void Remove(PayerId payer, uint64_t pages) {
    if (pages == 0) return;
    all_ -= pages;
    const auto of_payer = of_payer_.find(payer);
    if ((of_payer->second -= pages) == 0) of_payer_.erase(of_payer);
  }

  uint64_t all() const { return all_; }
  /// Of the payer who has most.
  uint64_t most() const {
    uint64_t most = 0;
    for (const auto& [payer, pages] : of_payer_) most = std::max(most, pages);
    return most;
  }

 private:
  static absl::Status Check(const char* field, uint64_t used, uint64_t pages, uint64_t most) {
    if (pages <= most - used) return absl::OkStatus();
    return FieldError(absl::StatusCode::kResourceExhausted, field, absl::StrCat(used, " and ", pages, " more"),
                      absl::StrCat("at most ", most));
  }

  uint64_t all_ = 0;
  absl::flat_hash_map<PayerId, uint64_t> of_payer_;  // none is 0
};

}  // namespace kvmanager
