// What the programs of this folder share: files, progress on a terminal, and exit codes from a Status.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kvmanager/base/exit_code.h"

namespace kvmanager::engine {

/// The first bytes_max bytes of a file. Errors: NOT_FOUND.
absl::StatusOr<std::string> ReadFile(const std::string& path, uint64_t bytes_max = UINT64_MAX);
/// Replaces a file as a whole: a reader sees the old one or the new one.
absl::Status WriteFile(const std::string& path, absl::string_view content);
/// Before long work: whether WriteFile(path) would succeed in the end; what is there stays as it is. Errors:
/// INVALID_ARGUMENT (`option`: a directory), NOT_FOUND (its directory), UNAVAILABLE.
absl::Status CheckWritable(absl::string_view option, const std::string& path);
/// CheckWritable for FILE.safetensors. Errors: INVALID_ARGUMENT (empty, another extension), a misuse, too.
absl::Status CheckTensorsOut(absl::string_view option, const std::string& path);

/// A progress bar on stderr if that is a terminal, else a line at every tenth. One thread.
class Progress {
 public:
  Progress(std::string what, bool quiet);
  ~Progress();
  void Update(int64_t done, int64_t total);
  /// A line of its own beside the bar.
  void Say(absl::string_view line);

 private:
  const std::string what_;
  const bool quiet_, terminal_;
  int64_t shown_ = -1;  // steps of the bar
};

/// Of a command line that is wrong.
inline constexpr int kUsageExitCode = kExitMisused;

/// Prints "PROGRAM: CODE: message" and gives the exit code: ExitCodeOf(status).
int ExitCode(const char* program, const absl::Status& status);

/// Cores that this process may run on, at least 1.
int CoreCount();

}  // namespace kvmanager::engine
