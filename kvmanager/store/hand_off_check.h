// What a stranger says of a sequence that it hands over, before anything is reserved for it.
#pragma once

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvmanager/base/ids.h"
#include "kvmanager/store/cache.h"
#include "kvmanager/store/hand_off_lease.h"

namespace kvmanager {

/// Names of blocks, each key once. seen: keys so far. Errors: INVALID_ARGUMENT naming the entry of `field`.
absl::Status CheckBlockNames(absl::string_view field, absl::Span<const HandOffBlock> blocks,
                             absl::flat_hash_set<BlockKey>* seen);
/// Whether `first` is of one piece: blocks and pages as its token count says, with the sizes of the cache's forms.
/// Errors: INVALID_ARGUMENT with field, value and bound.
absl::Status CheckFirst(const Cache& cache, const HandOffHeader& first);

}  // namespace kvmanager
