// The plan of a batch some of whose queries choose what they read (codecs/sequence_index.h).
#pragma once

#include <memory>

#include "attention/attention.h"

namespace kvmanager {

/// Whether some query of the sequence is to choose.
bool IsSelective(const AttentionSequence& sequence);

/// The batch's other queries, and all of a batch without such, go by AttentionPlan::Make's ordinary plan.
std::unique_ptr<AttentionPlan> MakeSelectivePlan(const AttentionBatch& batch, int threads);

}  // namespace kvmanager
