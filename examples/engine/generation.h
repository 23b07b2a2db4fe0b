// Generating text: sampling, prefill in chunks, and what a prefill host tells a decode host besides the cache.
//
// SamplingState and HandOffBlob are values; the functions here run on the thread of the runner that they are given.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "examples/engine/model.h"

namespace kvmanager::engine {

struct SamplingState {
  static constexpr double kTemperatureMax = 100;
  double temperature = 0;     // 0: the most likely token; at most kTemperatureMax
  uint64_t random_state = 0;  // of SplitMix64; moves with every sampled token
};

/// Draws a token. logits: [vocab]. Equal states and logits give equal tokens.
uint32_t Sample(absl::Span<const float> logits, SamplingState* state);

/// The opaque blob of a hand-off: where the decode host goes on.
struct HandOffBlob {
  static constexpr size_t kBytesMax = 4096;
  uint64_t prompt_tokens = 0;
  uint32_t first_token = 0;  // sampled from the prompt's last logits; its K and V are not computed yet
  SamplingState sampling;
};

std::string EncodeBlob(const HandOffBlob& blob);
/// Errors: INVALID_ARGUMENT naming field, value and bound.
absl::StatusOr<HandOffBlob> DecodeBlob(absl::string_view bytes, int vocab_size);

/// Runs tokens[position..] of `sequence` in chunks; `logits` [vocab] are those of the last token. progress(tokens
/// done).
absl::Status Prefill(Runner& runner, uint64_t sequence, absl::Span<const uint32_t> tokens, uint64_t position, int chunk,
                     absl::FunctionRef<void(uint64_t)> progress, std::vector<float>* logits);

/// Generates `count` tokens, the first of which is `first`; on_token(token) for each as it is known. `position` is
/// where `first` goes. Appends them to `generated`; K and V of all but the last are then in the cache.
absl::Status Decode(Runner& runner, uint64_t sequence, uint64_t position, uint32_t first, int count,
                    SamplingState* sampling, absl::FunctionRef<void(uint32_t)> on_token,
                    std::vector<uint32_t>* generated);

}  // namespace kvmanager::engine
