// Numbers of bytes as people write them.
//
// A pure function; any thread.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvmanager {

/// "123", "64KiB", "1.5GiB" (KiB, MiB, GiB, TiB). `field` names the value in errors.
absl::StatusOr<uint64_t> ParseBytes(absl::string_view field, absl::string_view text);

}  // namespace kvmanager
