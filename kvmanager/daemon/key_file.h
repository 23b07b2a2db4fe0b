// Secrets that the daemon reads at start. Any thread.
#pragma once

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvmanager {

/// The bytes of a file that its owner alone can read, the owner being this process's user or root. Errors:
/// INVALID_ARGUMENT naming `flag`, the file and what to do.
absl::StatusOr<std::string> ReadKeyFile(absl::string_view flag, const std::string& path, size_t bytes_min,
                                        size_t bytes_max);

}  // namespace kvmanager
