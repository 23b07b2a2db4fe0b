// A model's KV cache in the daemon: a KvBackend on a client::Client.
//
// Owns the cache handle and the step's buffers: an arena that the daemon reads and writes in place, or plain memory
// copied through the socket where the daemon has no arena to give (TCP). Sequences belong to the caller. One thread,
// the client's; the client outlives it.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "examples/engine/kv_backend.h"
#include "examples/engine/model.h"

namespace kvmanager::engine {

struct KvEngineOptions {
  std::string codec = "raw";
  std::string calibration_digest;  // of the artifact that the codec names; empty: any
  int lag_pages = 2;
  int page_tokens = 64;
  int rows_max = 512;          // of a step, all sequences together
  uint64_t prompt_tokens = 0;  // KvCounts::prompt_computed counts positions below it
  /// Gives the daemon activations, and registers W_K and W_V: a hand-off may then send the one where the receiver is to
  /// recompute K and V, and the other daemon recompute here. All engines of a cache do, or none.
  bool activations = false;
};

struct KvCounts {
  uint64_t computed = 0;         // tokens whose K and V were computed here
  uint64_t prompt_computed = 0;  // of these, at positions below prompt_tokens
  uint64_t hit = 0;              // tokens that CreateSequence found
  uint64_t encoded_pairs = 0,
           raw_pairs = 0;  // (query, context) token pairs by the form they were read in, summed over layers
};

/// When steps of a layer ran, by the system's clock, in nanoseconds since 1970; 0: none did.
struct LayerSteps {
  int64_t first_begun_ns = 0, first_ended_ns = 0, last_ended_ns = 0;
};

class KvEngine final : public KvBackend {
 public:
  /// A step's inline tensors must fit one message with room to spare.
  static constexpr uint64_t kInlineBytesMax = 24 << 20;

  /// Opens the cache of `model`: its name, with the digest of its weights as revision. Errors: INVALID_ARGUMENT
  /// (rows_max, codec), and those of the client.
  static absl::StatusOr<std::unique_ptr<KvEngine>> Open(client::Client* client, const Model& model,
                                                        const KvEngineOptions& options);

  int rows_max() const override { return options_.rows_max; }
  StepBuffers buffers() override { return buffers_; }
  absl::Status AppendAndAttend(int layer, absl::Span<const KvEntry> entries) override;
  /// Where the codec folds its outputs (fold=1).
  absl::Span<const float> OutputWeights(int layer) const override { return folded_[layer]; }

  /// A sequence that begins with the longest published prefix of `tokens` that leaves at least one of them to compute.
  /// prompt_tokens: as client::Cache::CreateSequences.
  absl::StatusOr<client::CreatedSequence> CreateSequence(absl::Span<const uint32_t> tokens, uint64_t prompt_tokens = 0);
  /// Publishes the full blocks of `tokens`, all of which `sequence` holds.
  absl::StatusOr<client::PublishOutcome> Publish(client::Sequence& sequence, absl::Span<const uint32_t> tokens);

  client::Cache& cache() { return *cache_; }
  const KvCounts& counts() const { return counts_; }
  const std::vector<LayerSteps>& layer_steps() const { return steps_; }  // [layers]
  void set_prompt_tokens(uint64_t tokens) { options_.prompt_tokens = tokens; }
  bool uses_arena() const { return arena_ != nullptr; }

 private:
  KvEngine() = default;
  client::TensorView View(const void* data, size_t bytes) const;
  absl::Status FoldOutputs(const Model& model);
  absl::Status RegisterProjections(client::Client* client, const Model& model);

  KvEngineOptions options_;
  int layers_ = 0;
  size_t q_row_bytes_ = 0, kv_row_bytes_ = 0, x_row_bytes_ = 0;  // x: 0 without activations
  std::unique_ptr<client::Cache> cache_;
  std::unique_ptr<client::Projections> projections_;
  std::unique_ptr<client::Arena> arena_;  // nullptr: inline
  std::vector<float> inline_buffer_;
  uint8_t* base_ = nullptr;  // of the arena or the inline buffer
  StepBuffers buffers_;
  std::vector<std::vector<float>> folded_;  // [layers] W_O for outputs in the codec's space; empty: the model's
  std::vector<client::StepEntry> entries_;
  KvCounts counts_;
  std::vector<LayerSteps> steps_;
};

}  // namespace kvmanager::engine
