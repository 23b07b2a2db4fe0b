// Sending a growing sequence of a GPU by way of the host: each page is copied into a slot there as soon as it is ready.
//
// What is exported out of the GPU's memory stays as it is (sequence_exports.cc); this takes its pages, copies them,
// has workers look at the copies, as at all that leaves a GPU, and offers those. Room for all of them is taken before
// the hand-off is offered, so that prefill cannot run into a full host.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "kvmanager/store/hand_off_lease.h"
#include "kvmanager/store/sequence_exports.h"

namespace kvmanager {

/// What `lease` exports out of `from`'s GPU, copied to the next lower tier. Errors: FAILED_PRECONDITION (a GPU that
/// moves no pages), UNAVAILABLE (pages cannot move yet), RESOURCE_EXHAUSTED.
absl::StatusOr<std::unique_ptr<ExportLease>> MakeHostExport(const SequenceExports::Parts& parts,
                                                            std::unique_ptr<ExportLease> lease,
                                                            const std::shared_ptr<Cache>& from);

}  // namespace kvmanager
