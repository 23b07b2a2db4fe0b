// How many pages leases read, each time that one names it, and their bounds: of all, and of one payer, so that another
// finds room. The store's thread.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kvmanager/base/owner_counts.h"
#include "kvmanager/base/status.h"
#include "kvmanager/memory/slot_pool.h"
#include "kvmanager/store/block_transfers.h"
#include "kvmanager/store/step_lease.h"

namespace kvmanager {

class LeasePages {
 public:
  /// What errors name, and how many there may be.
  struct Bounds {
    const char* of_payer = "";
    const char* of_all = "";
    uint64_t payer_most = 0, most = 0;
  };
  /// Pages that calls under way read.
  static constexpr Bounds kCalls{"pages under this tenant's attend leases", "pages under attend leases",
                                 kTenantLeasePagesMax, kLeasePagesMax};
  /// Pages that clients read where they lie.
  static constexpr Bounds kMapped{"pages that this tenant reads where they lie", "pages that are read where they lie",
                                  kTenantMappedPagesMax, kMappedPagesMax};

  explicit LeasePages(const Bounds& bounds) : bounds_(bounds) {}

  /// Whether leases of a payer may read `pages` more. Errors: RESOURCE_EXHAUSTED.
  absl::Status Check(PayerId payer, uint64_t pages) const {
    KV_RETURN_IF_ERROR(Check(bounds_.of_payer, counts_.Of(payer), pages, bounds_.payer_most));
    return Check(bounds_.of_all, counts_.all(), pages, bounds_.most);
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

  const Bounds bounds_;
  OwnerCounts<PayerId> counts_;
};

}  // namespace kvmanager
