// A sequence's PQ index: per layer, codebooks of its keys and the codes of its tokens.
//
// Invariants:
//  1. The codebooks that a query at position p uses were trained on tokens 0 .. T(p) - 1, T being
//     Parameters::TrainedTokens of the sequence's prompt: its own tokens and prompt decide, nothing else.
//  2. A version's codes are those of a prefix of the layer's tokens, at least of the tokens it was trained on.
//  3. The number of iterations is chosen once, at the first training, and is then the sequence's: forks and hand-offs
//     take it along, so that they train alike.
//  4. At most kVersionsKept versions per layer stay between calls; one that is needed again is trained again, alike.
#pragma once

#include <memory>
#include <vector>

#include "codecs/pq/block_cache.h"
#include "codecs/pq/training.h"
#include "codecs/sequence_index.h"

namespace kvmanager::pq {

inline constexpr size_t kVersionsKept = 2;

std::unique_ptr<SequenceIndex> MakeIndex(std::shared_ptr<const Shape> shape, const IndexFacts& facts);

}  // namespace kvmanager::pq
