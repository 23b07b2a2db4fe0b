// Codecs as a user names them, calibration=FILE being a path, and as a daemon reads them: names in its directory.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace kvmanager::engine {

struct CodecFiles {
  std::string codec;      // for the daemon
  std::string directory;  // of the files, for --calibration-dir; empty: no file was named
  /// Of the one artifact that all files are, for the daemon to compare with its own; empty: none was named, or several.
  std::string calibration_digest;
};

/// Replaces each calibration=PATH in `codec` (a codec or a policy). own_daemon: one is to be started, with `directory`:
/// every file must be there, in one directory. Else a value may also be a name that only the daemon knows: what is not
/// a file here is passed on, without its directory; of what is one, the daemon must have an equal one. Errors:
/// NOT_FOUND (no such file), INVALID_ARGUMENT (no artifact; files in several directories), saying what to do.
absl::StatusOr<CodecFiles> ResolveCodecFiles(const std::string& codec, bool own_daemon);

}  // namespace kvmanager::engine
