// Exit codes of a program from a Status: 0 done, 1 it could not be done, 2 the command line is wrong.
//
// Pure functions; any thread.
#pragma once

#include "absl/status/status.h"

namespace kvmanager {

inline constexpr int kExitDone = 0, kExitFailed = 1, kExitMisused = 2;

/// `status` as an error of the command line by itself: no file and no daemon would make it right. OK stays OK.
absl::Status Misuse(absl::Status status);
bool IsMisuse(const absl::Status& status);

/// kExitDone for OK, kExitMisused for what Misuse made, else kExitFailed.
int ExitCodeOf(const absl::Status& status);

}  // namespace kvmanager
