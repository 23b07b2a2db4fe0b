// Reads files that decide about trust: keys, certificates, lists of tenants. Nobody but this process's user and root
// may have written them, nor read those that are secret.
//
// Any thread; it blocks as files do, but for no pipe and no device.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace kvmanager {

struct PrivateFile {
  std::string text;
  mode_t mode = 0;  // as fstat gives it
};

struct PrivateFileRules {
  bool secret = false;  // its owner alone can read it, too
  size_t bytes_min = 1, bytes_max = 0;
  std::string made_by = {};  // a command that makes one, for errors; empty: none is named
  uid_t owner = geteuid();   // whose it may be, besides root's
};

/// A regular file of rules.owner or of root. Errors: INVALID_ARGUMENT naming `flag`, the file, and what is wrong
/// with it: it cannot be read, its kind, owner, mode (and the chmod that mends it) or length.
absl::StatusOr<PrivateFile> ReadPrivateFile(absl::string_view flag, const std::string& path,
                                            const PrivateFileRules& rules);

}  // namespace kvmanager
