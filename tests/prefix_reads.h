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

/// K and V of tokens 0 .. tokens - 1 of one layer of a sequence: [tokens][kv_heads][head_dim] each. Errors:
/// Cache::Read's.
inline absl::StatusOr<ModelSequence::Rows> ReadLayer(client::Cache& cache, uint64_t sequence, int layer, int tokens) {
  const client::CacheOptions& shape = cache.description().options;
  ModelSequence::Rows rows;
  rows.k.resize(static_cast<size_t>(tokens) * shape.kv_heads * shape.head_dim * DTypeBytes(shape.dtype));
  rows.v.resize(rows.k.size());
  client::StepEntry entry;
  entry.sequence = sequence;
  entry.tokens = tokens;
  client::ReadBatch batch;
  batch.layer = layer;
  batch.entries = {&entry, 1};
  batch.k = client::TensorView::Inline(rows.k.data(), rows.k.size());
  batch.v = client::TensorView::Inline(rows.v.data(), rows.v.size());
  KV_RETURN_IF_ERROR(cache.Read(batch).status());
  return rows;
}

/// Reads tokens 0 .. tokens - 1 of a sequence that began with them by a hit. The first layer whose K or V are not what
/// the codec gives back of `source`; kNoLayer: all are. Errors: Cache::Read's.
inline absl::StatusOr<int> LayerThatDiffers(client::Cache& cache, uint64_t sequence, const Source& source, int tokens) {
  ModelSequence model(source.shape);
  LoadModel(model, source, 0, tokens, 1024);
  model.MarkShared(static_cast<uint64_t>(tokens));
  for (int layer = 0; layer < source.shape.layers; ++layer) {
    const ModelSequence::Rows expected = model.Read(layer, 0, tokens);
    KV_ASSIGN_OR_RETURN(const ModelSequence::Rows rows, ReadLayer(cache, sequence, layer, tokens));
    if (rows.k != expected.k || rows.v != expected.v) return layer;
  }
  return kNoLayer;
}

}  // namespace kvmanager::testing
