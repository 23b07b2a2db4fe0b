// Ways to share heads of unequal ranks among workers, and how long the busiest worker then takes: the paper's, and what
// this project's plan does, for comparison (docs/codecs.md). Pure functions; costs are in any unit, such as bytes.
#pragma once

#include <vector>

#include "absl/types/span.h"

namespace kvmanager::zack {

/// Heads in their order, the same number (or one more) for each worker: what a plan that is blind to ranks does.
double MakespanByHeads(absl::Span<const double> costs, int workers);

/// Sort by cost, descending; each head goes to the worker with the least assigned so far (papers: ZACK, section 5.3,
/// "Decode"). A head is never divided.
double MakespanSortAndAssign(absl::Span<const double> costs, int workers);

/// Each head's length is cut into `parts`, and the pieces are assigned likewise: work by bytes, whichever head they
/// belong to, plus `merge_cost` for each piece beyond a head's first.
double MakespanByBytes(absl::Span<const double> costs, int workers, int parts, double merge_cost);

}  // namespace kvmanager::zack
