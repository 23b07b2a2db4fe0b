// PQ: pages stay raw, and a decode query reads the part of the context that product-quantised keys say matters
// (PQCache).
#pragma once

#include "codecs/registry.h"

namespace kvmanager {

/// Adds "pq" to `registry`; parameters: codecs/pq/pq_parameters.h.
void RegisterPq(CodecRegistry& registry);

}  // namespace kvmanager
