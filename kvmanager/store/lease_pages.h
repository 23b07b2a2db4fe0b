// How many pages leases read, each time that one names it, and their bounds: of all, and of one payer, so that another
// finds room. The store's thread.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/owner_counts.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/slot_pool.h"
#include "kvmanager/store/step_lease.h"

namespace kvmanager {

class LeasePages {
 public:
  /// Whether leases of a payer may read `pages` more. Errors: RESOURCE_EXHAUSTED.
  absl::Status Check(PayerId payer, uint64_t pages) const {
    KV_RETURN_IF_ERROR(
        Check("pages under this tenant's attend leases", counts_.Of(payer), pages, kTenantLeasePagesMax));
    return Check("pages under attend leases", counts_.all(), pages, kLeasePagesMax);
  }
  /// They may.
  void Add(PayerId payer, uint64_t pages) { counts_.Add(payer, pages); }
  void Remove(PayerId payer, uint64_t pages) { counts_.Remove(payer, pages); }

  uint64_t all() const { return counts_.all(); }
  uint64_t most() const { return counts_.most(); }

 private:
  static absl::Status Check(const char* field, uint64_t used, uint64_t pages, uint64_t most) {
    if (pages <= most - used) return absl::OkStatus();
    return FieldError(absl::StatusCode::kResourceExhausted, field, absl::StrCat(used, " and ", pages, " more"),
                      absl::StrCat("at most ", most));
  }

  OwnerCounts<PayerId> counts_;
};

}  // namespace kvmanager
