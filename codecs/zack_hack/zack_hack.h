// ZACK+HACK: K and V rotated by ZACK's factors in all channels, each segment of 16 rotated channels with a width of its
// own from calibration (0..4 bits, of K with allocation=model also 8), encoded as HACK pages that attention multiplies
// (docs/codecs.md, "ZACK+HACK").
//
//   zack+hack:mode=balanced,bytes=76,allocation=head,fold=0,v_norm=1,calibration=NAME
//   zack+hack:mode=balanced,k_bits=1.5,v_bits=1,allocation=model,fold=0,v_norm=1,calibration=NAME
//
// mode: joint | balanced; by default what won on the calibration text. k_bits, v_bits: average bits per channel, 0..4
// (2 and 1 where only the other is given). bytes: of a token and KV head as stored, K and V with metadata, norms and
// padding; 38 head_dim / 64 by default. allocation: head: every layer and head gets the same; model: all share one
// budget, by sensitivity. By default what the artifact says. fold: outputs stay rotated, for a client that folds the
// way back into W_O. v_norm: V's norms by token are stored apart, as hack does.
//
// What a budget buys: an average of b bits is round(b * head_dim / 16) bits for the segments of a head and side
// (allocation=head; ties to even, as the reference), or round(b * head_dim / 16 * layers * kv_heads) for those of a
// side in all layers and heads (allocation=model; in a policy, the layers that the codec serves). bytes pays codes and
// what a record has beside them: what is stored never exceeds it, with allocation=model in the mean over layers and
// heads.
#pragma once

#include <memory>

#include "codecs/codec.h"
#include "codecs/cpu_isa.h"
#include "codecs/registry.h"
#include "codecs/zack_hack/allocation.h"

namespace kvmanager {

/// Adds "zack+hack" to `registry`.
void RegisterZackHack(CodecRegistry& registry);

namespace zack_hack {

/// Of zack+hack's spec and pages; the pages' own format is hack's.
inline constexpr uint32_t kFormatVersion = 2;

enum class Allocation : uint8_t { kHead, kModel };

struct ZackHackParameters {
  std::string mode;
  double bytes = 0;         // or, where bits are given, NaN
  double bits[2] = {0, 0};  // average of K, V; only where bytes is NaN
  Allocation allocation = Allocation::kHead;
  bool fold = false;
  bool v_norm = true;
};

/// bytes where nothing is said: 38 at 64 channels.
inline double DefaultBytes(const PageLayout& layout) { return 38.0 * layout.head_dim / 64; }

/// Checks `parameters` and fills in what they leave to the artifact. Errors: INVALID_ARGUMENT with field, value, bound;
/// FAILED_PRECONDITION without an artifact.
absl::StatusOr<ZackHackParameters> ParseParameters(const CodecContext& context, const CodecParameters& parameters);
/// Energies and, if `sensitivity`, sensitivities of an artifact. Errors: those of Calibration's readers;
/// INVALID_ARGUMENT for an element that is negative; FAILED_PRECONDITION for sensitivities that were not measured.
absl::StatusOr<SegmentEnergies> ReadEnergies(const CodecContext& context, absl::string_view mode, bool sensitivity);
/// The widths that checked parameters buy.
LayerWidths MakeWidths(const ZackHackParameters& parameters, const PageLayout& layout, const SegmentEnergies& energies);

/// The codec of given widths. isa: of encoding, at most what the processor runs. Errors: those of ReadFactors; an order
/// that is no permutation.
absl::StatusOr<std::unique_ptr<Codec>> MakeCodec(const CodecContext& context, const ZackHackParameters& parameters,
                                                 const LayerWidths& widths, Isa isa = BestIsa());
/// All of the above.
absl::StatusOr<std::unique_ptr<Codec>> MakeCodec(const CodecContext& context, const CodecParameters& parameters,
                                                 Isa isa = BestIsa());

}  // namespace zack_hack
}  // namespace kvmanager
