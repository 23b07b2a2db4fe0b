// Measuring what a unit of energy lost costs in one part of the model: the artifact's zack_hack.{mode}.sensitivity.
//
// A part is a side of one layer, of one KV head or of all. Its probe is a zack+hack codec that codes the part coarsely
// (k_bits=1, v_bits=0.5), the rest of the layer in 8 bits, and declines every other layer's pages, which stay raw. Run
// the model over a window of calibration text raw and with the probe; then
//
//   sensitivity = mean over tokens of KL(raw prediction || probe's prediction) / energy that the probe loses.
//
// Divergence and not the difference of the losses: it is never negative, and so steady that one window of 2048 tokens
// per part gives the allocation of many. Functions of their arguments; any thread.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "codecs/codec.h"

namespace kvmanager::zack_hack {

struct Part {
  static constexpr int kAllHeads = -1;
  int layer = 0;
  int kv_head = kAllHeads;
  int side = 0;  // 0: K, 1: V
};

/// context.calibration: an artifact with the factors, order and energies of `mode`; its sensitivities are not read.
/// Errors: as zack+hack's; INVALID_ARGUMENT for a part that is not there.
absl::StatusOr<std::unique_ptr<Codec>> MakeProbe(const CodecContext& context, absl::string_view mode, const Part& part);

/// Energy that the part's probe loses, of all its heads; at least a tiny positive number, to divide by.
absl::StatusOr<double> ProbeLoss(const CodecContext& context, absl::string_view mode, const Part& part);

/// Mean over rows of KL(softmax(raw) || softmax(coded)), in nats; both [rows][vocabulary].
double MeanDivergence(absl::Span<const float> raw, absl::Span<const float> coded, size_t vocabulary);

}  // namespace kvmanager::zack_hack
