// What a tenant is called where others may read it: metrics, the daemon's page, errors of other tenants' calls.
//
// A pure function; any thread.
#pragma once

#include <string>

#include "absl/strings/string_view.h"

namespace kvmanager {

/// A tenant's name is a salt: who knows it may name its blocks. So it is shown as the first eight hexadecimal digits of
/// its SHA-256 (`printf %s NAME | sha256sum`), and "none" if it is empty.
std::string TenantLabel(absl::string_view tenant);

}  // namespace kvmanager
