// Pages and queries as a model has them, drawn from a capture (docs/calibration.md) for the checks of attention.
//
// A layer and head of the codec gets what the capture holds of that layer and head. Equal seeds draw equal data.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "codecs/calibrate/capture.h"
#include "kvmanager/base/page_layout.h"

namespace kvmanager::conformance {

/// Errors: INVALID_ARGUMENT if pages of `layout` cannot be drawn: other heads or head_dim, fewer tokens than a page's.
absl::Status CheckCapture(const calibrate::Capture& capture, const PageLayout& layout);

/// A run of page_tokens tokens, which starts at a multiple of page_tokens. Errors: a value that is not finite in the
/// layout's type, with its place. REQUIRES: CheckCapture.
absl::Status DrawPage(const calibrate::Capture& capture, const PageLayout& layout, int layer, uint32_t seed,
                      uint8_t* raw);

/// [rows][head_dim], of random tokens and query heads of the KV head's group. Errors: a value that is not finite.
absl::StatusOr<std::vector<float>> DrawQueries(const calibrate::Capture& capture, int layer, int kv_head, int rows,
                                               uint32_t seed);

}  // namespace kvmanager::conformance
