// Whether two flags of one command line name the same thing: the same folder, or the same address to listen on. Who
// opens it second would blame another process. The part of Options's checks that is about places.
// Pure, but for looking where paths lead.
#pragma once

#include "absl/status/status.h"
#include "kvmanager/daemon/options.h"

namespace kvmanager {

/// Folders: --disk-path and --state-dir, links followed. Addresses: each --listen, --admin-listen or what it is by
/// default, --metrics-listen, --http-listen and --peer-listen; port 0 is another one each time. Names of hosts are not
/// resolved. REQUIRES: addresses that can be parsed. Errors: INVALID_ARGUMENT naming both flags.
absl::Status CheckPlaces(const Options& options);

}  // namespace kvmanager
