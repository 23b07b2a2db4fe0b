// Checks the bytes of a full page that came from outside, before anything computes on them.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "kvmanager/store/cache.h"

namespace kvmanager {

/// Whether a page of K and V of `layer` is safe to compute on. raw: the page is in its raw form, which must be finite;
/// else its codec must accept it. bytes: of that form, whole. Any thread. Errors: INVALID_ARGUMENT naming `field` and
/// the place, the codec's.
absl::Status CheckPageValues(const Cache& cache, uint32_t layer, bool raw, absl::Span<const uint8_t> bytes,
                             absl::string_view field);
/// CheckPageValues, and the page's checksum.
absl::StatusOr<uint64_t> CheckPageBytes(const Cache& cache, uint32_t layer, bool raw, absl::Span<const uint8_t> bytes,
                                        absl::string_view field);

}  // namespace kvmanager
