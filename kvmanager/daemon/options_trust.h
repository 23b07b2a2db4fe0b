// Which listeners others may reach, and what they must prove there: the part of Options's checks that is about trust.
// Pure, but for looking whether files are there.
#pragma once

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kvmanager/daemon/options.h"

namespace kvmanager {

/// peer_tenants, peer_tls: as given, the former lists with commas. Sets Options::peer_tenants. Errors: INVALID_ARGUMENT
/// naming the flag.
absl::Status CheckTrust(const std::vector<std::string>& peer_tenants, absl::string_view peer_tls, Options* options);

}  // namespace kvmanager
