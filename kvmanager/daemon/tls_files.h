// Reads what a daemon speaks TLS with from the files that its options name. Any thread.
#pragma once

#include "absl/status/statusor.h"
#include "kvmanager/base/tls.h"
#include "kvmanager/daemon/options.h"

namespace kvmanager {

/// All nullptr without Options::tls_cert. The key must be a file that its owner alone can read, the others files that
/// nobody else can write; the owner is the daemon's user or root. Errors: INVALID_ARGUMENT naming flag and file.
absl::StatusOr<TlsContexts> ReadTlsFiles(const Options& options);

}  // namespace kvmanager
