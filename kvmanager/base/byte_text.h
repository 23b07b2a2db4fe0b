// Numbers of bytes as people write them.
//
// A pure function; any thread.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvmanager {

/// "123", "64KiB", "1.5GiB" (KiB, MiB, GiB, TiB), of low..high. `field` names the value in errors. Errors:
/// INVALID_ARGUMENT, always with the bounds.
absl::StatusOr<uint64_t> ParseBytes(absl::string_view field, absl::string_view text, uint64_t low = 0,
                                    uint64_t high = UINT64_MAX);

}  // namespace kvmanager
