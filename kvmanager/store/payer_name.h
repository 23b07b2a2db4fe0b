// Who pays for a tenant, by its full name: the one rule for bounds, workers' time and shares of the pool.
#pragma once

#include "absl/strings/string_view.h"

namespace kvmanager {

/// The user, or whatever else was proved, of a tenant whose full name rpc/principals.h put into a namespace: "uid:1001"
/// of "uid:1001/x", "tcp:" of "tcp:/x". Other tenants, which --tenants lists or which are the daemon's own user's, pay
/// for themselves.
inline absl::string_view PayerName(absl::string_view tenant) {
  for (const absl::string_view prefix : {"uid:", "tcp:", "cert:"}) {
    if (tenant.substr(0, prefix.size()) == prefix) return tenant.substr(0, tenant.find('/', prefix.size()));
  }
  return tenant;
}

}  // namespace kvmanager
