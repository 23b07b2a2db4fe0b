// One step's queries of one sequence and layer: a snapshot of the index's codes, the codes of tokens that came since,
// and the sparse selection itself. See TokenSelector for who calls what.
//
// Tokens that are not coded yet are coded by Prepare into memory of the selector; the index takes them over when the
// step is done, unless the sequence was cropped meanwhile. So what workers write nobody else reads, and steps of one
// sequence may overlap.
#pragma once

#include <memory>
#include <vector>

#include "codecs/pq/block_cache.h"
#include "codecs/pq/training.h"
#include "codecs/sequence_index.h"

namespace kvmanager::pq {

struct SelectorParts {
  struct Version {
    std::shared_ptr<const Training> training;  // shared: the index may drop it meanwhile
    Codes codes;
    uint64_t needed = 0;  // tokens that must be coded
  };
  std::shared_ptr<const Shape> shape;
  int layer = 0;
  uint64_t first_position = 0;
  uint64_t prompt_tokens = 0;
  uint64_t crops = 0;
  std::vector<Version> versions;                    // ascending in tokens trained on; empty with exact scores
  std::vector<std::shared_ptr<BlockCache>> caches;  // [kv_heads] or empty; shared with the index
  Codes next_layer;                                 // to prefetch
};

std::unique_ptr<TokenSelector> MakeSelector(SelectorParts parts);

/// What a selector, made by MakeSelector, prepared in full.
struct PreparedCodes {
  struct Version {
    uint64_t trained = 0;
    uint64_t first = 0, count = 0;  // tokens
    std::shared_ptr<const CodeChunk> codes;
  };
  int layer = 0;
  uint64_t crops = 0;
  std::vector<Version> versions;
};
PreparedCodes PreparedOf(const TokenSelector& selector);

}  // namespace kvmanager::pq
