// What this process tells whoever started it: systemd's protocol of Type=notify services (sd_notify(3)).
#pragma once

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace kvmanager {

/// Sends `state`, such as "READY=1", to the datagram socket that $NOTIFY_SOCKET names: an absolute path, or '@' and a
/// name without a file. Nothing where the variable is not set. Errors: INVALID_ARGUMENT naming NOTIFY_SOCKET,
/// UNAVAILABLE (nobody takes it).
absl::Status NotifySupervisor(absl::string_view state);

}  // namespace kvmanager
