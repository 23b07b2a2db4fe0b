// What operators and tests ask of a whole store. On the store's thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/store/arrival_lease.h"
#include "kvmanager/store/explanation.h"
#include "kvmanager/store/page_executor.h"
#include "kvmanager/store/quotas.h"

namespace kvmanager {

/// How much of what is bounded is in use.
struct StoreUse {
  static constexpr size_t kSequencesMax = 65536;
  // Of one payer's tenants, so that another finds room.
  static constexpr size_t kTenantSequencesMax = kSequencesMax / 2;
  static constexpr uint64_t kTenantSharedBlocksMax = 16 << 20;  // that sequences began with: 8 bytes each, a sequence

  uint64_t caches = 0;  // CacheDirectory::kCachesMax
  uint64_t sequences = 0;
  uint64_t tenant_sequences = 0, tenant_shared_blocks = 0;  // of the payer who has most of each
  uint64_t tenant_lease_pages = 0, tenant_caches = 0;       // likewise
  uint64_t lease_pages = 0;                                 // kLeasePagesMax
  uint64_t mapped_pages = 0, tenant_mapped_pages = 0;       // kMappedPagesMax, kTenantMappedPagesMax
  uint64_t sent_pages = 0, tenant_sent_pages = 0;           // kSentPagesMax, kTenantSentPagesMax
  uint64_t encoding_pages = 0;    // sealed, and not encoded yet: a restart finds no block of theirs
  uint64_t unwritten_blocks = 0;  // published in host memory, and on their way to the disk or waiting for that
  uint64_t unclaimed_blocks = 0;  // of an earlier process, that no cache has taken so far
};

class StoreReport {
 public:
  virtual ~StoreReport() = default;
  virtual std::vector<SequenceId> SequenceIds() const = 0;  // ascending
  /// Of all payers, in all pools, in any order.
  virtual std::vector<PoolShare> Shares() const = 0;
  virtual StoreUse Use() const = 0;
  /// Where the blocks of these names are, or why they are not. cache: whose names they are; then it is also said which
  /// of the missing ones are there under other names. 0: of any cache, by their keys alone. Errors: NOT_FOUND (cache),
  /// INVALID_ARGUMENT (beyond CacheDirectory::kNamesMax).
  virtual absl::StatusOr<std::unique_ptr<Explanation>> BeginExplain(CacheId cache, std::vector<BlockName> names) = 0;
  /// Aborts if an invariant of the whole store does not hold (tests, and debug builds of the daemon on request).
  virtual void CheckInvariants() const = 0;
  /// What tenants may have of the pools from now on; nothing is evicted at once. Errors: INVALID_ARGUMENT if the
  /// guarantees, in whole slabs, do not fit a pool; nothing has changed then.
  virtual absl::Status SetQuotas(Quotas quotas) = 0;
  /// Before the first append; it outlives the store's use. nullptr: none, as at first.
  virtual void SetSampler(PageSampler* sampler) = 0;
};

}  // namespace kvmanager
