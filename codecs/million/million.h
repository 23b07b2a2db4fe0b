// MILLION as a codec: what main() registers, and what tests and other codecs make directly.
#pragma once

#include <memory>
#include <string>

#include "codecs/codec.h"
#include "codecs/million/million_codebooks.h"
#include "codecs/million/million_format.h"
#include "codecs/registry.h"

namespace kvmanager {

/// Adds "million" (docs/codecs.md) to `registry`.
void RegisterMillion(CodecRegistry& registry);

/// The codec of one format and codebooks, which are read before this returns and need not stay. It encodes, decodes and
/// attends in the space that the codebooks were trained in: a codec that rotates K and V first hands it rotated pages
/// and rotated queries. info().spec and calibration_digest are as given.
std::unique_ptr<Codec> MakeMillionCodec(const million::MillionFormat& format,
                                        const million::MillionCodebooks& codebooks, std::string spec,
                                        std::string calibration_digest = "");

namespace million {

/// Codebooks of an artifact: tensors "PREFIX.k.m{M}.b{B}" and "PREFIX.v.m{M}.b{B}", F16 [layers, kv_heads, M, 2^B,
/// head_dim / M], or [1, 1, ...] with format.parameters.whole_model. Valid as long as the artifact. Errors: those of
/// Calibration::Halves, with `made_by` the --codec that makes them.
absl::StatusOr<MillionCodebooks> CodebooksOf(const Calibration& calibration, const std::string& prefix,
                                             const MillionFormat& format, const std::string& made_by);

}  // namespace million
}  // namespace kvmanager
