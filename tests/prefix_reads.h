// Whether what a prefix hit gives is what was published: every token, by the model of the codec.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "client/client.h"
#include "kvmanager/base/status.h"
#include "tests/model.h"

namespace kvmanager::testing {

inline constexpr int kNoLayer = -1;

/// Reads tokens 0 .. tokens - 1 of a sequence that began with them by a hit. The first layer whose K or V are not what
/// the codec gives back of `source`; kNoLayer: all are. Errors: Cache::Read's.
inline absl::StatusOr<int> LayerThatDiffers(client::Cache& cache, uint64_t sequence, const Source& source, int tokens) {
  ModelSequence model(source.shape);
  LoadModel(model, source, 0, tokens, 1024);
  model.MarkShared(static_cast<uint64_t>(tokens));
  for (int layer = 0; layer < source.shape.layers; ++layer) {
    const ModelSequence::Rows expected = model.Read(layer, 0, tokens);
    std::vector<uint8_t> k(expected.k.size()), v(expected.v.size());
    client::StepEntry entry;
    entry.sequence = sequence;
    entry.tokens = tokens;
    client::ReadBatch batch;
    batch.layer = layer;
    batch.entries = {&entry, 1};
    batch.k = client::TensorView::Inline(k.data(), k.size());
    batch.v = client::TensorView::Inline(v.data(), v.size());
    KV_RETURN_IF_ERROR(cache.Read(batch).status());
    if (k != expected.k || v != expected.v) return layer;
  }
  return kNoLayer;
}

}  // namespace kvmanager::testing
